"""Each owner of DDP's communication hook trains as DDP by itself, and sums by the reducer that it was given."""

import gc
from collections.abc import Callable, Hashable
from contextlib import nullcontext
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from retime import fuse_optimizer
from retime.foundations.ddp import scale
from retime.mechanisms.cpu_accumulation import BucketReduction, HostReducer
from retime.mechanisms.fusion import DataParallelFusion, ReductionHook
from retime.mechanisms.memory_budget import BudgetedDataParallelStep, parse_host
from retime.mechanisms.out_of_order import OutOfOrderDataParallel
from support.ranks import RANK, RANKS, on_ranks

STEPS, WIDTH = 6, 96
BATCHES = (4, 7, 5, 6)
"""Of each rank, inside of `join()`."""
Prepare = Callable[[Any, Any, Any], tuple[Callable[[], Any], Callable[[Tensor], Any] | None]]
"""Of a model, its optimizer and a reducer: what ends it, and its step where that is no plain one."""


def host(model: Any, optimizer: Any, reducer: Any) -> Any:
    return BucketReduction(model, HostReducer()).close, None


def fused(model: Any, optimizer: Any, reducer: Any, mode: str = "backward") -> Any:
    fusion = fuse_optimizer(model, optimizer, mode)
    return lambda: (fusion.remove(), fusion.report().fused_updates)[1], None


def fused_forward(model: Any, optimizer: Any, reducer: Any) -> Any:
    return fused(model, optimizer, reducer, "forward")


def fused_host(model: Any, optimizer: Any, reducer: Any) -> Any:
    hook = ReductionHook(model, reducer=reducer or HostReducer())
    fusion = DataParallelFusion(optimizer, hook)
    fusion.complete_in_step()
    return lambda: (fusion.remove(), hook.close(), fusion.report().fused_updates)[2], None


def out_of_order(model: Any, optimizer: Any, reducer: Any) -> Any:
    ooo = OutOfOrderDataParallel(model, optimizer, k=2, blocks=["0", "4", "7"], reducer=reducer)
    return lambda: (ooo.remove(), ooo.report().deferred_gradients)[1], None


def out_of_order_host(model: Any, optimizer: Any, reducer: Any) -> Any:
    return out_of_order(model, optimizer, HostReducer(overtakes=True))


def given_back(model: Any, optimizer: Any, reducer: Any) -> Any:
    OutOfOrderDataParallel(model, optimizer, k=0).remove()
    return lambda: None, None


def budgeted(model: Any, optimizer: Any, reducer: Any) -> Any:
    reduction = BucketReduction(model, reducer)
    host = parse_host(None, torch.device("cpu"))
    step = BudgetedDataParallelStep(model, [optimizer], 1 << 30, host, gradients="kept")
    run = lambda inputs: step.run(lambda part: model(part).square().mean(), inputs)  # noqa: E731
    return lambda: (step.remove(), reduction.close()), run


def network() -> nn.Module:
    torch.manual_seed(0)
    middle = [layer for _ in range(3) for layer in (nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Tanh())]
    return nn.Sequential(nn.Linear(8, WIDTH), *middle, nn.Linear(WIDTH, 4))


def loop(
    prepare: Prepare | None,
    *,
    view: bool = True,
    set_to_none: bool = True,
    join_initial: bool | None = None,
    reducer: Any = None,
    make: Any = torch.optim.SGD,
) -> list[Tensor]:
    """Weights after each step, with a `join()` before, inside of and behind it, and buffers at the end."""
    net = network()
    model = DistributedDataParallel(net, gradient_as_bucket_view=view, bucket_cap_mb=0.01)
    optimizer = make(model.parameters(), lr=0.1)
    end, own_step = prepare(model, optimizer, reducer) if prepare else (lambda: True, None)
    generator = torch.Generator().manual_seed(RANK)
    seen: list[Tensor] = []

    def steps(count: int) -> None:
        for _ in range(count):
            inputs = torch.randn(6, 8, generator=generator)
            own_step(inputs) if own_step else model(inputs).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none)
            seen.extend(parameter.detach().clone() for parameter in model.parameters())

    steps(1)
    joins = nullcontext() if join_initial is None else model.join(divide_by_initial_world_size=join_initial)
    with joins:
        steps(STEPS - 2 if join_initial is None else BATCHES[RANK])
    steps(1)
    assert end() != 0 or join_initial is not None, prepare
    seen += [value.detach().clone() for value in net.state_dict().values()]
    if reducer is not None:
        model(torch.ones(2, 8)).square().mean().backward()  # the hook is DDP's again: nothing may start
    model = end = own_step = joins = None
    gc.collect()
    assert not any(parameter._post_accumulate_grad_hooks for parameter in net.parameters())
    return seen


