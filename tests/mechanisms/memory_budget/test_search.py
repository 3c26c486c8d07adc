"""The floor, plans within a budget, and refusals below it: every chosen plan keeps its budget when it really runs."""

import gc
import random
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from retime.foundations.cpu_pool.pool import POOLED_BYTES
from retime.mechanisms.memory_budget.costs import Scratch, StepCosts, rest_between
from retime.mechanisms.memory_budget.dry_run.profile import Size
from retime.mechanisms.memory_budget.dry_run.run import TrainingStep, replay
from retime.mechanisms.memory_budget.search import PlanChoice, part_sizes, search_plan
from retime.mechanisms.memory_budget.step_memory import StepMemory
from retime.schedules.budget import BudgetError, OffloadPlan
from retime.schedules.errors import ScheduleError
from support.profiled_steps import MODELS, SAMPLES, Reads, step_of


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("only_batch", [False, pytest.param(True, marks=pytest.mark.long)])
def test_budgets_down_to_the_floor_are_kept(name: str, only_batch: bool) -> None:
    step = step_of(name)
    memory = StepMemory(step, (SAMPLES,) if only_batch else part_sizes(SAMPLES, 2))
    floor, peak = memory.floor.bytes, memory.plain.peak_bytes
    for budget in (peak, peak - 1, (floor + peak) // 2, floor):
        choice = search_plan(step, budget, memory=memory)
        assert choice.peak_bytes <= budget
        real = replay(step, choice.plan, in_flight_bytes=choice.in_flight_bytes, real=True)
        assert real.peak_bytes <= budget
        if only_batch:
            assert choice.plan.sub_batch == SAMPLES
    with pytest.raises(BudgetError, match="below this step's floor") as caught:
        search_plan(step, floor - 1, memory=memory)
    assert caught.value.floor_bytes == floor
    assert caught.value.layer


def test_put_together_peaks_are_those_of_dry_runs() -> None:
    step = step_of("convolutions")
    memory = StepMemory(step, part_sizes(SAMPLES))
    chance = random.Random(0)
    for sub_batch in (SAMPLES, 4, 2):
        saved = memory.plan(sub_batch).saved
        for _ in range(4):
            numbers = frozenset(chance.sample(range(saved), chance.randrange(saved)))
            plan = OffloadPlan(sub_batch, numbers, 0, saved)
            exact, _ = memory.exact_bytes(plan)
            assert memory.peak_bytes(plan) == pytest.approx(exact, rel=0.01)
            ahead = OffloadPlan(sub_batch, numbers, 2, saved)
            assert memory.peak_bytes(ahead, 3000) >= 0.99 * memory.exact_bytes(ahead, 3000)[0]


def test_nothing_moves_when_all_fits() -> None:
    step = step_of("convolutions")
    choice = search_plan(step, 10**9)
    assert choice.plan.sub_batch == SAMPLES
    assert not choice.plan.offload
    assert (choice.out_bytes, choice.floor) == (0, None)
    assert choice.step_ms == choice.plain_ms


def test_costs_decide_between_sub_batches_and_copies() -> None:
    step = step_of("convolutions")
    sizes = part_sizes(SAMPLES, 2)
    budget = StepMemory(step, sizes).plain.peak_bytes * 3 // 4
    slow_copies = StepCosts(fixed_ms=1, sample_ms=1, out_bytes_per_ms=10, in_bytes_per_ms=10)
    slow_starts = StepCosts(fixed_ms=1e6, sample_ms=1)
    split = search_plan(step, budget, memory=StepMemory(step, sizes, slow_copies)).plan
    moved = search_plan(step, budget, memory=StepMemory(step, sizes, slow_starts)).plan
    assert split.sub_batch < SAMPLES
    assert not split.offload
    assert moved.sub_batch == SAMPLES
    assert moved.offload


def test_scratch_counts_against_the_budget() -> None:
    step = step_of("convolutions")
    plain = StepMemory(step, (SAMPLES,)).plain
    at_peak = plain.trace.operations[plain.trace.peak_at].kind
    costs = StepCosts(operations={at_peak: Size(0, 1000)}, scratch_bytes=7)
    memory = StepMemory(step, (SAMPLES,), costs)
    choice = search_plan(step, plain.peak_bytes + SAMPLES * 1000 + 7, memory=memory)
    assert not choice.plan.offload
    assert choice.peak_bytes == plain.peak_bytes + SAMPLES * 1000 + 7
    less = search_plan(step, plain.peak_bytes + SAMPLES * 1000 + 6, memory=memory)
    assert less.plan.offload


def test_a_step_that_reads_values_is_planned_from_real_runs() -> None:
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for _ in range(4):
        layers += [nn.Linear(64, 64), nn.Tanh()]
    model = nn.Sequential(Reads(), *layers)
    values = torch.randn(64, 64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    step = TrainingStep(model, values, 64, lambda batch: model(batch).square().sum(), [optimizer])
    memory = StepMemory(step, part_sizes(64, 4))
    assert memory.plain is None
    assert "reads the value" in memory.note
    whole = replay(step, OffloadPlan(64), real=True).peak_bytes
    assert memory.peak_bytes(memory.plan(64)) == pytest.approx(whole, rel=0.02)
    budget = (memory.floor.bytes + whole) // 2
    choice = search_plan(step, budget, memory=memory)
    real = replay(step, choice.plan, in_flight_bytes=choice.in_flight_bytes, real=True)
    assert real.peak_bytes <= 1.02 * budget


def test_a_kernel_that_saves_more_than_it_says_is_noticed() -> None:
    model = nn.LSTM(16, 32, batch_first=True)
    step = TrainingStep(model, torch.randn(64, 20, 16), 64, lambda batch: model(batch)[0].square().sum())
    real = replay(step, OffloadPlan(64), real=True)
    dry = replay(step, OffloadPlan(64))
    if [one.nbytes for one in dry.saved] == [one.nbytes for one in real.saved]:
        pytest.skip("this build's LSTM saves what it says")
    memory = StepMemory(step, (64,), check=True)
    assert memory.plain is None
    assert "saves other storages" in memory.note
    assert memory.plan(64).saved == len(real.saved)
    # oneDNN's work space grows in steps, so one and two samples say only roughly what 64 need.
    assert memory.peak_bytes(memory.plan(64)) == pytest.approx(real.peak_bytes, rel=0.1)


@pytest.mark.parametrize(
    ("first", "second", "samples", "expected"),
    [(1, 44, 32, 44), (1, 44, 256, 44), (44, 0, 32, 44), (44, 0, 256, 44), (100, 300, 128, 700)],
)
def test_what_is_beyond_tensors_grows_only_where_counts_are_no_noise(
    first: int, second: int, samples: int, expected: int
) -> None:
    """Measured at two sizes, of 32 and 64 samples, in KiB."""
    between = rest_between(Scratch({}, first * 1024, 0), Scratch({}, second * 1024, 0), 32, 64)
    assert between.at(samples) == expected * 1024


def test_costs_have_units_and_limits() -> None:
    costs = StepCosts(fixed_ms=2, sample_ms=1, update_ms=5, out_bytes_per_ms=10, in_bytes_per_ms=20, hidden=0.5)
    computing, copying = 4 * 2 + 8 * 1, 4 * (100 / 10 + 100 / 20)
    assert costs.step_ms(8, 2, 100, 100, ahead=False) == computing + copying + 5
    assert costs.step_ms(8, 2, 100, 100) == computing + copying - min(copying / 2, computing) + 5
    with pytest.raises(ScheduleError, match="from 0 to 1"):
        StepCosts(hidden=2)
    with pytest.raises(ScheduleError, match="must be positive"):
        StepCosts(out_bytes_per_ms=0)


def gone_or_sum(model: weakref.ref[nn.Module]) -> Callable[[Any], Tensor]:
    def loss(part: Any) -> Tensor:
        alive = model()
        assert alive is not None
        output: Tensor = alive(part)
        return output.sum()

    return loss


def test_models_go_when_their_plans_are_made():
    model = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 4))
    batch = torch.randn(8, 8)
    gone = weakref.ref(model)
    memory = StepMemory(TrainingStep(model, batch, 8, gone_or_sum(gone)), (8, 4, 2), check=True)
    assert memory.floor.bytes > 0
    del model, memory
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize("budget_share", [0.6, 1.5])
def test_choices_carry_what_was_measured(budget_share: float) -> None:
    """Also those that fit at once: what is needed beside tensors goes with the plan, which leaves room for it."""
    step = step_of("convolutions")
    costs = StepCosts(scratch_bytes=1000, spare_bytes=500)
    memory = StepMemory(step, part_sizes(step.samples), costs)
    whole = search_plan(step, 2**40, memory=memory)
    chosen = search_plan(step, int(budget_share * whole.peak_bytes), memory=memory)
    assert (chosen.scratch_bytes, chosen.spare_bytes) == (1000, 500)
    assert chosen.peak_bytes + 500 <= budget_share * whole.peak_bytes


