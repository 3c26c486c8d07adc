"""What runs when DistributedDataParallel has finished a backward pass."""

from collections.abc import Callable
from typing import Any

from retime.foundations.torch_private import queue_callback

__all__ = ["at_end_of_backward"]


def at_end_of_backward(act: Callable[[], Any]) -> None:
    """Run ``act`` after DDP's own end-of-backward callback; called by its communication hook, with the last bucket.

    DDP queues its callback when the last bucket's hook has returned, so the queue is entered again from its end.
    """
    queue_callback(lambda: queue_callback(act))
