"""Models and fits for the tests of the memory budget: budgets are real, measured times are not."""

from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import retime.mechanisms.memory_budget.planner as step_planner
from retime.mechanisms.memory_budget.costs import StepCosts
from retime.mechanisms.memory_budget.offload.hosts import HostMemory
from retime.mechanisms.memory_budget.offload.saved_tensors import OffloadSavedTensors
from retime.mechanisms.memory_budget.report import BudgetReport
from retime.mechanisms.memory_budget.step import BudgetedStep
from retime.schedules.budget import OffloadPlan
from retime.strategies import MemoryBudgetStrategy
from support.trainers import IGNORED_WARNINGS, MemoryLogger, quiet_trainer

FEATURES, CLASSES, BATCH = 16, 4, 256
WIDTH, DEPTH = 16, 8
# What calibrate would measure; either makes one of the two ways to save memory the cheaper one.
SPLITS = StepCosts(fixed_ms=0.01, sample_ms=1.0, out_bytes_per_ms=1.0, in_bytes_per_ms=1.0)
OFFLOADS = StepCosts(fixed_ms=1e6, sample_ms=1.0)
WAYS = {"offload": OFFLOADS, "sub-batches": SPLITS}
OFFLOAD_LATER = pytest.mark.parametrize(
    "way", ["sub-batches", pytest.param("offload", marks=pytest.mark.long)], indirect=True
)
"""For tests of what parts change, of which offloading runs the plain way."""
# Budgets; the plain step needs 209,000 bytes, with BatchNorm 343,000.
SMALL = 120_000  # either way is enough
TINY = 60_000  # below the floor of whole batches
SHALLOW = 86_000  # for ShallowNet: either way is enough, and parts begin at the same samples

IGNORED = IGNORED_WARNINGS


def use_costs(monkeypatch: pytest.MonkeyPatch, costs: StepCosts) -> None:
    """Plan with these times, no scratch and no trials, so that the same budget gives the same plan on every machine."""
    monkeypatch.setattr(step_planner, "calibrate", lambda *_, **__: costs)
    monkeypatch.setattr(step_planner, "least_costs", lambda *_, **__: replace(costs, spare_bytes=costs.scratch(1)))
    monkeypatch.setattr(step_planner.PlanTrial, "step_ms", lambda *_: None)


class Notes(MemoryLogger):
    """Keeps what it is told, also through ``experiment``."""

    def __init__(self) -> None:
        super().__init__()
        self.noted: list[Any] = []

    @property
    def experiment(self) -> Any:
        return self

    def note(self, what: Any) -> None:
        self.noted.append(what)


class Steps(Callback):
    """Counts the optimizer's steps."""

    steps = 0

    def on_before_optimizer_step(self, *_: Any) -> None:
        self.steps += 1


class Outputs(Callback):
    """Keeps what callbacks are given."""

    def __init__(self) -> None:
        self.outputs: list[Any] = []

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.outputs.append(outputs)


class Looks(Callback):
    """The second epoch trains nothing; weight averaging has such a one for BatchNorm's statistics."""

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        looks = trainer.current_epoch == 1
        trainer.fit_loop._skip_backward = looks
        trainer.accumulate_grad_batches = 99 if looks else 1  # no optimizer step


def norm() -> nn.Module:
    """For :class:`Net`: batch statistics keep batches whole."""
    return nn.BatchNorm1d(WIDTH)


class Net(LightningModule):
    """A deep classifier whose activations are most of a step's memory."""

    def __init__(self, norm: Callable[[], nn.Module] | None = None, width: int = WIDTH, depth: int = DEPTH) -> None:
        super().__init__()
        torch.manual_seed(0)
        layers: list[nn.Module] = [nn.Linear(FEATURES, width)]
        for _ in range(depth):
            layers += [nn.Linear(width, width), *([norm()] if norm else []), nn.Tanh()]
        self.net = nn.Sequential(*layers, nn.Linear(width, CLASSES))
        self.lr = 0.1

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.net(inputs)

    def loss(self, batch: Any) -> torch.Tensor:
        return F.cross_entropy(self.net(batch[0]), batch[1])

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(batch)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.lr)


class ShallowNet(Net):
    """Half as deep: planning takes as long as a model is deep."""

    def __init__(self, norm: Callable[[], nn.Module] | None = None) -> None:
        super().__init__(norm, depth=4)


def model_of(*more: nn.Module, depth: int = 4) -> nn.Sequential:
    """A chain for loops of a test's own, behind layers of its own."""
    torch.manual_seed(0)
    layers = [layer for _ in range(depth) for layer in (nn.Linear(FEATURES, FEATURES), nn.Tanh())]
    return nn.Sequential(*more, *layers, nn.Linear(FEATURES, 1))


def offload_all(
    host: Any, keep: Sequence[torch.Tensor] = (), in_flight_bytes: int = 0, prefetch: int = 0
) -> OffloadSavedTensors:
    """Of all that a forward pass saves; it need not reach the plan's numbers."""
    plan = OffloadPlan(1, frozenset(range(1000)), prefetch, 1000)
    return OffloadSavedTensors(plan, host, keep, in_flight_bytes, on_mismatch=lambda mismatch: None)


