"""One of two ranks of cpu_accumulation/test_reducers.py: each owner of DDP's hook with a reducer of the test's own."""

import contextlib
import os
from collections.abc import Callable, Hashable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from retime.mechanisms.cpu_accumulation import BucketReduction
from retime.mechanisms.fusion import DataParallelFusion, ReductionHook
from retime.mechanisms.memory_budget import BudgetedDataParallelStep, parse_host
from retime.mechanisms.out_of_order import OutOfOrderDataParallel
from support.ranks import run_rank

STEPS = 6
RANK = int(os.environ["RANK"])


class Recording:
    """Sums in a copy of its own, and notes what it was given."""

    def __init__(self) -> None:
        self.group = dist.new_group(backend="gloo")
        self.started: list[tuple[Hashable, int, bool]] = []
        self.forms: set[tuple[Any, ...]] = set()
        self.ends: list[str] = []

    def start(self, key: Hashable, values: Tensor, *, urgent: bool = False) -> torch.futures.Future[Tensor]:
        assert not self.ends
        self.started.append((key, values.numel(), urgent))
        self.forms.add((values.dtype, values.device.type, values.dim(), values.is_contiguous()))
        copy = values.clone()
        work = dist.all_reduce(copy, group=self.group, async_op=True)
        assert work is not None

        def arrive(done: torch.futures.Future[Any]) -> Tensor:
            done.value()
            values.copy_(copy)
            return values

        return work.get_future().then(arrive)

    def close(self) -> None:
        self.ends.append("closed")

    def abort(self) -> None:
        self.ends.append("aborted")


Prepare = Callable[[Any, Any, Any], contextlib.AbstractContextManager[Callable[[Tensor], None]]]


def plain_step(model: nn.Module) -> Callable[[Tensor], None]:
    return lambda inputs: model(inputs).square().mean().backward()


@contextlib.contextmanager
def plain(model: Any, optimizer: Any, reducer: Any) -> Iterator[Callable[[Tensor], None]]:
    yield plain_step(model)


@contextlib.contextmanager
def fused(model: Any, optimizer: Any, reducer: Any) -> Iterator[Callable[[Tensor], None]]:
    hook = ReductionHook(model, reducer=reducer)
    fusion = DataParallelFusion(optimizer, hook)
    fusion.complete_in_step()
    yield plain_step(model)
    assert fusion.report().fused_updates
    fusion.remove()
    hook.close()


@contextlib.contextmanager
def out_of_order(model: Any, optimizer: Any, reducer: Any) -> Iterator[Callable[[Tensor], None]]:
    ooo = OutOfOrderDataParallel(model, optimizer, k=2, blocks=["0", "2", "4"], reducer=reducer)
    yield plain_step(model)
    assert ooo.report().deferred_gradients
    ooo.remove()


@contextlib.contextmanager
def budgeted(model: Any, optimizer: Any, reducer: Any) -> Iterator[Callable[[Tensor], None]]:
    reduction = BucketReduction(model, reducer)
    step = BudgetedDataParallelStep(
        model, [optimizer], 1 << 30, parse_host(None, torch.device("cpu")), gradients="kept"
    )
    yield lambda inputs: step.run(lambda part: model(part).square().mean(), inputs) and None
    step.remove()
    reduction.close()


def loop(prepare: Prepare, reducer: Any) -> list[Tensor]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, 96), nn.Tanh(), nn.Linear(96, 48), nn.Tanh(), nn.Linear(48, 32))
    model = DistributedDataParallel(net, gradient_as_bucket_view=True, bucket_cap_mb=0.02)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    generator = torch.Generator().manual_seed(RANK)
    with prepare(model, optimizer, reducer) as step:
        for _ in range(STEPS):
            step(torch.randn(8, 64, generator=generator))
            optimizer.step()
            optimizer.zero_grad()
    plain_step(model)(torch.ones(2, 64))  # the hook is DDP's again: nothing may start
    return [parameter.detach().clone() for parameter in net.parameters()]


def owners_sum_by_their_reducers() -> None:
    expected = loop(plain, None)
    elements = sum(parameter.numel() for parameter in expected)
    for prepare in (fused, out_of_order, budgeted):
        reducer = Recording()
        assert all(map(torch.equal, expected, loop(prepare, reducer))), prepare.__name__
        assert sum(size for _, size, _ in reducer.started) == STEPS * elements, prepare.__name__
        assert reducer.forms == {(torch.float32, "cpu", 1, True)}
        assert reducer.ends == ["closed"], prepare.__name__
        assert any(urgent for *_, urgent in reducer.started) == (prepare is out_of_order)
        payload: list[Any] = [None, None]
        dist.all_gather_object(payload, reducer.started)
        assert payload[0] == payload[1], prepare.__name__
        print(f"rank {RANK}: {prepare.__name__} done", flush=True)


if __name__ == "__main__":
    run_rank(globals(), ["owners_sum_by_their_reducers"])
