"""The mechanisms in a bare loop, each as a `Way` of the loop in `training`, with what it promises."""

from collections.abc import Callable
from contextlib import ExitStack, nullcontext, suppress
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import retime
from contract.in_parts import uneven_parts
from contract.random_models.model import RandomModel
from contract.random_models.spec import Node, Spec, Training
from contract.random_models.training import CLIP_VALUE, Way, train
from retime.foundations.weight_gradients import WeightGradientDeferral, cut, split_backward
from retime.mechanisms.memory_budget import BudgetedStep, HostMemory, OffloadSavedTensors, sub_batches
from retime.mechanisms.memory_budget.planner import StepPlanner
from retime.mechanisms.memory_budget.report import PlannedShape
from retime.mechanisms.memory_budget.search import PlanChoice
from retime.mechanisms.two_streams import TwoStreamBackward
from retime.schedules.budget import OffloadPlan

HOLDS = 2**30
EVERYTHING = OffloadPlan(1, frozenset(range(999)), 1, 999)


class Forward(Way):
    """Forward fusion."""

    def begin(self, model: RandomModel, optimizer: Optimizer, spec: Spec) -> None:
        bucket = 1 if spec.seed % 2 else None
        self._fusion = retime.fuse_optimizer(model, optimizer, "forward", bucket_bytes=bucket)

    def end(self) -> None:
        with suppress(AttributeError):  # it was refused
            self.on = self._fusion.report().fused_updates > 0
            self._fusion.remove()


class Backward(Forward):
    """Backward fusion; passes of a step are counted, wrapped, or told in advance."""

    def begin(self, model: RandomModel, optimizer: Optimizer, spec: Spec) -> None:
        self._how = ("counted", "wrapped", "told")[spec.seed % 3]
        accumulated = {"counted": None, "wrapped": None, "told": spec.training.accumulate}[self._how]
        clip = CLIP_VALUE if spec.training.clip == "value" else None
        bucket = 1 if spec.seed % 2 else None
        self._fusion = retime.fuse_optimizer(
            model, optimizer, "backward", clip_value=clip, backward_passes=accumulated, bucket_bytes=bucket
        )

    def pass_(self, compute: Callable[[Any], Tensor], batch: Any, share: int, last: bool) -> Tensor:
        with self._fusion.accumulate() if self._how == "wrapped" and not last else nullcontext():
            return super().pass_(compute, batch, share, last)

    def clip(self, model: nn.Module, training: Training) -> None:
        if training.clip != "value":
            super().clip(model, training)
            return
        fused = {p for group in self._fusion.optimizer.param_groups for p in group["params"]}  # clips these
        others = [p for p in model.parameters() if p.grad is not None and p not in fused]
        if others:
            nn.utils.clip_grad_value_(others, CLIP_VALUE)


class Deferral(Way):
    """The weight gradients of some blocks wait, of others in each pass; in most models those of small layers too."""

    def begin(self, model: RandomModel, optimizer: Optimizer, spec: Spec) -> None:
        self._deferral = WeightGradientDeferral(model)
        self._number, self._small_bytes = spec.seed, 200 if spec.seed % 3 == 2 else 0

    def pass_(self, compute: Callable[[Any], Tensor], batch: Any, share: int, last: bool) -> Tensor:
        self._deferral.k = (99, 1, 3, 0, 2)[self._number % 5]
        self._number += 1
        with ExitStack() as patches:
            for module in (cut, split_backward):
                patches.enter_context(patch.object(module, "SMALL_BYTES", self._small_bytes))
            loss = compute(batch)
            self._deferral.watch(loss)
            (loss / share).backward()
        return loss.detach()

    def end(self) -> None:
        with suppress(AttributeError):
            self.on = self._deferral.split.passes.deferred_gradients > 0
            self._deferral.remove()


