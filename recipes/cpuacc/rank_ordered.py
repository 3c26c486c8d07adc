"""Gradients added up in the order of the ranks by torch alone: what host sums are held against."""

from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from retime.foundations.torch_private.distributed import GradBucket

__all__ = ["RANK_ORDERED", "RankOrderedDDP", "rank_ordered"]


def rank_ordered(state: Any, bucket: GradBucket) -> Future[Tensor]:
    """A communication hook: each rank's gradients over the number of ranks, added up one rank after the other.

    torch asks for the annotations themselves, not for their names. Among 2, 4, 8, ... ranks division is exact, so it
    has the bits of DDP's own.
    """
    values = bucket.buffer()
    values.div_(dist.get_world_size())
    every = [torch.empty_like(values) for _ in range(dist.get_world_size())]
    dist.all_gather(every, values)
    values.copy_(every[0])
    for other in every[1:]:
        values.add_(other)
    done: Future[Tensor] = Future()
    done.set_result(values)
    return done


class RankOrderedDDP(DDPStrategy):
    """`ddp` with that hook."""

    def configure_ddp(self) -> None:
        super().configure_ddp()  # which takes a ddp_comm_hook on CUDA only
        assert isinstance(self.model, DistributedDataParallel)
        self.model.register_comm_hook(None, rank_ordered)


RANK_ORDERED = {"_target_": f"{__name__}.{RankOrderedDDP.__name__}", "gradient_as_bucket_view": True}
