"""Budgeted steps over DistributedDataParallel: what it holds beside a model; on two gloo ranks, loops of one's own."""

import gc
import tempfile
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from retime.foundations.cpu_pool.pool import trim_heap
from retime.foundations.measure.memory import MemoryProbe
from retime.mechanisms.cpu_accumulation import BucketReduction, HostReducer
from retime.mechanisms.memory_budget.data_parallel import (
    BudgetedDataParallelStep,
    _piece_bytes,
    bucket_bytes,
    buckets_of,
    bypass_ddp,
    gloo_bytes,
    reduction_bytes,
)
from retime.mechanisms.memory_budget.offload.hosts import parse_host
from retime.recipes.modnn.budget_worker import resident_bytes
from retime.schedules.budget import BudgetError
from support.memory_budget import BATCH, OFFLOADS, SPLITS, Net, accelerate_loop, assert_close, assert_way, loader
from support.memory_budget_ranks import SMALL, batches, budgeted, groups, on_two_ranks, other_backend, plan_with
from support.ranks import RANK

MIB = 2**20
calls = 0  # of a step that counts them


def test_a_bare_model_has_no_buckets() -> None:
    for model in (None, nn.Linear(3, 2)):
        assert (buckets_of(model), bucket_bytes(model), reduction_bytes(model)) == ("", 0, 0)


@pytest.mark.parametrize(
    ("total", "cap", "largest"),
    [
        *((0, 25, 0), (MIB // 2, 25 * MIB, MIB // 2), (3 * MIB // 2, 25 * MIB, MIB), (30 * MIB, 25 * MIB, 25 * MIB)),
        *((4, 2, 2), (MIB, 0, 0)),
    ],
)
def test_sums_take_two_pieces_of_the_largest_bucket_in_each_thread(total: int, cap: int, largest: int) -> None:
    assert gloo_bytes(total, cap, 2) == 2 * 2 * _piece_bytes(largest, 2)


@pytest.mark.parametrize(
    ("nbytes", "ranks", "piece"), [(MIB, 2, MIB // 4), (5 * MIB, 2, -(-5 * MIB // 6)), (64 * MIB, 2, MIB), (100, 4, 13)]
)
def test_pieces_of_a_ring_are_no_larger_than_a_mebibyte(nbytes: int, ranks: int, piece: int) -> None:
    assert _piece_bytes(nbytes, ranks) == piece


@on_two_ranks
def test_gradients_are_summed_in_host_memory() -> None:
    plan_with(SPLITS)
    plain, ours = DistributedDataParallel(Net()), DistributedDataParallel(Net(), bucket_cap_mb=0.002)
    before = groups()
    reducer = HostReducer()
    reduction, step = BucketReduction(ours, reducer), budgeted(ours)
    for batch in batches([BATCH, 16]):
        for parts, model in ((step, ours), (budgeted(plain), plain)):
            model.zero_grad()
            parts.run(lambda part, model=model: nn.functional.cross_entropy(model(part[0]), part[1]), batch)
        assert_same_gradients(plain, ours)
    assert reducer.bytes_out == 2 * sum(parameter.nbytes for parameter in ours.parameters())
    step.remove()
    reduction.close()
    assert groups() == before
    ours.zero_grad()
    nn.functional.cross_entropy(ours(batch[0]), batch[1]).backward()
    assert_same_gradients(plain, ours)
    assert reducer.bytes_out == 2 * sum(parameter.nbytes for parameter in ours.parameters())


def assert_same_gradients(one: nn.Module, two: nn.Module) -> None:
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(one.parameters(), two.parameters(), strict=True))


@on_two_ranks
def test_synchronised_batch_norm_is_tried_out_alone() -> None:
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)))
    inputs = torch.randn(6, 4)
    expected = model.module(inputs)
    model.module[1] = nn.SyncBatchNorm(4)  # only allowed on CUDA: its forward pass fails here
    with bypass_ddp(model):
        assert torch.equal(model(inputs), expected)
    with pytest.raises(ValueError, match="to be on"):
        model(inputs)
    optimizers = [torch.optim.SGD(model.parameters(), 0.1)]
    host = parse_host(None, torch.device("cpu"))
    budgeted = BudgetedDataParallelStep(model, optimizers, SMALL, host)
    assert "SyncBatchNorm takes its statistics" in budgeted._planner.whole_because
    with pytest.raises(ValueError, match="or BatchNorm with batchnorm='ghost'"):
        BudgetedDataParallelStep(model, optimizers, SMALL, host, batchnorm="ghost")
    budgeted.remove()


