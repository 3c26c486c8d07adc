"""Gradients added up by torch alone: what sums on the host are held against.

The naive way: all gradients go to a root at the end of the backward pass, which updates and broadcasts all weights.
Sekiyama et al. 2017, Algorithm 4 (lines 3 and 6 to 9); moDNN (Chen et al. 2019), section 6.1. Gradients lie in one
buffer and go along a binary tree of the ranks, as Caffe sends them; so do weights, by gloo's broadcast. And in the
order of the ranks: the same bits as a sum on the host. Ranks with a GPU each send gradients by NCCL, from device to
device; those that share one through the host's memory, as gloo does.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from retime.foundations.streams import has_streams
from retime.foundations.torch_private.distributed import GradBucket

NAIVE = "naive"
ONE_BUCKET_MB = 2**20
"""`bucket_cap_mb` with which one bucket takes all gradients, so that none leaves before the last one is there."""
_LINE = 16  # float32 numbers in a cache line


class RootUpdate:
    """Rank 0 gets the mean of all gradients, and all other ranks get its weights.

    The model has one bucket and no communication hook yet; its parameters become parts of one buffer.
    """

    def __init__(self, model: DistributedDataParallel) -> None:
        self._received: Tensor | None = None
        parameters = list(model.parameters())
        sizes = [-(-parameter.numel() // _LINE) * _LINE for parameter in parameters]
        self._weights = torch.zeros(sum(sizes), device=parameters[0].device)
        parts = self._weights.split(sizes)  # type: ignore[no-untyped-call]
        for parameter, part in zip(parameters, parts, strict=True):
            part = part[: parameter.numel()].view_as(parameter)
            part.copy_(parameter.detach())
            parameter.data = part
        model.register_comm_hook(None, self.collect)

    def collect(self, state: Any, bucket: GradBucket) -> Future[Tensor]:
        """The communication hook. torch asks for the annotations themselves, not for their names."""
        buffer = bucket.buffer()
        rank, ranks = dist.get_rank(), dist.get_world_size()
        buffer.div_(ranks)
        values = _sendable(buffer)
        distance = 1
        while distance < ranks:
            if rank % (2 * distance):
                dist.send(values, rank - distance)
                break
            if rank + distance < ranks:
                if self._received is None:
                    self._received = torch.empty_like(values)
                dist.recv(self._received, rank + distance)
                values.add_(self._received)
            distance *= 2
        return _done(buffer.copy_(values))

    def broadcast_weights(self) -> None:
        """After the root's update, on all ranks."""
        dist.broadcast(self._weights, 0)


class NaiveDDP(DDPStrategy):
    """`ddp` that trains so. Ranks but the root run no update."""

    def __init__(self) -> None:
        super().__init__(bucket_cap_mb=ONE_BUCKET_MB, gradient_as_bucket_view=True)

    def configure_ddp(self) -> None:
        super().configure_ddp()
        assert isinstance(self.model, DistributedDataParallel)
        self._root = RootUpdate(self.model)

    def optimizer_step(self, optimizer: Any, closure: Callable[[], Any], model: Any = None, **kwargs: Any) -> Any:
        root = self.global_rank == 0
        loss = super().optimizer_step(optimizer, closure, model, **kwargs) if root else closure()
        self._root.broadcast_weights()
        return loss


def _sendable(values: Tensor) -> Tensor:
    return values if torch.cuda.device_count() >= dist.get_world_size() else values.cpu()


def _done(values: Tensor) -> Future[Tensor]:
    done: Future[Tensor] = Future(devices=[values.device] if has_streams(values.device) else [])
    done.set_result(values)
    return done


def sum_in_order(values: Tensor) -> Tensor:
    """Sum of what all ranks give, added up one rank after the other."""
    given = _sendable(values)
    every = [torch.empty_like(given) for _ in range(dist.get_world_size())]
    dist.all_gather(every, given)
    whole = every[0]
    for other in every[1:]:
        whole.add_(other)
    return whole.to(values.device)


def rank_ordered(state: Any, bucket: GradBucket) -> Future[Tensor]:
    """A communication hook: each rank's gradients over the number of ranks, added up one rank after the other.

    torch asks for the annotations themselves, not for their names. Among 2, 4, 8, ... ranks division is exact, so it
    has the bits of DDP's own.
    """
    values = bucket.buffer()
    return _done(values.copy_(sum_in_order(values.div_(dist.get_world_size()))))


class RankOrderedDDP(DDPStrategy):
    """`ddp` with that hook."""

    def configure_ddp(self) -> None:
        super().configure_ddp()  # which takes a ddp_comm_hook on CUDA only
        assert isinstance(self.model, DistributedDataParallel)
        self.model.register_comm_hook(None, rank_ordered)


RANK_ORDERED = {"_target_": f"{__name__}.{RankOrderedDDP.__name__}", "gradient_as_bucket_view": True}