class TwoStreams(Way):
    """Weight gradients run on a second thread, with as many threads as plain ones have; some may wait."""

    def begin(self, model: RandomModel, optimizer: Optimizer, spec: Spec) -> None:
        threads = torch.get_num_threads()
        bound = (None, 1, 10_000)[spec.seed % 3]
        self._two_streams = TwoStreamBackward(model, threads=(threads, threads), max_memory=bound)

    def end(self) -> None:
        with suppress(AttributeError):
            report = self._two_streams.report()
            self.on = report.sub_stream + report.main_stream > 0
            self._two_streams.remove()


class Updates(Backward):
    """Backward fusion beside two streams: updates follow their weight gradients; passes are counted or wrapped."""

    def begin(self, model: RandomModel, optimizer: Optimizer, spec: Spec) -> None:
        self._how = ("counted", "wrapped")[spec.seed % 2]
        threads = torch.get_num_threads()
        self._two_streams = TwoStreamBackward(
            model, optimizer=optimizer, threads=(threads, threads), max_memory=(None, 1, 10_000)[spec.seed % 3]
        )
        self._fusion = self._two_streams.fusion
        self._fusion.clip_value = CLIP_VALUE if spec.training.clip == "value" else None

    def end(self) -> None:
        with suppress(AttributeError):  # it was refused
            self.on = self._two_streams.report().updates > 0
            self._two_streams.remove()


class Offload(Way):
    """All saved tensors leave and come back, by the context manager alone."""

    def begin(self, model: RandomModel, optimizer: Optimizer, spec: Spec) -> None:
        self._host = HostMemory("cpu")
        keep = [*model.parameters(), *model.buffers()]
        plan = replace(EVERYTHING, prefetch=spec.seed % 3)
        flight = (0, 10**9)[spec.seed % 2]
        self._offload = OffloadSavedTensors(plan, self._host, keep, flight, on_mismatch=lambda mismatch: None)

    def pass_(self, compute: Callable[[Any], Tensor], batch: Any, share: int, last: bool) -> Tensor:
        with self._offload:
            loss = compute(batch) / share
        loss.backward()
        return loss.detach() * share

    def end(self) -> None:
        self.on = self._offload.report().storages > 0
        self._host.close()


class Budgeted(Way):
    """A `BudgetedStep` that offloads everything."""

    splits = False

    def begin(self, model: RandomModel, optimizer: Optimizer, spec: Spec) -> None:
        kept = spec.training.accumulate > 1 or not spec.training.to_none or spec.training.zero == "before"
        self._step = BudgetedStep(
            model,
            [optimizer],
            HOLDS,
            HostMemory("cpu"),
            gradients="kept" if kept else "freed",
            make_plan=self._plan,
            sub_batches=self.splits,
        )

    def _plan(self, planner: StepPlanner, step: Any, batch: Any, samples: int) -> PlannedShape:
        return PlannedShape(samples, PlanChoice(replace(EVERYTHING, sub_batch=samples), 0, 0, 1, 1, 0, 0))

    def pass_(self, compute: Callable[[Any], Tensor], batch: Any, share: int, last: bool) -> Tensor:
        return self._step.run(compute, batch, lambda loss: (loss / share).backward()).detach()

    def end(self) -> None:
        with suppress(AttributeError):
            report = self._step.report()
            self.on = self._did(report)
            self.rounds = report.sub_batches > report.steps
            self._step.remove()

    def _did(self, report: Any) -> bool:
        return report.offload is not None and report.offload.storages > 0


class Parts(Budgeted):
    """A `BudgetedStep` that splits each batch its certificate lets it split, in two uneven parts."""

    splits = True

    def _plan(self, planner: StepPlanner, step: Any, batch: Any, samples: int) -> PlannedShape:
        certificate = planner.certify(step, batch) if samples > 1 else None
        split = certificate is not None and certificate.separable
        plan = OffloadPlan(samples - 1 if split else samples)
        choice = PlanChoice(plan, 0, 0, 1, 1, 0, 0, tensor_bytes=HOLDS)
        return PlannedShape(samples, choice, certificate if split else None)

    def pass_(self, compute: Callable[[Any], Tensor], batch: Any, share: int, last: bool) -> Tensor:
        with patch.object(sub_batches, "balanced_parts", uneven_parts):
            return super().pass_(compute, batch, share, last)

    def _did(self, report: Any) -> bool:
        return report.sub_batches > report.steps


