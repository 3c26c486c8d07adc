"""Steps under a memory budget run what ``torch.compile`` made of them, as plain steps do, or say that they do not."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch._dynamo.backends.debugging import aot_eager
from torch.nn.functional import mse_loss
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

from contract.in_parts import SplitsEverything
from contract.rows import _OffloadsEverything
from contract.scenarios.compiled import Backend
from retime.foundations.messages import DifferenceWarning
from retime.mechanisms.memory_budget import BudgetedStep, HostNull
from retime.strategies import MemoryBudgetStrategy
from support.memory_budget import IGNORED
from support.trainers import quiet_trainer

pytestmark = [*IGNORED, pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")]  # torch.compile reads it
STEPS = 2


class Block(nn.Module):
    """torch does not compile modules of its own in place, so these are not."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, inputs: Tensor) -> Tensor:
        for layer in self.layers:
            inputs = layer(inputs)
        return inputs


class Model(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net: Any = Block(Block(nn.Linear(6, 8)), nn.Tanh(), Block(nn.Linear(8, 6)))
        self.loss: Any = mse_loss

    def forward(self, inputs: Tensor) -> Tensor:
        return self.net(inputs)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss(self(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Recomputed(Model):
    def forward(self, inputs: Tensor) -> Tensor:
        return checkpoint(self.net, inputs, use_reentrant=False)


def compiling(part: str, kind: type[Model] = Model, **options: Any) -> Callable[[Backend], Model]:
    """How to make a model of which this attribute is compiled."""

    def make(backend: Backend) -> Model:
        model = kind()
        setattr(model, part, torch.compile(getattr(model, part), backend=backend, **options))
        return model

    return make


def in_place(backend: Backend) -> Model:
    model = Model()
    model.net.compile(backend=backend)
    return model


def nested(backend: Backend) -> Model:
    model = Model()
    model.net.layers[0] = torch.compile(model.net.layers[0], backend=backend)
    model.net.layers[2].compile(backend=backend)
    return model


def lightning_module_in_place(backend: Backend) -> Model:
    model = Model()
    model.compile(backend=backend)
    return model


module = compiling("net")
FORMS = {
    "module": (module, None),
    "module and backward pass": (module, aot_eager),
    "whole graph": (compiling("net", fullgraph=True), None),
    "in place": (in_place, None),
    "nested": (nested, None),
    "loss function": (compiling("loss"), None),
    "forward": (compiling("forward"), None),
    "lightning module": (lambda backend: torch.compile(Model(), backend=backend), None),
    "lightning module in place": (lightning_module_in_place, None),
    "recomputed": (compiling("net", Recomputed), aot_eager),
}
TIGHT = [_OffloadsEverything, SplitsEverything]


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def fit(make: Callable[[Backend], Any], backend: Backend, strategy: Any) -> Any:
    torch.manual_seed(0)
    inputs = torch.randn(STEPS * 4, 6)
    model = make(backend)
    trainer = quiet_trainer(strategy=strategy, max_epochs=1)
    trainer.fit(model, DataLoader(TensorDataset(inputs, inputs.sin()), batch_size=4))
    return model


def weights(model: Any) -> Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


@pytest.mark.parametrize("form", FORMS)
def test_a_budget_that_is_roomy_runs_compiled_code_as_plain_steps_do(form: str) -> None:
    make, compiler = FORMS[form]
    plain, ours = Backend(compiler), Backend(compiler)
    reference = fit(make, plain, "auto")
    torch._dynamo.reset()
    model = fit(make, ours, MemoryBudgetStrategy(budget=2**31))
    assert plain.calls >= STEPS
    assert (ours.calls, ours.compiled) == (plain.calls, plain.compiled)
    assert torch.equal(weights(model), weights(reference))


@pytest.mark.parametrize("form", ["module", "loss function", "recomputed"])
@pytest.mark.parametrize("strategy", TIGHT)
def test_a_budget_that_is_tight_says_that_it_runs_uncompiled_code(form: str, strategy: Any) -> None:
    make, compiler = FORMS[form]
    plain, ours = Backend(compiler), Backend(compiler)
    reference = fit(make, plain, "auto")
    torch._dynamo.reset()
    with pytest.warns(DifferenceWarning, match="runs uncompiled") as told:
        model = fit(make, ours, strategy())
    assert sum("runs uncompiled" in str(one.message) for one in told) == 1
    assert ours.calls == ours.compiled == 0
    exactly = strategy is _OffloadsEverything
    torch.testing.assert_close(weights(model), weights(reference), rtol=0, atol=0 if exactly else 1e-6)


@pytest.mark.parametrize("strategy", TIGHT)
def test_compiled_code_runs_again_after_a_fit(strategy: Any) -> None:
    backend = Backend()
    with pytest.warns(DifferenceWarning):
        model = fit(module, backend, strategy())
    model(torch.randn(4, 6))
    assert backend.calls == 1


def test_a_stance_of_the_users_own_comes_back() -> None:
    backend = Backend()
    with torch.compiler.set_stance("force_eager"):
        model = fit(module, backend, MemoryBudgetStrategy(budget=2**31))
        model(torch.randn(4, 6))
        assert not backend.calls
    model(torch.randn(4, 6))
    assert backend.calls == 1


def test_compiled_code_may_call_a_budgeted_step() -> None:
    backend = Backend()
    net = nn.Linear(6, 6)
    step = BudgetedStep(net, [], 2**31, HostNull())
    run = torch.compile(lambda batch: step.run(lambda part: net(part).square().mean(), batch), backend=backend)
    loss = run(torch.ones(4, 6))
    step.remove()
    assert torch.equal(loss, net(torch.ones(4, 6)).square().mean().detach())
    assert net.weight.grad is not None
