"""The strategies and callbacks for one device, each with what it promises."""

from dataclasses import replace
from typing import Any
from unittest.mock import patch

from lightning.pytorch import Trainer

from contract.random_models.fits import Fit, train_fit
from contract.random_models.mechanisms import UPDATED_TWICE, Mechanism, double, in_backward
from contract.random_models.spec import Spec
from contract.random_models.training import Order, as_given
from retime.callbacks import FuseOptimizer
from retime.mechanisms.memory.planning import step_planner
from retime.schedules.budget import BudgetError
from retime.strategies import FusedOptimizerStrategy, MemoryBudgetStrategy
from support.memory_budget import OFFLOADS, SPLITS


def _fused(trainer: Trainer) -> bool:
    return trainer.strategy.report().fused_updates > 0


def _fused_by_callback(trainer: Trainer) -> bool:
    found = next(one for one in trainer.callbacks if isinstance(one, FuseOptimizer))
    return found.report().fused_updates > 0


def _moved(trainer: Trainer) -> bool:
    report = trainer.strategy.report()
    if report is None:
        return False
    return report.sub_batches > report.steps or bool(report.offload is not None and report.offload.storages)


def _planned(trainer: Trainer) -> bool:
    report = trainer.strategy.report()
    return report is not None and report.steps > 0


class _Tight(Fit):
    """A budget a little above the floor that a refusal names; fixed costs decide between the ways to keep it."""

    def fit(self, spec: Spec, order: Order = as_given, strategy: Any = None) -> dict[str, Any]:
        costs = (SPLITS, OFFLOADS)[spec.seed % 2]
        with (
            patch.object(step_planner, "calibrate", lambda *_, **__: costs),
            patch.object(step_planner.PlanTrial, "step_ms", lambda *_: None),
        ):
            return self._in_little(spec, order)

    def _in_little(self, spec: Spec, order: Order) -> dict[str, Any]:
        try:
            return super().fit(spec, order, MemoryBudgetStrategy(budget=1))
        except BudgetError as refused:
            floor = refused.floor_bytes
        self.steps = 0
        return super().fit(spec, order, MemoryBudgetStrategy(budget=int(floor * 1.05)))

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
    ),
    _lightning("callback_forward", lambda: Fit(did=_fused_by_callback, callbacks=lambda: [FuseOptimizer("forward")])),
    _lightning("memory_budget", lambda: Fit(lambda spec: "memory_budget", _planned), every=4),
    _lightning("memory_budget_tight", lambda: _Tight(did=_moved), fit=roomy, exact=False, share=10, every=5),
]
