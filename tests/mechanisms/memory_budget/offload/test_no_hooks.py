"""Models that call torch.func cannot run under saved-tensor hooks: nothing is offloaded, everything else goes on."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from retime.mechanisms.memory_budget.costs import calibrate
from retime.mechanisms.memory_budget.dry_run.run import EVERYTHING, TrainingStep
from retime.mechanisms.memory_budget.offload.hosts import HostDisk, HostMemory
from retime.mechanisms.memory_budget.offload.saved_tensors import NoHooksError, OffloadSavedTensors, PlanMismatch
from retime.mechanisms.memory_budget.offload.tier import HostError, HostNone, HostNull
from retime.mechanisms.memory_budget.search import PlanTrial, search_plan
from retime.mechanisms.memory_budget.step import BudgetedStep
from retime.mechanisms.memory_budget.step_memory import StepMemory
from retime.schedules.budget import BudgetError, OffloadPlan

WIDTH, DEPTH, SAMPLES = 16, 3, 128
PLAIN, PARTS, FLOOR = 300_000, 60_000, 10_000  # budgets
WHY = "nothing can be offloaded, because the forward pass calls torch.func.grad"


def with_grad(network: nn.Module, value: Tensor) -> Tensor:
    def energy(sample: Tensor) -> Tensor:
        return network[0](sample).sin().sum()

    return value + torch.func.vmap(torch.func.grad(energy))(value)


def with_vjp(network: nn.Module, value: Tensor) -> Tensor:
    out, pull = torch.func.vjp(network[0], value)
    return value + pull(torch.ones_like(out))[0]


def with_jacrev(network: nn.Module, value: Tensor) -> Tensor:
    return value + torch.func.vmap(torch.func.jacrev(network[0]))(value).sum(1)


def with_functional_call(network: nn.Module, value: Tensor) -> Tensor:
    weights = dict(network[0].named_parameters())

    def penalty(named: dict[str, Tensor]) -> Tensor:
        return torch.func.functional_call(network[0], named, value).square().mean()

    return value + torch.func.grad(penalty)(weights)["bias"]


def reads_values(network: nn.Module, value: Tensor) -> Tensor:
    """No dry run can follow it."""
    return with_grad(network, value * max(1.0, network[0].bias.abs().max().item() / 100))


class Net(nn.Module):
    def __init__(self, before: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        layers = [layer for _ in range(DEPTH) for layer in (nn.Linear(WIDTH, WIDTH), nn.Tanh())]
        self.network, self.before = nn.Sequential(*layers, nn.Linear(WIDTH, 4)), before

    def forward(self, value: Tensor) -> Tensor:
        return self.network(self.before(self.network, value))

    def loss(self, batch: Any) -> Tensor:
        return F.cross_entropy(self(batch[0]), batch[1])


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(SAMPLES, WIDTH, generator=generator)
    return inputs, torch.randint(4, (SAMPLES,), generator=generator)


def gradients(net: Net) -> Tensor:
    return torch.cat([one.grad.flatten() for one in net.parameters()])


def plain(before: Callable[[nn.Module, Tensor], Tensor]) -> Tensor:
    net = Net(before)
    net.loss(batch()).backward()
    return gradients(net)


SAMPLEWISE = [with_grad, pytest.param(with_vjp, marks=pytest.mark.long), with_jacrev, reads_values]


@pytest.mark.usefixtures("splits")
@pytest.mark.parametrize("before", [*SAMPLEWISE, with_functional_call])
def test_batches_that_fit_run_whole(tmp_path: Path, before: Callable[..., Tensor]) -> None:
    net = Net(before)
    step = BudgetedStep(net, [], PLAIN, HostDisk(tmp_path))
    step.run(net.loss, batch())
    assert "in 1 sub-batches" in str(step.report())
    assert WHY in " ".join(step.report().what_stayed_plain())
    assert torch.equal(gradients(net), plain(before))
    step.remove()


@pytest.mark.usefixtures("splits")
@pytest.mark.parametrize("before", SAMPLEWISE)
def test_others_run_in_sub_batches(tmp_path: Path, before: Callable[..., Tensor]) -> None:
    net = Net(before)
    step = BudgetedStep(net, [], PARTS, HostDisk(tmp_path))
    shape = step.plan(net.loss, batch())
    assert shape.choice.plan.sub_batch < SAMPLES
    assert not shape.choice.plan.offload
    assert WHY in shape.note
    step.run(net.loss, batch())
    torch.testing.assert_close(gradients(net), plain(before))
    assert step.report().offload is None
    kept = step.state_dict()
    step.remove()
    again = BudgetedStep(net, [], PARTS, HostDisk(tmp_path))
    again.load_state_dict(kept)
    assert again.plan(net.loss, batch()).choice.plan == shape.choice.plan
    again.remove()


@pytest.mark.usefixtures("splits")
@pytest.mark.parametrize("before", [with_grad, reads_values, with_functional_call])
@pytest.mark.parametrize("sub_batches", [True, False])
def test_a_refusal_says_why_nothing_can_be_offloaded(before: Callable[..., Tensor], sub_batches: bool) -> None:
    net = Net(before)
    step = BudgetedStep(net, [], FLOOR, HostMemory("cpu"), sub_batches=sub_batches)
    with pytest.raises(BudgetError, match=r"\. N" + WHY[1:]) as caught:
        step.plan(net.loss, batch())
    assert caught.value.floor_bytes > FLOOR
    step.remove()


def test_calibration_measures_what_runs_without_hooks() -> None:
    net, given = Net(with_grad), batch()
    costs = calibrate(TrainingStep(net, given, SAMPLES, net.loss), HostMemory("cpu"))
    assert costs.fixed_ms + costs.sample_ms > 0
    assert costs.out_bytes_per_ms > 0


def test_what_moves_nothing_is_tried_out_without_hooks() -> None:
    net = Net(with_grad)
    step = TrainingStep(net, batch(), SAMPLES, net.loss)
    memory = StepMemory(step, (SAMPLES,))
    choice = search_plan(step, 2**30, memory=memory)
    taken_ms = PlanTrial(step, HostMemory("cpu"), memory.plain, 2**30).step_ms(choice)
    assert taken_ms > 0


def test_a_step_that_takes_hooks_is_not_affected() -> None:
    net = Net(lambda network, value: value)
    memory = StepMemory(TrainingStep(net, batch(), SAMPLES, net.loss), (SAMPLES,))
    assert memory.floor.no_offload == memory.note == ""
    assert memory.plan(SAMPLES, all_of=True).offload


def test_the_error_says_what_refuses_hooks() -> None:
    net, host = Net(with_grad), HostMemory("cpu")
    context = OffloadSavedTensors(OffloadPlan(1, EVERYTHING, 0, len(EVERYTHING)), host)
    with pytest.raises(NoHooksError, match=WHY), context:
        net.loss(batch())
    assert host.live_bytes() == 0
    with pytest.raises(RuntimeError, match="another"), context:
        raise RuntimeError("another")


def test_hooks_that_nobody_needs_are_not_there() -> None:
    net = Net(with_grad)
    everything = OffloadPlan(1, EVERYTHING, 0, len(EVERYTHING))
    for plan, host in [(OffloadPlan(1), HostNull()), (everything, HostNone())]:
        with OffloadSavedTensors(plan, host, on_mismatch=lambda mismatch: None) as context:
            loss = net.loss(batch())
        loss.backward()
        assert context.report().storages == 0
    torch.testing.assert_close(gradients(net), 2 * plain(with_grad))


def test_without_hooks_a_plan_for_saved_storages_does_not_fit() -> None:
    net = Net(with_grad)
    with (
        pytest.raises(PlanMismatch, match="saved 0 storages"),
        OffloadSavedTensors(OffloadPlan(1, saved=3), HostNone()),
    ):
        net.loss(batch())


def test_the_host_that_is_none_takes_nothing() -> None:
    host = HostNone()
    host.reserve(1, 1)
    assert not host.takes(torch.device("cpu"))
    with pytest.raises(HostError, match="cannot be offloaded"):
        host.store(torch.ones(1).untyped_storage())
    host.close()
