"""Process groups of one's own: nothing that others send queues before or behind what goes through them."""

from datetime import timedelta
from typing import Any

import torch.distributed as dist

__all__ = ["close_group", "own_group"]


def own_group(group: Any = None, *, backend: str | None = None, timeout: timedelta | None = None) -> Any:
    """A new group of the same ranks; all of them call this, in the same order.

    Args:
        group: whose ranks; None: all.
        backend: None: that of ``group``.
        timeout: of its collectives; None is torch's default.
    """
    ranks = dist.get_process_group_ranks(group)
    local = len(ranks) != dist.get_world_size()  # the other ranks know nothing of this
    backend = backend or dist.get_backend(group)
    return dist.new_group(ranks, timeout=timeout, backend=backend, use_local_synchronization=local)


def close_group(group: Any) -> None:
    """Give a group back, if torch has not done it already."""
    if group is not None and dist.is_initialized():
        dist.destroy_process_group(group)
