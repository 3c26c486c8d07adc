"""Training steps inside a byte budget under Lightning: what one device and DDP have in common."""

from __future__ import annotations

import copy
import inspect
import os
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.loops.optimization.automatic import ClosureResult
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning_utilities.core.rank_zero import rank_zero_info
from torch import Tensor
from torch.optim import Optimizer

from retime.foundations.compatibility import Mechanism
from retime.foundations.messages import show_bytes
from retime.foundations.parts import loss_of, samples_in
from retime.foundations.patching import replaced_attributes
from retime.mechanisms.memory_budget import (
    AnotherPath,
    BudgetedStep,
    BudgetOptions,
    BudgetReport,
    ExecutionMode,
    Gradients,
    HostTier,
    NoLossError,
    PlannedShape,
    SubBatches,
    TooMuchAllocated,
    check_host_text,
    parse_budget,
    parse_host,
    read_plans,
    write_plans,
)
from retime.strategies.support.base import LightningOnly
from retime.strategies.support.lightning_private import skips_backward
from retime.strategies.support.parts_log import LOGGED, PartLog

# Steps that are only tried out log nothing.


@contextmanager
def muted_logging(trainer: Trainer, noticed: Callable[[], None] | None = None) -> Iterator[None]:
    """While open, the module's ``log`` and the Trainer's loggers take nothing.

    Args:
        noticed: is called where the step asks a logger of the Trainer's to write.
    """
    loggers = trainer.loggers
    trainer.loggers = [DummyLogger() if noticed is None else _NoticingLogger(noticed) for _ in loggers]
    try:
        with replaced_attributes(trainer.lightning_module, log=_log_nothing, log_dict=_log_nothing):
            yield
    finally:
        trainer.loggers = loggers


class _NoticingLogger(DummyLogger):
    """Takes nothing, and tells that it was asked to."""

    def __init__(self, noticed: Callable[[], None]) -> None:
        super().__init__()
        self._noticed = noticed

    @property
    def experiment(self) -> Any:
        self._noticed()
        return super().experiment

    def log_metrics(self, *args: Any, **kwargs: Any) -> None:
        self._noticed()


def _log_nothing(*_: Any, **__: Any) -> None:
    pass


# Where sub-batches ran, callbacks and the optimizer see the loss and the outputs of the whole batch.