@on_two_ranks
def test_groups_are_given_back() -> None:
    before = groups()
    with other_backend():
        step = budgeted(DistributedDataParallel(Net()))
    assert groups() == before + 1
    step.remove()
    assert groups() == before
    step.remove()


@on_two_ranks
def test_ranks_reduce_again_after_a_batch_that_failed() -> None:
    """Or whoever trains on without a budget would train another model on each rank."""
    plan_with(SPLITS)
    model, failing = DistributedDataParallel(Net()), [True]
    step = budgeted(model)

    def loss(batch: Any) -> Any:
        loss = nn.functional.cross_entropy(model(batch[0]), batch[1])
        return loss if step.planning or not failing else None

    (batch,) = batches([BATCH])
    with pytest.raises(ValueError, match="loss"):
        step.run(loss, batch)
    assert model.require_backward_grad_sync
    failing.clear()
    step.begin(loss, batch)
    assert len(step.parts or ()) > 1
    assert not model.require_backward_grad_sync
    step.remove()
    assert model.require_backward_grad_sync


@on_two_ranks
def test_calls_that_a_step_counts_are_put_back() -> None:
    """After planning: a step that goes by their number would train another model than without a budget."""
    global calls
    calls = 0
    plan_with(OFFLOADS)
    model = DistributedDataParallel(Net())

    def loss(batch: Any) -> Any:
        global calls
        calls += 1
        return nn.functional.cross_entropy(model(batch[0]), batch[1])

    step, (batch,) = budgeted(model), batches([BATCH])
    step.plan(loss, batch)
    assert calls == 0
    step.remove()


@on_two_ranks
def test_peaks_with_buckets_stay_inside() -> None:
    """The first buckets make room for those that DDP makes after a step, and reductions have room too."""
    budget, samples = 40 * 2**20, 1024
    inputs, targets = torch.randn(samples, 256), torch.randn(samples, 256)
    peaks = []
    for _ in range(2):  # the first time loads code
        gc.collect()
        trim_heap()
        base = resident_bytes()
        torch.manual_seed(0)
        layers = [layer for _ in range(3) for layer in (nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256))]
        model = DistributedDataParallel(nn.Sequential(*layers))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        step = BudgetedDataParallelStep(model, [optimizer], budget, parse_host(f"disk:{tempfile.gettempdir()}", "cpu"))
        loss = _squared(model)
        step.plan(loss, (inputs, targets))
        trim_heap()
        probe = MemoryProbe(torch.device("cpu"))
        probe.start()
        for _ in range(5):
            optimizer.zero_grad()
            step.run(loss, (inputs, targets))
            optimizer.step()
        probe.stop()
        peaks.append((probe.peaks()["batch"] - base, step.report().shapes[0].choice.peak_bytes))
        assert step.hidden_bytes < 2**22, "new buckets are the pool's"
        assert step.report().sub_batches > step.report().steps
        step.remove()
        del model, optimizer, step, loss, layers
    measured, predicted = peaks[-1]
    assert 0.85 * predicted <= measured <= budget, peaks  # the reductions are not at its peak


def _squared(model: nn.Module) -> Callable[[Any], Any]:
    return lambda batch: (model(batch[0]) - batch[1]).square().mean()


@on_two_ranks
def test_accelerate_loops() -> None:
    from accelerate.utils.memory import should_reduce_batch_size

    plan_with(SPLITS)
    for accumulate in (1, 2):
        plain, *_ = accelerate_loop("plain", accumulate, SMALL, data=loader(8))
        ours, (made,), state = accelerate_loop("run", accumulate, SMALL, data=loader(8))
        assert made.sub_batches > made.steps == 4
        assert [plan["samples"] for plan in state["parts"]["plans"]] == [BATCH]
        assert_close(plain, ours)
        ours, (made,), state = accelerate_loop("forward", accumulate, SMALL, data=loader(8))
        assert_way(made, "offload")
        assert made.steps == 4
        assert [plan["samples"] for plan in state["whole"]["plans"]] == [BATCH]
        assert_close(plain, ours, 0)
    with pytest.raises(BudgetError) as caught:
        accelerate_loop("forward", budget=[SMALL, 20_000][RANK])
    assert should_reduce_batch_size(caught.value)
    with pytest.raises(ValueError, match="give dry_run='auto'"):
        accelerate_loop("forward", dry_run="off")
