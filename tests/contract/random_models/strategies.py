"""The strategies and callbacks for one device, each with what it promises."""

from dataclasses import replace
from functools import partialmethod
from typing import Any
from unittest.mock import patch

from lightning.pytorch import Trainer

from contract.random_models.fits import Fit, counted, train_fit
from contract.random_models.mechanisms import UPDATED_TWICE, Mechanism, double, in_backward
from contract.random_models.spec import Spec
from contract.random_models.training import Order, as_given
from retime.callbacks import FuseOptimizer
from retime.mechanisms.memory_budget import PlannedShape, StepPlanner, part_sizes
from retime.mechanisms.memory_budget import planner as step_planner
from retime.mechanisms.memory_budget.step_memory import StepMemory
from retime.strategies import FusedOptimizerStrategy, MemoryBudgetStrategy
from support.memory_budget import OFFLOADS, SPLITS

_fused = counted("fused_updates")


def _fused_by_callback(trainer: Trainer) -> bool:
    callback = next(one for one in trainer.callbacks if isinstance(one, FuseOptimizer))
    return callback.report().fused_updates > 0


def _moved(trainer: Trainer) -> bool:
    report = trainer.strategy.report()
    if report is None:
        return False
    return report.sub_batches > report.steps or bool(report.offload is not None and report.offload.storages)


_ABOVE_FLOOR = 1.05
_MAKE = StepPlanner.make
_UNKNOWN = 1
"""A budget, in bytes, until the first plan shows the floor."""


def _few_sizes(samples: int, smallest: int = 1) -> tuple[int, ...]:
    """As :func:`part_sizes`, but only every other size and the smallest: each is run dry."""
    sizes = part_sizes(samples, smallest)
    return tuple(sorted({*sizes[::2], sizes[-1]}, reverse=True))


def _make_above_floor(planner: StepPlanner, step: Any, batch: Any, samples: int, *, every: bool) -> PlannedShape:
    """Plan for a budget above the floor: that of the first batch or, where each has its own, of every."""
    require = StepMemory.require

    def known(memory: StepMemory, budget_bytes: int) -> None:
        above = int(memory.floor.bytes * _ABOVE_FLOOR)
        if planner.budget_bytes == _UNKNOWN or (every and planner.budget_bytes < above):
            planner.budget_bytes = above
        require(memory, planner.budget_bytes)

    with patch.object(StepMemory, "require", known):
        return _MAKE(planner, step, batch, samples)


def _needs_change(spec: Spec) -> bool:
    """Whether batches of one shape need different memory: other lengths, branches by value, parameters that thaw."""
    thaws = any(name == "thaw" for _, name in spec.training.between)
    return thaws or any(node.kind == "by_value" or node.options.get("packed") for node in spec.all_nodes())


class _Tight(Fit):
    """A budget a little above the floor, which the first plan finds; fixed costs decide the rest."""

    def fit(self, spec: Spec, order: Order = as_given, strategy: Any = None) -> dict[str, Any]:
        costs = (SPLITS, OFFLOADS)[spec.seed % 2]
        least = replace(costs, spare_bytes=costs.scratch(1))
        with (
            patch.object(step_planner, "calibrate", lambda *_, **__: costs),
            patch.object(step_planner, "least_costs", lambda *_, **__: least),
            patch.object(step_planner.PlanTrial, "step_ms", lambda *_: None),
            patch.object(step_planner, "part_sizes", _few_sizes),
            patch.object(StepPlanner, "_probe_samples", lambda *_: (5, 3)[spec.seed // 2 % 2]),
            patch.object(StepPlanner, "make", partialmethod(_make_above_floor, every=_needs_change(spec))),
        ):
            return super().fit(spec, order, MemoryBudgetStrategy(budget=_UNKNOWN))

    def done(self, trainer: Trainer) -> None:
        super().done(trainer)
        report = trainer.strategy.report()
        self.rounds = report is not None and report.sub_batches > report.steps


def _to_none(spec: Spec) -> Spec:
    """Zeroing gradients in place overrides a hook, so that backward fusion steps aside each time."""
    if spec.seed % 4:
        spec = replace(spec, training=replace(spec.training, to_none=True))
    return in_backward(spec)


def roomy(spec: Spec) -> Spec:
    """Larger than the others, so that something can move."""
    return replace(double(spec), batch=spec.batch * 3, time=spec.time + 3, features=16)


def _lightning(name: str, way: Any, **options: Any) -> Mechanism:
    return Mechanism(name, way, train=train_fit, **options)


LIGHTNING = [
    _lightning(
        "fused_optimizer",
        lambda: Fit(lambda spec: FusedOptimizerStrategy(bucket_bytes=1 if spec.seed % 2 else None), _fused),
        fit=_to_none,
        late=True,
        raises=UPDATED_TWICE,
    ),
    _lightning("fused_optimizer_forward", lambda: Fit(lambda spec: "fused_optimizer_forward", _fused)),
    _lightning(
        "callback_backward",
        lambda: Fit(did=_fused_by_callback, callbacks=lambda: [FuseOptimizer("backward")]),
        fit=_to_none,
        late=True,
        raises=UPDATED_TWICE,
        every=5,
    ),
    _lightning(
        "callback_forward", lambda: Fit(did=_fused_by_callback, callbacks=lambda: [FuseOptimizer("forward")]), every=5
    ),
    _lightning("memory_budget", lambda: Fit(lambda spec: "memory_budget", counted("steps")), every=4),
    _lightning("memory_budget_tight", lambda: _Tight(did=_moved), fit=roomy, exact=False, share=10, every=5),
]