def run_loop(
    model: nn.Module, loss: Callable[[Any], torch.Tensor], batches: Iterable[Any], budget: int | None
) -> BudgetReport | None:
    """Train in a bare loop, plainly or with a budget, whose report is returned."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    budgeted = None if budget is None else BudgetedStep(model, [optimizer], budget, HostMemory("cpu"))
    try:
        for batch in batches:
            optimizer.zero_grad()
            loss(batch).backward() if budgeted is None else budgeted.run(loss, batch)
            optimizer.step()
        return budgeted and budgeted.report()
    finally:
        if budgeted is not None:
            budgeted.remove()


def loader(batches: int = 3, extra: int = 0, batch: int = BATCH) -> DataLoader[Any]:
    """Fixed samples; ``extra`` ones make a short last batch."""
    generator = torch.Generator().manual_seed(1)
    samples = batches * batch + extra
    inputs = torch.randn(samples, FEATURES, generator=generator)
    return DataLoader(TensorDataset(inputs, torch.randint(CLASSES, (samples,), generator=generator)), batch_size=batch)


def trainer(strategy: Any, **options: Any) -> Trainer:
    given: dict[str, Any] = {"max_epochs": 1, "log_every_n_steps": 1, "num_sanity_val_steps": 0}
    return quiet_trainer(strategy=strategy, **given | options)


def fit(module: LightningModule, strategy: Any = "auto", data: Any = None, **options: Any) -> Trainer:
    torch.manual_seed(5)
    runner = trainer(strategy, **options)
    runner.fit(module, loader() if data is None else data)
    return runner


def fit_both(make: Callable[[], Any], budget: Any, data: Any = None, **options: Any) -> tuple[Any, Any, Any]:
    """Fit two of a kind, plainly and under a budget: bytes, or a strategy; returns both, and the budget's report."""
    plain, ours = make(), make()
    fit(plain, data=data, **options)
    strategy = budget if isinstance(budget, MemoryBudgetStrategy) else MemoryBudgetStrategy(budget)
    return plain, ours, report_of(fit(ours, strategy, data, **options))


def assert_close(plain: LightningModule, ours: LightningModule, tolerance: float = 1e-5) -> None:
    """Weights and buffers agree: bit by bit with tolerance 0, else relative to each tensor's largest entry."""
    left, right = plain.state_dict(), ours.state_dict()
    assert left.keys() == right.keys()
    for name, value in left.items():
        if tolerance == 0 or not value.is_floating_point():
            assert torch.equal(value, right[name]), name
        else:
            difference = (value - right[name]).abs().max()
            assert difference <= tolerance * value.abs().max(), f"{name}: {difference}"


def assert_way(report: Any, way: str) -> None:
    """The batches ran in the way that the test is about."""
    if way == "offload":
        assert report.offload.storages > 0
        assert report.sub_batches == report.steps
    else:
        assert report.sub_batches > report.steps


def assert_same(plain: LightningModule, ours: LightningModule, way: str, tolerance: float = 1e-5) -> None:
    """Offloading keeps the bits; sub-batches add up in another order."""
    assert_close(plain, ours, 0 if way == "offload" else tolerance)


def report_of(trainer: Trainer) -> Any:
    return trainer.strategy.report()


def accelerate_loop(
    how: str,
    accumulate: int = 1,
    budget: int = SMALL,
    *,
    module: Net | None = None,
    data: Any = None,
    folder: Path | None = None,
    plan_to: Path | None = None,
    **options: Any,
) -> tuple[Net, list[BudgetReport], dict[str, Any]]:
    """Train in a loop of one's own: by ``MemoryBudget.run``, around its own ``forward``, or ``"plain"``.

    ``accelerator.save_state`` keeps what is left in ``folder``; a run that finds something there begins with it.
    Returns the module, the reports, and what a checkpoint of the budget keeps.
    """
    from accelerate import Accelerator  # here, so that the other tests need not import it
    from accelerate.state import GradientState

    from retime.integrations.accelerate import MemoryBudget

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=accumulate)
    module = module or Net()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    model, optimizer, batches = accelerator.prepare(module, optimizer, loader() if data is None else data)
    kept = MemoryBudget(accelerator, model, optimizer, budget, **options)

    def step(batch: Any) -> torch.Tensor:
        return F.cross_entropy(model(batch[0]), batch[1])

    try:
        if folder is not None and any(folder.iterdir()):
            accelerator.load_state(str(folder))
        for batch in batches:
            with accelerator.accumulate(model):
                if how == "run":
                    kept.run(step, batch)
                else:
                    with kept.forward(step, batch) if how == "forward" else nullcontext():
                        loss = step(batch)
                    accelerator.backward(loss)
                    del loss
                accelerator.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                optimizer.zero_grad()
        if folder is not None:
            accelerator.save_state(str(folder))
        if plan_to is not None:
            kept.save_plan(plan_to)
        return module, kept.report(), kept.state_dict()
    finally:
        kept.remove()
        GradientState._reset_state()  # it holds the loader of a loop that was left by an error