class WholeBatchResults:
    """Lets callbacks see the loss and the outputs of the whole batch, which are known after backward.

    So does the optimizer, which may read the loss that its closure returns: LBFGS searches by it.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._loop = trainer.fit_loop.epoch_loop.automatic_optimization
        self._whole: dict[str, Any] | None = None
        self._result: ClosureResult | None = None
        results = self

        class Result(ClosureResult):
            def __post_init__(self) -> None:
                super().__post_init__()
                results._result = self

            def asdict(self) -> dict[str, Any]:
                whole, results._whole = results._whole, None
                return super().asdict() if whole is None else whole

        self._loop.output_result_cls = _Results(Result)  # type: ignore[assignment]

    def put(self, output: Any, loss: Tensor, accumulated: int) -> None:
        """Keep what ``training_step`` would have returned; ``accumulated``: batches that its loss is divided by."""
        self._whole = {**(output if isinstance(output, Mapping) else {}), "loss": loss / accumulated}
        result, self._result = self._result, None
        if result is not None:
            result.loss = self._whole["loss"]

    def remove(self) -> None:
        self._loop.__dict__.pop("output_result_cls", None)


class _Results:
    """Makes a loop's results; a copy of the loop has Lightning's class again, as nobody puts whole batches there."""

    def __init__(self, kind: type[ClosureResult]) -> None:
        self._kind = kind

    def from_training_step_output(self, *args: Any, **kwargs: Any) -> ClosureResult:
        return self._kind.from_training_step_output(*args, **kwargs)

    def __reduce__(self) -> Any:
        return _lightnings_results, ()


def _lightnings_results() -> type[ClosureResult]:
    return ClosureResult


_SKIPPING = (
    "Under a memory budget training_step runs once a sub-batch: return None for all parts of a batch or for none "
    "(decide by batch_idx), and a loss of 0 for a part with nothing to learn from"
)
CHECKPOINT_KEY = "retime_memory_budget"


class Budgeted(LightningOnly, Strategy):
    """Runs the steps of a fit through a :class:`BudgetedStep`, which a strategy makes in :meth:`_make_step`."""

    def __init__(self, budget: int | str, host: str | None, options: BudgetOptions, **kwargs: Any) -> None:
        if options.plan is not None:
            read_plans(options.plan)  # what is wrong with it shows here; what it was made for, before the first step
        check_host_text(host)
        of_device = isinstance(budget, str) and budget.strip().endswith("%")  # which is known later
        parse_budget(budget, None if of_device else kwargs.get("device"))
        super().__init__(**kwargs)
        self._budget, self._host, self.options = budget, host, options
        self._step: BudgetedStep | None = None
        self._log: PartLog | None = None
        self._results: WholeBatchResults | None = None
        self._last_report: BudgetReport | None = None
        self._plans: dict[str, Any] | None = None

    def __getstate__(self) -> dict[str, Any]:
        """A copy, made in the middle of a fit too, has the plans and the report; its budget begins with its own fit."""
        state: dict[str, Any] = super().__getstate__()
        if self._step is not None:
            kept = {"_plans": self._step.state_dict(), "_last_report": copy.deepcopy(self._step.report())}
            state |= kept | {"_step": None, "_log": None, "_results": None}
        return state

    @property
    def mechanisms(self) -> tuple[Mechanism, ...]:
        """Mechanisms that this strategy brings along."""
        return (Mechanism.MEMORY_BUDGET,)

    def _memory(self, sharing: int = 1) -> tuple[int, HostTier]:
        """Return the budget in bytes, of each of so many processes, and where offloaded storages go."""
        budget_bytes = parse_budget(self._budget, self.root_device, sharing=sharing)
        return budget_bytes, parse_host(self._host, self.root_device)

    @abstractmethod
    def _make_step(self, module: LightningModule, options: BudgetOptions) -> BudgetedStep:
        """Make what runs the steps of this fit; the model and the optimizers are where they train."""

    def setup(self, trainer: Trainer) -> None:
        module = self.lightning_module
        assert module is not None
        fitting = trainer.state.fn == TrainerFn.FITTING
        if fitting:
            _check_module(module)
        super().setup(trainer)
        if not fitting:
            return
        if self._step is not None:  # a fit that ended without teardown, as one for a batch size does
            self._step.remove()
        options = replace(self.options, gradients=gradients_in(trainer), say=_say)
        self._step = self._make_step(module, options)
        if self._plans is not None:
            self._step.load_state_dict(self._plans)
        budget = show_bytes(self._step.report().budget_bytes)
        rank_zero_info(f"retime: memory budget {budget}: batches are planned when the first of their shape comes")
        self._log = PartLog(module)
        self._results = WholeBatchResults(trainer)

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        if self._step is None or self._log is None or not torch.is_grad_enabled():
            return super().training_step(*args, **kwargs)
        batch, *rest = args
        module, budgeted, log, plain = self.lightning_module, self._step, self._log, super().training_step
        assert module is not None
        way = ExecutionMode.PARTS

        def step(part: Any) -> dict[str, Any]:
            dry = budgeted.planning
            with ExitStack() as around:
                if dry:
                    around.enter_context(muted_logging(module.trainer))
                samples, whole = samples_in(part, self.options.split), way is ExecutionMode.WHOLE and not dry
                logged = around.enter_context(log.collecting(samples, dry=dry, whole=whole))
                output = plain(part, *rest, **kwargs)
            try:
                loss = loss_of(output)
            except ValueError as error:  # None, or what Lightning has an error of its own for
                raise NoLossError(f"a part of a batch gave no loss: {error}. {_SKIPPING}") from error
            return {"loss": loss, "output": output, LOGGED: logged}

        if not skips_backward(module.trainer):
            budgeted.expect_gradients(gradients_in(module.trainer))  # callbacks may change what is accumulated
        try:
            way = budgeted.choose(step, batch)
        except NoLossError:
            return plain(*args, **kwargs)  # a batch that is skipped; the next one is planned for
        log.clear()
        if way is ExecutionMode.PLAIN:
            budgeted.count_plain()
            return plain(*args, **kwargs)
        parts = budgeted.parts
        assert parts is not None
        log.warn(parts)  # before the first step, of all that the probe has seen
        stopped = False
        try:
            output = parts.forward(0)["output"]
        except NoLossError:
            budgeted.drop()
            _see_no_loss(parts)
            log.publish(parts)
            return None
        except (TooMuchAllocated, AnotherPath):
            stopped = True
        if stopped:  # not in the `except`, whose traceback holds the stopped pass's activations
            return self.training_step(*args, **kwargs)  # this time with a plan, or after a look at the way
        if not skips_backward(module.trainer):
            return output
        del output  # no backward pass frees its graph
        return self._without_backward(parts)

    def _without_backward(self, parts: SubBatches) -> Any:
        """The other parts of a batch that only passes forward, as weight averaging does for BatchNorm's statistics."""
        assert self._step is not None
        assert self._log is not None
        for index in range(1, len(parts)):
            parts.forward(index)
        self._step.drop()
        self._log.publish(parts)
        self._log.warn(parts)
        return parts.result()["output"]

    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        step, module, plugin = self._step, self.lightning_module, self.precision_plugin
        assert module is not None
        parts = step.parts if step is not None else None
        if step is None or parts is None:
            return super().backward(closure_loss, optimizer, *args, **kwargs)
        assert self._log is not None
        assert self._results is not None
        accumulated = module.trainer.accumulate_grad_batches
        begun = False
        learns = bool(parts.weights[0])

        def backward(loss: Tensor) -> None:
            nonlocal begun
            if begun or not learns:  # Lightning has divided the first part's loss
                loss = loss / accumulated
            if begun:  # hooks and the scaler have been told of this batch already
                scaler = getattr(plugin, "scaler", None)
                loss = loss if scaler is None else scaler.scale(loss)
            else:
                self.pre_backward(loss)
                loss = plugin.pre_backward(loss, module)
                begun = True
            plugin.backward(loss, module, optimizer, *args, **kwargs)

        if not learns:
            closure_loss.detach_()  # no backward pass frees the first part's graph, and Lightning holds its loss
        whole = step.finish(closure_loss, backward)
        closure_loss = plugin.post_backward(closure_loss, module)
        self.post_backward(closure_loss)
        self._log.publish(parts)
        self._log.warn(parts)
        self._results.put(whole["output"], whole["loss"].reshape(closure_loss.shape), accumulated)
        return closure_loss.detach()

    def teardown(self) -> None:
        step, self._step = self._step, None
        if step is not None:
            self._last_report, self._plans = step.report(), step.state_dict()
            step.remove()
            if self._last_report.steps:
                rank_zero_info(f"retime: {self._last_report.headline}")
        if self._results is not None:
            self._results.remove()
            self._results = None
        self._log = None
        super().teardown()

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any | None = None) -> None:
        """Plans are kept too, so that a resumed run with the same budget need not search for them again."""
        plans = self._plans if self._step is None else self._step.state_dict()
        if plans is not None:
            checkpoint[CHECKPOINT_KEY] = plans
        super().save_checkpoint(checkpoint, filepath, storage_options)

    def load_checkpoint(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        checkpoint = super().load_checkpoint(*args, **kwargs)
        plans = checkpoint.get(CHECKPOINT_KEY)
        if plans is not None:
            self._plans = plans
        return checkpoint

    def save_plan(self, path: str | os.PathLike[str]) -> None:
        """Write the plans of this fit, or of the last one, to a file for ``plan=`` in other runs; rank 0 does.

        Raises:
            ValueError: nothing was planned yet.
            OSError: it cannot be written.
        """
        plans = self._plans if self._step is None else self._step.state_dict()
        if plans is None:
            raise ValueError(f"save_plan({str(path)!r}): nothing is planned before the first batch of a fit")
        if self.is_global_zero:
            write_plans(path, plans)

    def planned(self, batch: Any) -> PlannedShape | None:
        """Decision for batches like this one; None before that, and after the fit."""
        return None if self._step is None else self._step.planned(batch)

    def report(self) -> BudgetReport | None:
        """Report of what was planned and done so far; None before the first fit."""
        return self._last_report if self._step is None else self._step.report()


def _say(text: str) -> None:
    rank_zero_info(f"retime: {text}")


def _check_module(module: LightningModule) -> None:
    if not module.automatic_optimization:
        raise ValueError(
            "a memory budget needs automatic optimization: with manual optimization it is not known where a step "
            "begins and ends. Set automatic_optimization=True, or use retime.mechanisms.memory_budget.BudgetedStep in "
            "training_step"
        )
    if "dataloader_iter" in inspect.signature(module.training_step).parameters:
        raise ValueError(
            "training_step(dataloader_iter) takes batches by itself, so they cannot be planned for: use "
            "training_step(batch, batch_idx)"
        )


def _see_no_loss(parts: SubBatches) -> None:
    """The first part gave no loss, so the batch is skipped; its other parts run too, as they log, and must give none.

    Raises:
        NoLossError: one does.
    """
    for index in range(1, len(parts)):
        try:
            parts.compute(index)
        except NoLossError:
            continue
        raise NoLossError(f"part 1 of {len(parts)} of a batch gave no loss, and part {index + 1} gave one. {_SKIPPING}")


def gradients_in(trainer: Trainer) -> Gradients:
    """State of gradients in a fit's backward pass: whether any may be there, of batches before or zeroed in place."""
    schedulers = (one for one in trainer.callbacks if isinstance(one, GradientAccumulationScheduler))  # type: ignore[attr-defined]
    kept = (
        trainer.accumulate_grad_batches > 1
        or any(one.going_to_accumulate_grad_batches() for one in schedulers)
        or is_overridden("optimizer_zero_grad", trainer.lightning_module)
    )
    return "kept" if kept else "freed after forward"
