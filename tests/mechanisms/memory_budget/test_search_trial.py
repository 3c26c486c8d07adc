"""Plans that are tried out: the measured time decides, and nothing of the model changes."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from retime.mechanisms.memory_budget.costs import StepCosts, calibrate
from retime.mechanisms.memory_budget.dry_run.run import TrainingStep
from retime.mechanisms.memory_budget.offload.hosts import HostMemory
from retime.mechanisms.memory_budget.search import PlanChoice, PlanTrial, part_sizes, search_plan
from retime.mechanisms.memory_budget.step_memory import StepMemory
from retime.schedules.budget import BudgetError, OffloadPlan

SAMPLES, MANY = 32, 512


def step_of(*layers: nn.Module, samples: int = SAMPLES, writes: bool = False) -> TrainingStep:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), *layers, nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 4))
    batch = torch.randn(samples, 16), torch.randint(4, (samples,))

    def loss(part: tuple[Tensor, Tensor]) -> Tensor:
        if writes:
            part[0].mul_(2)
        return F.cross_entropy(model(part[0]), part[1])

    return TrainingStep(model, batch, samples, loss)


def test_the_measured_time_decides_and_of_equal_times_what_moves_least() -> None:
    step = step_of(samples=MANY)
    memory = StepMemory(step, part_sizes(MANY), StepCosts(fixed_ms=200.0))
    budget = memory.plain.peak_bytes * 9 // 10
    seen: list[OffloadPlan] = []

    def measured(times: dict[int, float]) -> OffloadPlan:
        def trial(choice: PlanChoice) -> float:
            seen.append(choice.plan)
            assert choice.peak_bytes <= budget
            return times.get(choice.plan.sub_batch, 50.0)

        choice = search_plan(step, budget, memory=memory, trial=trial)
        assert choice.step_ms == times.get(choice.plan.sub_batch, 50.0)
        return choice.plan

    predicted = search_plan(step, budget, memory=memory).plan
    assert measured({predicted.sub_batch: 1.0}) == predicted
    sizes = {plan.sub_batch for plan in seen}
    assert len(sizes) > 2
    for size in sizes:
        assert measured({size: 1.0}).sub_batch == size
    assert not measured(dict.fromkeys(sizes, 10.0)).offload
    assert any(plan.offload for plan in seen)


def test_without_a_measurement_the_prediction_decides() -> None:
    step = step_of(samples=MANY)
    memory = StepMemory(step, part_sizes(MANY), StepCosts(fixed_ms=200.0))
    budget = memory.plain.peak_bytes * 9 // 10
    predicted = search_plan(step, budget, memory=memory)
    times = iter([1.0, None, 0.5, 0.1, 0.1])
    assert search_plan(step, budget, memory=memory, trial=lambda choice: next(times)) == predicted


@pytest.mark.parametrize("offload", [frozenset[int](), frozenset({0, 1})])
def test_nothing_changes(offload: frozenset[int]) -> None:
    step = step_of(nn.BatchNorm1d(64), nn.Dropout(0.5))
    before = {name: value.clone() for name, value in step.module.state_dict().items()}
    batch = [tensor.clone() for tensor in step.batch]
    random = torch.get_rng_state()
    host = HostMemory("cpu")
    plain = StepMemory(step, (SAMPLES,)).plain
    choice = PlanChoice(OffloadPlan(SAMPLES // 2, offload, 1, 99), 0, 0, 1.0, 1.0, 0, 0)
    step_ms = PlanTrial(step, host, plain, 2**30).step_ms(choice)
    host.close()
    assert step_ms > 0
    assert all(torch.equal(value, before[name]) for name, value in step.module.state_dict().items())
    assert all(parameter.grad is None for parameter in step.module.parameters())
    assert all(torch.equal(one, other) for one, other in zip(batch, step.batch, strict=True))
    assert torch.equal(random, torch.get_rng_state())


def test_a_step_that_writes_into_its_batch_is_not_tried_out() -> None:
    step = step_of(writes=True)
    plain = StepMemory(step, (SAMPLES,)).plain
    choice = PlanChoice(OffloadPlan(SAMPLES, frozenset(), 0, 99), 0, 0, 1.0, 1.0, 0, 0)
    assert PlanTrial(step, HostMemory("cpu"), plain, 2**30).step_ms(choice) is None


@pytest.mark.parametrize(("samples", "sizes"), [(13, (1, 2, 3, 4, 5, 7, 13)), (5, (1, 2, 3, 5)), (8, (1, 2, 3, 4, 8))])
def test_parts_need_not_divide_the_batch(samples: int, sizes: tuple[int, ...]) -> None:
    memory = StepMemory(step_of(samples=samples), part_sizes(samples))
    assert memory.sub_batches == sizes
    for size in sizes:
        plan = memory.plan(size)
        exact, _ = memory.exact_bytes(plan)
        assert memory.peak_bytes(plan) == pytest.approx(exact, rel=0.02)


def test_a_floor_that_is_named_is_the_one_that_is_required() -> None:
    memory = StepMemory(step_of(), part_sizes(SAMPLES))
    memory.require(floor := memory.floor.bytes)
    with pytest.raises(BudgetError, match=f"at least {floor} bytes"):
        memory.require(floor - 1)


class Masked(nn.Module):
    """Makes a mask in its first forward pass and keeps it."""

    def __init__(self) -> None:
        super().__init__()
        self.mask: Tensor | None = None

    def forward(self, value: Tensor) -> Tensor:
        if self.mask is None:
            self.mask = torch.triu(torch.ones(1, value.shape[1]))
        return value * self.mask


def test_a_model_that_keeps_what_its_first_pass_made_is_planned_for() -> None:
    step = step_of(Masked(), samples=MANY)
    plain = StepMemory(step, (MANY,)).plain
    step = step_of(Masked(), samples=MANY)
    choice = search_plan(step, plain.peak_bytes * 9 // 10)
    assert choice.peak_bytes <= plain.peak_bytes * 9 // 10


@pytest.mark.parametrize("samples", [1, 2, 3, 8])
def test_layers_that_refuse_one_sample_are_calibrated_with_two(samples: int) -> None:
    step = step_of(nn.BatchNorm1d(64), samples=samples)
    if samples == 1:
        step.module.eval()
    host = HostMemory("cpu")
    costs = calibrate(step, host)
    host.close()
    assert costs.fixed_ms + costs.sample_ms > 0


def test_gradients_of_the_step_before_are_no_scratch() -> None:
    step = step_of(nn.Linear(64, 4096), nn.Linear(4096, 64))  # two megabytes of gradients
    host = HostMemory("cpu")
    plain = StepMemory(step, (SAMPLES,)).plain
    freed, kept = (calibrate(replace(step, gradients=one), host, plain=plain) for one in ("freed", "kept"))
    host.close()
    assert abs(kept.scratch(SAMPLES) - freed.scratch(SAMPLES)) < 2**20


def test_a_plan_with_no_room_for_its_trial_is_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    step = step_of()
    plain = StepMemory(step, (SAMPLES,)).plain
    choice = PlanChoice(OffloadPlan(SAMPLES, frozenset(), 0, 99), 0, 0, 1.0, 1.0, 0, 0)
    trial = PlanTrial(step, HostMemory("cpu"), plain, 2**30)

    def untraced(message: str) -> None:
        def fail(*_: object, **__: object) -> None:
            raise RuntimeError(message)

        monkeypatch.setattr("retime.mechanisms.memory_budget.search.DryRun.untraced", fail)

    untraced("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes")
    assert trial.step_ms(choice) is None
    assert "no room" in trial.note
    untraced("something else")
    with pytest.raises(RuntimeError, match="something else"):
        trial.step_ms(choice)
