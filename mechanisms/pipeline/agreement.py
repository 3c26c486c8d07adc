"""What the ranks of a pipeline agree upon before a step: that they have the same batch, and the seeds of its parts."""

from __future__ import annotations

import zlib
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from retime.mechanisms.pipeline.errors import PipelineError, messages_of_group
from retime.mechanisms.pipeline.spread import Place
from retime.mechanisms.pipeline.values import tensors_in_order

__all__ = ["DIFFERENT", "agreed_seeds"]

DIFFERENT = (
    "the ranks of a pipeline were given different batches: each needs the same one. Give the sampler num_replicas and "
    "rank of the data parallel ranks, or leave it to the Trainer"
)
_LOOKED_AT = 256
"""Values of each tensor, spread over it."""


def agreed_seeds(place: Place, batch: Any, count: int) -> list[int]:
    """Seeds for ``count`` micro-batches, drawn from the first rank's global generator; all ranks call this.

    Ranks that draw different numbers otherwise, as where only the first one draws samples to log, so go on to see the
    same random numbers in front of the layers and in the loss.

    Raises:
        PipelineError: this rank's batch is not that of the first one.
    """
    mine = torch.tensor([int(torch.randint(2**62, ())), _checksum(batch)])
    told = mine.to(place.device, copy=True)
    if place.ranks > 1:
        with messages_of_group(place.group):
            dist.broadcast(told, place.world_rank(0), group=place.group)
    seed, checksum = told.tolist()
    if checksum != int(mine[1]):
        raise PipelineError(
            f"{DIFFERENT}. The first batches were the same, so look for a shuffle that ranks seed apart"
        )
    return torch.randint(2**62, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def _checksum(batch: Any) -> int:
    found = 0
    for tensor in tensors_in_order(batch):
        found = zlib.crc32(repr((tuple(tensor.shape), tensor.dtype)).encode(), found)
        if tensor.layout == torch.strided and tensor.numel():
            found = zlib.crc32(_some_bytes(tensor), found)
    return found


def _some_bytes(tensor: Tensor) -> bytes:
    values = tensor.detach().reshape(-1)
    some = values[:: -(-len(values) // _LOOKED_AT)].contiguous().cpu()
    return bytes(some.view(torch.uint8).numpy())
