"""Plans that were replaced leave nothing behind: neither hooks' records nor space on the host."""

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from retime.mechanisms.memory_budget.offload.hosts import Extents, HostDisk, HostMemory
from retime.mechanisms.memory_budget.planner import StepPlanner
from retime.mechanisms.memory_budget.report import PlannedShape
from retime.mechanisms.memory_budget.search import PlanChoice
from retime.mechanisms.memory_budget.step import BudgetedStep
from retime.schedules.budget import OffloadPlan

WIDTH, SAMPLES, DEPTH = 64, 64, 8
STORAGE_BYTES = 4 * WIDTH * SAMPLES


class Shrinking(nn.Module):
    """Leaves its last layers out from some batch on, so that plans of batches before do not hold."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(DEPTH))
        self.used = DEPTH

    def forward(self, value: Tensor) -> Tensor:
        for layer in self.layers[: self.used]:
            value = torch.tanh(layer(value))
        return value.mean()


class Offloading(BudgetedStep):
    """Offloads all that the model of this test saves, which no search has to find."""

    def __init__(self, model: Shrinking, host: Any) -> None:
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        super().__init__(model, [optimizer], "1GiB", host, sub_batches=False, make_plan=self._plan)

    @staticmethod
    def _plan(planner: StepPlanner, step: Any, batch: Any, samples: int) -> PlannedShape:
        storages = planner.model.used
        plan = OffloadPlan(samples, frozenset(range(storages)), 1, storages)
        nbytes = storages * STORAGE_BYTES
        return PlannedShape(samples, PlanChoice(plan, 0, nbytes, 1.0, 1.0, nbytes, nbytes))


def replan(step: Offloading, model: Shrinking, batch: Tensor) -> list[int]:
    """Train with fewer and fewer layers; how many plans were in use after each."""
    counts = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for used in range(DEPTH, 0, -1):
            model.used = used
            for _ in range(4):
                step.run(model, batch)
            counts.append(len(step._offloads))
    return counts


def test_offloads_hold_only_live_plans() -> None:
    model = Shrinking()
    step = Offloading(model, HostMemory("cpu"))
    assert replan(step, model, torch.randn(SAMPLES, WIDTH)) == [1] * DEPTH
    report = step.report()
    assert sum(report.replanned.values()) == DEPTH - 1
    assert report.offload.passes == 4 * DEPTH, "counts of plans that went are kept"
    assert report.offload.bytes_in == report.offload.bytes_out > 0
    step.remove()


def test_memory_is_reserved_for_live_plans_only() -> None:
    model, host = Shrinking(), HostMemory("cpu")
    step = Offloading(model, host)
    replan(step, model, torch.randn(SAMPLES, WIDTH))
    assert host.live_bytes() == 0
    assert host._cached.nbytes <= STORAGE_BYTES, "one layer is left"
    step.remove()


def test_a_file_is_as_long_as_live_plans_need(tmp_path: Path) -> None:
    model, host = Shrinking(), HostDisk(tmp_path)
    step = Offloading(model, host)
    step.run(model, torch.randn(SAMPLES, WIDTH))
    assert host._reserved >= DEPTH * STORAGE_BYTES
    replan(step, model, torch.randn(SAMPLES, WIDTH))
    assert host._reserved == host._extents.rounded(STORAGE_BYTES) + host._extents.rounded(1)
    step.remove()


def test_what_is_in_flight_stays_until_its_backward_pass() -> None:
    model = Shrinking()
    step = Offloading(model, HostMemory("cpu"))
    batch = torch.randn(SAMPLES, WIDTH)
    with step.offloading(model, batch):
        first = model(batch)
    longer = torch.randn(SAMPLES, 2, WIDTH)
    step.report().replanned.clear()
    step._plans.book._entries.clear()  # as a mismatch does
    with step.offloading(model, longer):
        second = model(longer)
    assert len(step._offloads) == 1, "both have the same plan"
    model.used = 3
    step._plans.book._entries.clear()
    third = torch.randn(SAMPLES, 3, WIDTH)
    with step.offloading(model, third):
        loss = model(third)
    assert len(step._offloads) == 2
    (first + second + loss).backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    del first, second, loss
    with step.offloading(model, third):
        model(third).backward()
    assert len(step._offloads) == 1
    step.remove()


@pytest.mark.parametrize("last", [False, True])
def test_places_at_the_end_are_given_up(last: bool) -> None:
    extents = Extents(alignment=4)
    places = [extents.take(8) for _ in range(3)]
    extents.give_back(places[1], 8)
    assert extents.trimmed() == 24
    if last:
        extents.give_back(places[2], 8)
    assert extents.trimmed() == (8 if last else 24)
    assert extents.take(8) == 8, "what is free is used again"