WIDTH, DEPTH, MANY = 64, 12, 256
ROOMY = 2**40


def choice_of(samples: int, sub_batch: int, budget_bytes: int = ROOMY) -> PlanChoice:
    """One layer's weights over and over: activations are most of what a step holds, 256 bytes a sample each."""
    layer = nn.Linear(WIDTH, WIDTH)
    net = nn.Sequential(*(part for _ in range(DEPTH) for part in (layer, nn.Tanh())))
    step = TrainingStep(net, torch.randn(samples, WIDTH), samples, lambda batch: net(batch).square().mean())
    return search_plan(step, budget_bytes, memory=StepMemory(step, (sub_batch,)))


@pytest.mark.parametrize(("samples", "small"), [(32, True), (MANY, False)])
def test_tensors_that_are_too_small_for_the_pool_are_told_apart(samples: int, small: bool) -> None:
    """Activations of 8 KiB, and of 64 KiB."""
    choice = choice_of(samples, samples)
    if small:
        assert choice.small_bytes >= DEPTH // 2 * samples * WIDTH * 4
    else:
        assert choice.small_bytes < POOLED_BYTES


def test_parts_have_small_tensors_where_the_batch_has_none() -> None:
    whole = choice_of(MANY, MANY)
    parts = choice_of(MANY, 32, whole.peak_bytes)
    assert parts.plan.sub_batch == 32
    assert parts.small_bytes >= DEPTH // 2 * 32 * WIDTH * 4


def test_small_tensors_are_not_reserved() -> None:
    choice = replace(choice_of(32, 32), spare_bytes=1)  # as of a plan that was measured
    large = choice.peak_bytes - choice.small_bytes
    assert large <= choice.reserved_bytes(ROOMY) < 1.1 * large < choice.peak_bytes
