"""Which ranks make up a pipeline, and which add their gradients up."""

from __future__ import annotations

from datetime import timedelta
from typing import Any, Literal

import torch.distributed as dist

from retime.mechanisms.pipeline.errors import messages_of_group

__all__ = ["Size", "gathered", "make_groups", "sizes_of"]

Size = int | Literal["auto"]


def sizes_of(world: int, pipeline: Size, data: Size) -> tuple[int, int]:
    """Ranks of a pipeline, and pipelines.

    Raises:
        ValueError: they do not make up all processes.
    """
    replicas = data if data != "auto" else 1 if pipeline == "auto" else max(1, world // pipeline)
    stages = max(1, world // replicas) if pipeline == "auto" else pipeline
    if stages * replicas != world:
        raise ValueError(
            f"pipeline_parallel_size={stages} and data_parallel_size={replicas} make {stages * replicas} ranks, and "
            f"there are {world}: let their product be the number of processes, or leave one of them 'auto'"
        )
    return stages, replicas


def make_groups(pipeline: int, data: int, timeout: timedelta) -> tuple[Any, Any]:
    """The group of this rank's pipeline, and of those it adds gradients up with; all ranks call this.

    Ranks of one pipeline have neighbouring numbers; the n-th ranks of all pipelines add gradients up.

    Args:
        pipeline: ranks of each.
        data: number of pipelines.
        timeout: of messages in a pipeline.

    Returns:
        The pipeline's, and the data parallel one, which is None if there is one pipeline.
    """
    pipeline_group = data_group = None
    for index in range(data):
        ranks = list(range(index * pipeline, (index + 1) * pipeline))
        group = dist.new_group(ranks, timeout=timeout)
        if dist.get_rank() in ranks:
            pipeline_group = group
    for index in range(pipeline if data > 1 else 0):
        ranks = list(range(index, pipeline * data, pipeline))
        group = dist.new_group(ranks)
        if dist.get_rank() in ranks:
            data_group = group
    return pipeline_group, data_group


def gathered(mine: Any, group: Any) -> list[Any] | None:
    """What each rank of a group gives, on its first; None on others. All ranks call this."""
    is_first = dist.get_rank(group) == 0
    everyone: list[Any] | None = [None] * dist.get_world_size(group) if is_first else None
    with messages_of_group(group):
        dist.gather_object(mine, everyone, dst=dist.get_global_rank(group, 0), group=group)
    return everyone
