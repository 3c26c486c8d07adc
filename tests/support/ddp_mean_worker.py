"""One of three ranks of ddp/test_mean.py: plain DistributedDataParallel against what takes its hook's place."""

import gc
from collections.abc import Callable
from itertools import product
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from retime import fuse_optimizer
from retime.mechanisms.out_of_order import OutOfOrderDataParallel
from support.ranks import run_rank

STEPS = 4


def plain(model: Any, optimizer: Any) -> None:
    """DDP itself."""


def fused(model: Any, optimizer: Any) -> Any:
    return fuse_optimizer(model, optimizer, "backward")


def given_back(model: Any, optimizer: Any) -> None:
    OutOfOrderDataParallel(model, optimizer, k=0).remove()


def loop(prepare: Callable[..., Any], view: bool, set_to_none: bool) -> list[Tensor]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 32))
    model = DistributedDataParallel(net, gradient_as_bucket_view=view)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    fusion = prepare(model, optimizer)
    generator = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(STEPS):
        model(torch.randn(8, 32, generator=generator)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none)
    if fusion is not None:
        assert fusion.report().fused_updates
        fusion.remove()
    parameters = list(net.parameters())
    del model, fusion
    gc.collect()
    assert not any(parameter._post_accumulate_grad_hooks for parameter in parameters)
    return [parameter.detach().clone() for parameter in parameters]


def same_bits() -> None:
    for view, set_to_none in product((True, False), repeat=2):
        expected = loop(plain, view, set_to_none)
        for prepare in (fused, given_back):
            if prepare is given_back and not view:
                continue  # it takes models with views only
            ours = loop(prepare, view, set_to_none)
            assert all(map(torch.equal, expected, ours)), (prepare.__name__, view, set_to_none)


if __name__ == "__main__":
    run_rank(globals(), ["same_bits"])