class Scan(Way):
    """Recurrent modules go backward as a scan."""

    def begin(self, model: RandomModel, optimizer: Optimizer, spec: Spec) -> None:
        solver = ("auto", "chunk", "blelloch", "sequential")[spec.seed % 4]
        self.on = bool(retime.convert(model, solver=solver).swapped)


@dataclass(frozen=True)
class Mechanism:
    """A way of training with what it promises.

    Attributes:
        name: for the command line and the tests.
        way: makes the `Way` of one run.
        fit: what to change of any spec, since the documentation excludes it, or as it would be refused each time.
        exact: bit by bit; else as near as the model's own rounding.
        late: an error may be raised in the middle of the training too; documented.
        raises: parts of messages of torch's errors that the documentation names.
        train: runs a `Spec` with a `Way` and the samples of each batch in a given `Order`.
        every: a test run has one of so many seeds, as each takes long or runs another mechanism's code.
        here: runs in this process; else on ranks, which make failures small by themselves.
        share: in so many of 100 seeds the mechanism is on and its result compared, at least.
    """

    name: str
    way: Callable[[], Way]
    fit: Callable[[Spec], Spec] = lambda spec: spec
    exact: bool = True
    late: bool = False
    raises: tuple[str, ...] = ()
    share: int = 50
    every: int = 1
    here: bool = True
    train: Callable[..., dict[str, Any]] = train


def in_backward(spec: Spec) -> Spec:
    """Who fuses into the backward pass does not look at gradients, and seldom clips by their norm."""
    training = replace(spec.training, reads_gradients=False)
    return replace(
        spec, training=replace(training, clip="" if training.clip == "norm" and spec.seed % 4 else training.clip)
    )


_RANDOM = ("dropout", "channel_dropout", "noise")


def _calm(node: Node) -> Node:
    if node.kind in _RANDOM:
        return Node("linear", node.of)
    quiet = {name: 0.0 if name == "drop" else value for name, value in node.options.items()}
    return replace(node, options=quiet, inner=tuple(map(_calm, node.inner)))


def double(spec: Spec) -> Spec:
    """In float64 and without random numbers, so that rounding shows little."""
    training = replace(spec.training, autocast=False)
    if training.optimizer == "Rprop":  # steps by the signs of gradients, those of rounding too
        training = replace(training, optimizer="SGD", options={"lr": 0.05})
    return replace(spec, nodes=tuple(map(_calm, spec.nodes)), training=training, dtype="float64")


def recurrent(spec: Spec) -> Spec:
    """As `double`, and with something to convert."""
    spec = double(spec)
    if {"rnn", "gru", "lstm"}.isdisjoint(spec.kinds()):
        kind = ("rnn", "gru", "lstm")[spec.seed % 3]
        spec = replace(spec, nodes=(*spec.nodes, Node(kind)))
    return spec


UPDATED_TWICE = ("modified by an inplace operation",)

BARE = [
    Mechanism("bare_backward", Backward, in_backward, late=True, raises=UPDATED_TWICE),
    Mechanism("bare_forward", Forward),
    Mechanism("bare_deferral", Deferral),
    Mechanism("bare_two_streams", TwoStreams),
    Mechanism("bare_two_streams_updates", Updates, in_backward, late=True, raises=UPDATED_TWICE),
    Mechanism("bare_offload", Offload),
    Mechanism("bare_budget", Budgeted),
    Mechanism("bare_parts", Parts, double, exact=False, share=10),
    Mechanism("bare_scan", Scan, recurrent, exact=False),
]
