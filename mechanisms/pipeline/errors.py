"""What is said where a model cannot be spread over ranks, or a rank is gone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist

from retime.foundations.ddp import RankLostError, is_lost_message

__all__ = ["PipelineError", "RankLostError", "messages_of", "messages_of_group"]


class PipelineError(ValueError):
    """The model or the batch cannot go through a pipeline; the message says what to change."""


@contextmanager
def messages_of(whose: Callable[[], str]) -> Iterator[None]:
    """Inside, a message that does not come is a RankLostError.

    Args:
        whose: of which rank it is, asked then.

    Raises:
        RankLostError: a message did not come.
    """
    try:
        yield
    except RankLostError:
        raise
    except RuntimeError as error:
        if not is_lost_message(error):
            raise
        raise RankLostError(
            f"a message of {whose()} did not come, as it has ended or failed: look at its error. ({error})"
        ) from error


def messages_of_group(group: Any) -> Any:
    """As :func:`messages_of`, where all ranks of a group (None: all there are) send and receive."""

    def whose() -> str:
        others = [rank for rank in dist.get_process_group_ranks(group) if rank != dist.get_rank()]
        return f"rank {others[0]}" if len(others) == 1 else f"one of the ranks {', '.join(map(str, others))}"

    return messages_of(whose)