def test_two_ways_to_scale() -> None:
    values = torch.arange(1.0, 50.0)
    divided, multiplied = values.clone(), values.clone()
    scale(divided, 3, divide=True)
    scale(multiplied, 3, divide=False)
    assert torch.equal(divided, values / 3)
    assert torch.equal(multiplied, values * (1 / 3))
    assert not torch.equal(divided, multiplied)


@on_ranks(3)
def test_three_ranks_keep_the_bits_of_plain_ddp() -> None:
    """Where DDP's two ways to scale round differently."""
    for view, set_to_none in product((True, False), repeat=2):
        expected = loop(None, view=view, set_to_none=set_to_none)
        for prepare in (fused, given_back)[: 1 + view]:  # the other takes models with views only
            ours = loop(prepare, view=view, set_to_none=set_to_none)
            assert all(map(torch.equal, expected, ours)), (prepare.__name__, view, set_to_none)


@on_ranks(2, pytest.param(4, marks=pytest.mark.long))
def test_ranks_that_run_out_of_batches_count_as_in_ddp() -> None:
    for view, initial in product((True, False), repeat=2) if RANKS == 2 else [(True, False)]:
        # Gradients that stay in their buckets are divided, not multiplied.
        options: Any = {"view": view, "join_initial": initial, "set_to_none": RANKS == 2}
        expected = loop(None, **options)
        for prepare in (host, fused, fused_forward, fused_host, *((out_of_order, out_of_order_host) if view else ())):
            ours = loop(prepare, **options)
            exact = RANKS == 2 or prepare in (fused, fused_forward)  # others may round in another order
            for one, other in zip(expected, ours, strict=True):
                same = torch.equal(one, other) if exact else torch.allclose(one, other, rtol=1e-5, atol=1e-6)
                assert same, (prepare.__name__, view, initial, (one - other).abs().max())
    model = DistributedDataParallel(network())
    step = BudgetedDataParallelStep(model, [], 1 << 30, parse_host(None, torch.device("cpu")), gradients="kept")
    with pytest.raises(ValueError, match=r"in model.join\(\) answers nobody: leave join\(\) out"), model.join():
        step.run(lambda batch: model(batch).square().mean(), torch.randn(6, 8))
    step.remove()


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

        def arrive(done: torch.futures.Future[Any]) -> Tensor:
            done.value()
            values.copy_(copy)
            return values

        return work.get_future().then(arrive)

    def close(self) -> None:
        self.ends.append("closed")

    def abort(self) -> None:
        self.ends.append("aborted")


@on_ranks(2)
def test_an_owner_sums_by_its_reducer() -> None:
    expected = loop(None, make=torch.optim.AdamW)
    elements = sum(parameter.numel() for parameter in network().parameters())
    for prepare in (fused_host, out_of_order, budgeted):
        reducer = Recording()
        ours = loop(prepare, reducer=reducer, make=torch.optim.AdamW)
        assert all(map(torch.equal, expected, ours)), prepare.__name__
        assert sum(size for _, size, _ in reducer.started) == STEPS * elements, prepare.__name__
        assert reducer.forms == {(torch.float32, "cpu", 1, True)}
        assert reducer.ends == ["closed"], prepare.__name__
        assert any(urgent for *_, urgent in reducer.started) == (prepare is out_of_order)
        payload: list[Any] = [None, None]
        dist.all_gather_object(payload, reducer.started)
        assert payload[0] == payload[1], prepare.__name__
