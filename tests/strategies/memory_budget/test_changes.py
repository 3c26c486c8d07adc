"""Models that change while they train, or since a checkpoint: a plan is for the step that it was made for."""

from typing import Any

import pytest
import torch
from torch import nn

from retime.mechanisms.memory_budget.offload.hosts import HostMemory
from retime.mechanisms.memory_budget.step import BudgetedStep
from retime.schedules.errors import ScheduleError
from support import memory_budget as support
from support.memory_budget import BATCH, FEATURES, SHALLOW, model_of

pytestmark = [*support.IGNORED, pytest.mark.usefixtures("offloads")]


def budgeted(model: nn.Module, **options: Any) -> BudgetedStep:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return BudgetedStep(model, [optimizer], SHALLOW, HostMemory("cpu"), **options)


def test_layers_that_thaw_are_planned_for() -> None:
    model = model_of()
    for parameter in list(model.parameters())[:-2]:
        parameter.requires_grad_(False)
    step, batch = budgeted(model), torch.randn(BATCH, FEATURES)
    frozen = step.plan(lambda part: model(part).mean(), batch)
    assert not frozen.choice.plan.offload  # a frozen layer saves nothing
    model.requires_grad_(True)
    thawed = step.plan(lambda part: model(part).mean(), batch)
    assert thawed.choice.plan.offload
    assert step.plan(lambda part: model(part).mean(), batch) is thawed
    assert step.report().plans == 2
    step.remove()


def test_another_mode_is_planned_for() -> None:
    model = model_of(nn.BatchNorm1d(FEATURES))
    model[0].eval()
    step, batch = budgeted(model), torch.randn(BATCH, FEATURES)
    step.plan(lambda part: model(part).mean(), batch)
    model[0].train()
    again = step.plan(lambda part: model(part).mean(), batch)
    assert step.report().plans == 2
    assert again.choice.plan.sub_batch == BATCH  # batch statistics
    step.remove()


def test_gradients_that_stay_are_planned_for() -> None:
    model = model_of()
    step, batch = budgeted(model), torch.randn(BATCH, FEATURES)
    freed = step.plan(lambda part: model(part).mean(), batch)
    step.expect_gradients("kept")
    kept = step.plan(lambda part: model(part).mean(), batch)
    assert kept.choice.plan.offload >= freed.choice.plan.offload
    assert kept.choice.tensor_bytes > freed.choice.tensor_bytes
    step.expect_gradients("freed")
    assert step.plan(lambda part: model(part).mean(), batch) is freed
    step.remove()


def test_a_change_is_refused_on_request_and_called_by_its_name() -> None:
    model = model_of()
    step, batch = budgeted(model, on_shape_change="error"), torch.randn(BATCH, FEATURES)
    step.plan(lambda part: model(part).mean(), batch)
    model[0].requires_grad_(False)
    with pytest.raises(ScheduleError, match="frozen"):
        step.plan(lambda part: model(part).mean(), batch)
    model[0].requires_grad_(True)
    with pytest.raises(ScheduleError, match="another shape"):
        step.plan(lambda part: model(part).mean(), torch.cat([batch, batch]))
    step.remove()


def test_a_kept_plan_is_not_taken_by_a_step_that_needs_more() -> None:
    model = model_of()
    step, batch = budgeted(model), torch.randn(BATCH, FEATURES)
    step.plan(lambda part: model(part).mean(), batch)
    state = step.state_dict()
    step.remove()

    same = budgeted(model)
    same.load_state_dict(state)
    assert "plan of an earlier run" in str(same.plan(lambda part: model(part).mean(), batch))
    same.remove()

    larger = budgeted(model)
    larger.load_state_dict(state)
    more = larger.plan(lambda part: model(part).mul(torch.ones(100)).square().mean(), batch)
    assert "plan of an earlier run" not in str(more)
    larger.remove()


def test_a_sparse_buffer_is_no_obstacle(monkeypatch: pytest.MonkeyPatch) -> None:
    class Graph(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("adjacency", torch.eye(FEATURES).to_sparse())

        def forward(self, values: torch.Tensor) -> torch.Tensor:
            return torch.sparse.mm(self.adjacency, values.T).T  # type: ignore[arg-type]

    monkeypatch.undo()  # really calibrated
    model = model_of(Graph())
    step, batch = budgeted(model), torch.randn(BATCH, FEATURES)
    step.budget_bytes = step._planner.budget_bytes = 400_000
    step.run(lambda part: model(part).mean(), batch)
    assert all(parameter.grad is not None for parameter in model.parameters())
    assert step.state_dict()["plans"]
    step.remove()
