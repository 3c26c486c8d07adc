"""Which ranks make up a pipeline, and which add their gradients up."""

from __future__ import annotations

from datetime import timedelta
from typing import Any, Literal

import torch.distributed as dist

__all__ = ["Size", "make_groups", "sizes_of"]

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
