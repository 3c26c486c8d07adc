"""TorchScript modules keep their tensors where no stand-ins can be put: they are planned for, and never split."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from retime.foundations.parts.combine import batch_statistics_layers
from retime.foundations.preserve_state.stand_ins import ScratchModel
from retime.mechanisms.memory_budget.dry_run.run import DryRun, TrainingStep
from retime.mechanisms.memory_budget.separability.certify import certify
from retime.schedules.budget import BudgetError, OffloadPlan
from support.memory_budget import run_loop

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
SAMPLES = 256


def scripted(norm: nn.Module | None = None) -> nn.Sequential:
    torch.manual_seed(0)
    inner = torch.jit.script(nn.Sequential(nn.Linear(64, 64), norm or nn.LayerNorm(64), nn.Tanh()))
    deep = [layer for _ in range(6) for layer in (nn.Linear(64, 64), nn.Tanh())]
    return nn.Sequential(nn.Linear(8, 64), *deep, inner, nn.Linear(64, 4))


def step_of(model: nn.Module, optimizers: tuple[torch.optim.Optimizer, ...] = ()) -> TrainingStep:
    torch.manual_seed(3)
    batch = torch.randn(SAMPLES, 8), torch.randint(4, (SAMPLES,))
    return TrainingStep(model, batch, SAMPLES, lambda part: F.cross_entropy(model(part[0]), part[1]), optimizers)


@pytest.mark.parametrize("how", ["fake", "copies", "in place"])
def test_runs_leave_no_trace(how: str) -> None:
    model = scripted(nn.BatchNorm1d(64))
    assert batch_statistics_layers(model) == ["13.1"]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    kept = torch.ones_like(model[13][0].weight)
    model[13][0].weight.grad = kept
    optimizers = () if how == "in place" else (optimizer,)
    run = DryRun(step_of(model, optimizers), real=how != "fake", in_place=how == "in place")
    assert run.run(OffloadPlan(SAMPLES)).peak_bytes > 0
    assert not run.not_run
    run.untraced()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert model[13][0].weight.grad is kept
    assert bool((kept == 1).all())
    assert not optimizer.state
    assert [parameter.grad for parameter in model[0].parameters()] == [None, None]


def test_a_batch_is_not_split_and_the_module_is_named() -> None:
    model = scripted()
    step = step_of(model)
    certificate = certify(step.loss, step.batch, model)
    assert not certificate.separable
    assert "13 is a TorchScript module, whose parameters cannot be stood in for" in certificate.reason
    with pytest.raises(ValueError, match="13 is a TorchScript module"):
        ScratchModel(model)


def test_a_scripted_function_of_a_module_without_tensors_is_no_matter() -> None:
    model = nn.Sequential(nn.Linear(8, 4), torch.jit.script(nn.Tanh()))
    step = step_of(model)
    assert certify(step.loss, step.batch, model).separable


@pytest.mark.parametrize("share", [20.0, 1.5, 0.05])
def test_budgets(share: float) -> None:
    def train(model: nn.Module, budget_bytes: int | None) -> list[Tensor]:
        step = step_of(model)
        run_loop(model, step.loss, [step.batch] * 2, budget_bytes)
        return [value.clone() for value in model.state_dict().values()]

    peak = DryRun(step_of(scripted())).run(OffloadPlan(SAMPLES)).peak_bytes
    budget_bytes = int(share * peak) + (2**20 if share > 1 else 0)
    if share < 1:
        with pytest.raises(BudgetError, match="13 is a TorchScript module"):
            train(scripted(), budget_bytes)
        return
    for one, two in zip(train(scripted(), None), train(scripted(), budget_bytes), strict=True):
        torch.testing.assert_close(one, two)  # TorchScript rewrites a module once it has run a few times
