"""One rank of ddp/test_join.py: 4 to 7 batches a rank, inside of DistributedDataParallel's `join()`."""

import os
import sys
from collections.abc import Callable
from datetime import timedelta
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from retime import fuse_optimizer
from retime.mechanisms.cpu_accumulation import BucketReduction, HostReducer
from retime.mechanisms.fusion import DataParallelFusion, ReductionHook
from retime.mechanisms.memory_budget import BudgetedDataParallelStep, parse_host
from retime.mechanisms.out_of_order import OutOfOrderDataParallel

RANK, RANKS = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
BATCHES = (4, 7, 5, 6)
BLOCKS = ["0", "4", "7"]
Prepare = Callable[[Any, Any], Callable[[], Any]]


def host(model: Any, optimizer: Any) -> Callable[[], Any]:
    return BucketReduction(model, HostReducer()).close


def fused(model: Any, optimizer: Any) -> Callable[[], Any]:
    return fuse_optimizer(model, optimizer, "backward").remove


def fused_forward(model: Any, optimizer: Any) -> Callable[[], Any]:
    return fuse_optimizer(model, optimizer, "forward").remove


def fused_host(model: Any, optimizer: Any) -> Callable[[], Any]:
    hook = ReductionHook(model, reducer=HostReducer())
    fusion = DataParallelFusion(optimizer, hook)
    fusion.complete_in_step()
    return lambda: (fusion.remove(), hook.close())


def out_of_order(model: Any, optimizer: Any) -> Callable[[], Any]:
    return OutOfOrderDataParallel(model, optimizer, k=2, blocks=BLOCKS).remove


def out_of_order_host(model: Any, optimizer: Any) -> Callable[[], Any]:
    return OutOfOrderDataParallel(model, optimizer, k=2, blocks=BLOCKS, reducer=HostReducer(overtakes=True)).remove


OWNERS = (host, fused, fused_forward, fused_host, out_of_order, out_of_order_host)


def network() -> nn.Module:
    torch.manual_seed(0)
    middle = [layer for _ in range(3) for layer in (nn.Linear(48, 48), nn.BatchNorm1d(48), nn.Tanh())]
    return nn.Sequential(nn.Linear(8, 48), *middle, nn.Linear(48, 4))


def loop(prepare: Prepare | None, *, view: bool, initial: bool) -> list[Tensor]:
    """Weights after each step: before, inside of and behind the `join()`."""
    model = DistributedDataParallel(network(), gradient_as_bucket_view=view, bucket_cap_mb=0.01)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    end = prepare(model, optimizer) if prepare else lambda: None
    generator = torch.Generator().manual_seed(RANK)
    seen: list[Tensor] = []

    def step() -> None:
        model(torch.randn(6, 8, generator=generator)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=RANKS == 2)  # gradients that stay in their buckets are divided, not multiplied
        seen.extend(parameter.detach().clone() for parameter in model.parameters())

    step()
    with model.join(divide_by_initial_world_size=initial):
        for _ in range(BATCHES[RANK]):
            step()
    step()
    end()
    return [*seen, *(value.detach().clone() for value in model.state_dict().values())]


def a_budget_is_refused() -> None:
    model = DistributedDataParallel(network())
    step = BudgetedDataParallelStep(model, [], 1 << 30, parse_host(None, torch.device("cpu")), gradients="kept")
    with pytest.raises(ValueError, match=r"in model.join\(\) answers nobody: leave join\(\) out"), model.join():
        step.run(lambda batch: model(batch).square().mean(), torch.randn(6, 8))
    step.remove()


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    for view, initial in product((True, False), repeat=2) if RANKS == 2 else [(True, False)]:
        expected = loop(None, view=view, initial=initial)
        for prepare in OWNERS:
            if not view and prepare in (out_of_order, out_of_order_host):
                continue  # it takes models with views only
            ours = loop(prepare, view=view, initial=initial)
            exact = RANKS == 2 or prepare in (fused, fused_forward)  # others may round in another order
            for one, other in zip(expected, ours, strict=True):
                same = torch.equal(one, other) if exact else torch.allclose(one, other, rtol=1e-5, atol=1e-6)
                assert same, (prepare.__name__, view, initial, (one - other).abs().max())
    a_budget_is_refused()
    dist.barrier()
    print(f"rank {RANK}: as ddp", flush=True)
    os._exit(0)  # a gloo thread that ends while the interpreter shuts down aborts the process


if __name__ == "__main__":
    sys.exit(main())
