"""Gradients summed in host memory: one rank of DistributedDataParallel; two: ddp/test_comm_hook_owners.py."""

import pytest
import torch
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from retime.mechanisms.cpu_accumulation import BucketReduction, HostReducer, HostReductionReport, TimedSum
from retime.mechanisms.cpu_accumulation import shared_sums as sums
from retime.strategies import MemoryBudgetDDPStrategy


@pytest.fixture(
    params=[
        "cpu",
        pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")),
    ]
)
def device(request: pytest.FixtureRequest, one_rank: None) -> torch.device:
    return torch.device(request.param)


def network(device: torch.device) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(64, 64) for _ in range(4))).to(device)


def test_gradients_come_back(device: torch.device) -> None:
    plain = network(device)
    model = DistributedDataParallel(network(device), bucket_cap_mb=0.02)
    reducer = HostReducer(device)
    reduction = BucketReduction(model, reducer)
    inputs = torch.randn(8, 64, device=device)
    for closed in (False, False, True):
        if closed:
            reduction.close()
        for each in (plain, model):
            each.zero_grad()
            each(inputs).square().sum().backward()
        both = zip(plain.parameters(), model.parameters(), strict=True)
        assert all(torch.equal(one.grad, two.grad) for one, two in both)
    assert reducer.bytes_out == 2 * sum(parameter.nbytes for parameter in plain.parameters())


def test_the_clock_is_asked_for_who_watches_only(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = [0]

    def clock() -> float:
        asked[0] += 1
        return float(asked[0])

    monkeypatch.setattr("retime.mechanisms.cpu_accumulation.reduction.time.perf_counter", clock)
    seen: list[TimedSum] = []
    for watch in (None, seen.append):
        assert not asked[0]
        reducer = HostReducer(device, watch=watch)
        reducer.start(0, torch.ones(4, device=device)).wait()
        reducer.close()
    assert seen == [TimedSum(16, 1.0, 2.0, 3.0, None)]


def test_a_reduction_that_fails_fails_the_backward_pass(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    model = DistributedDataParallel(network(device))
    reduction = BucketReduction(model, HostReducer(device))

    def fail(tensor: Tensor, **_: object) -> None:
        raise RuntimeError("a rank is gone")

    monkeypatch.setattr(sums.dist, "all_reduce", fail)
    with pytest.raises(RuntimeError, match="a rank is gone"):
        model(torch.randn(8, 64, device=device)).sum().backward()
    reduction.close()


def test_a_model_on_several_devices_is_refused(device: torch.device) -> None:
    model = DistributedDataParallel(network(device))
    model.module[0].to("meta")
    with pytest.raises(ValueError, match="takes a model on one device, not on 2"):
        BucketReduction(model, HostReducer(device))


def test_what_the_strategy_refuses() -> None:
    with pytest.raises(ValueError, match="is a communication hook itself: leave out ddp_comm_hook"):
        MemoryBudgetDDPStrategy("1GiB", reduce_on="host", ddp_comm_hook=allreduce_hook)
    assert isinstance(MemoryBudgetDDPStrategy("1GiB", reduce_on="host", ddp_comm_hook=None), DDPStrategy)


def test_a_report_says_that_it_adds_up_steps() -> None:
    assert HostReductionReport(24, 897 * 2**10, "in memory").headline.endswith("24 buckets, 897 KiB, in memory")
