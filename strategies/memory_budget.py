"""Training inside a byte budget as a Lightning strategy (moDNN, Chen et al. 2018)."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning_utilities.core.rank_zero import rank_zero_info
from torch import Tensor
from torch.optim import Optimizer

from retime.mechanisms.memory.batchnorm import check_choice
from retime.mechanisms.memory.budget import parse_budget
from retime.mechanisms.memory.budget_report import BudgetReport, PlannedShape
from retime.mechanisms.memory.budgeted_step import BudgetedStep, NoLossError, check_on_shape_change
from retime.mechanisms.memory.host import parse_host
from retime.mechanisms.memory.separability_probe import loss_of
from retime.mechanisms.memory.split import Split, samples_in, split_batch
from retime.strategies.flavour import LightningOnly
from retime.strategies.whole_batch import LOGGED, PartLog, WholeBatchResults

CHECKPOINT_KEY = "retime_memory_budget"


class MemoryBudgetStrategy(LightningOnly, SingleDeviceStrategy):
    """One device, and no more of its memory than a number of bytes.

    The first batch of each shape is profiled by a dry run that uses no memory. If it fits, it runs as ever. Else the
    fastest plan is taken that fits: activations go to the host and come back (bit-identical), or the batch runs in
    sub-batches whose gradients add up to the batch's (up to rounding; only where a probe shows that they do). A budget
    below the floor is refused before the first step.

    Callbacks, loggers, clipping, accumulation, schedulers and precision plugins see one batch. Two things differ under
    sub-batches: dropout draws other masks, and ``on_before_backward`` is given the first sub-batch's share of the loss.

    :param budget: bytes, ``"8GiB"``, or ``"90%"`` of the device's memory, for parameters, gradients, optimizer states,
        the batch, activations and what operations need. On a CPU: what training may add to the process.
    :param host: where activations go: ``"memory"`` (for CUDA), ``"disk:FOLDER"`` (for a CPU); None: memory for CUDA,
        the folder for temporary files for a CPU.
    :param batchnorm: layers with batch statistics keep a batch whole (``"offload"``), take ``"ghost"`` statistics of
        each sub-batch (other numbers: a choice of yours), or run ``"exact"``, with the operators around them in chunks.
    :param on_shape_change: ``"replan"`` for batches of another shape, or ``"error"``.
    :param split_batch: ``split_batch(batch, sub_batch) -> parts``, for batches that cannot be cut by their first
        dimension.
    :param loss_weight: ``loss_weight(part)`` counts what a part's loss is a mean over, where a probe cannot see it.
    :param device: the one device; None: the one the Trainer chose.
    """

    strategy_name = "memory_budget"

    def __init__(
        self,
        budget: int | str = "90%",
        host: str | None = None,
        batchnorm: str = "offload",
        on_shape_change: str = "replan",
        split_batch: Split | None = None,
        loss_weight: Callable[[Any], Any] | None = None,
        device: str | int | torch.device | None = None,
        **kwargs: Any,
    ) -> None:
        check_choice(batchnorm)
        check_on_shape_change(on_shape_change)
        if not (isinstance(budget, str) and budget.strip().endswith("%")):  # that needs the device
            parse_budget(budget, torch.device("cpu" if device is None else device))
        super().__init__(device="cpu" if device is None else device, **kwargs)
        self.parallel_devices: list[torch.device] | None = None if device is None else [self._root_device]
        self._budget, self._host = budget, host
        self._options: dict[str, Any] = {"batchnorm": batchnorm, "on_shape_change": on_shape_change}
        self._split, self._loss_weight = split_batch, loss_weight
        self._step: BudgetedStep | None = None
        self._log: PartLog | None = None
        self._results: WholeBatchResults | None = None
        self._last_report: BudgetReport | None = None
        self._plans: dict[str, Any] | None = None

    @property
    def root_device(self) -> torch.device:
        devices = self.parallel_devices
        if not devices:
            return self._root_device
        if len(devices) > 1:
            raise ValueError(
                f"strategy={self.strategy_name!r} runs on one device, got devices={len(devices)}: use devices=1"
            )
        return devices[0]

    def setup_environment(self) -> None:
        _ = self.root_device  # several devices are refused before anything is set up
        super().setup_environment()

    def setup(self, trainer: Trainer) -> None:
        module = self.lightning_module
        assert module is not None
        fitting = trainer.state.fn == TrainerFn.FITTING
        if fitting:
            _check_module(module)
        budget_bytes = parse_budget(self._budget, self.root_device)
        super().setup(trainer)
        if not fitting:
            return
        self._step = BudgetedStep(
            module,
            self.optimizers,
            budget_bytes,
            parse_host(self._host, self.root_device),
            split=self._split or split_batch,
            loss_weight=self._loss_weight,
            gradients="freed after forward",
            say=lambda text: rank_zero_info(f"retime: {text}"),
            **self._options,
        )
        if self._plans is not None:
            self._step.load_state_dict(self._plans)
        self._log = PartLog(module)
        self._results = WholeBatchResults(trainer)

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        if self._step is None or self._log is None or not torch.is_grad_enabled():
            return super().training_step(*args, **kwargs)
        batch, *rest = args
        budgeted, log, plain = self._step, self._log, super().training_step
        split = self._split or split_batch
        whole = False

        def step(part: Any) -> dict[str, Any]:
            dry = budgeted.planning
            with (
                self._unseen() if dry else nullcontext(),
                log.collecting(samples_in(part, split), dry=dry, whole=whole and not dry) as logged,
            ):
                output = plain(part, *rest, **kwargs)
            try:
                loss = loss_of(output)
            except ValueError as error:  # None, or what Lightning has an error of its own for
                raise NoLossError(f"a part of a batch gave no loss: {error}") from error
            return {"loss": loss, "output": output, LOGGED: logged}

        try:
            shape = budgeted.plan(step, batch)
        except NoLossError:
            return plain(*args, **kwargs)  # a batch that is skipped; the next one is planned for
        log.clear()
        whole = shape.choice.plan.sub_batch >= samples_in(batch, split)
        if not shape.choice.plan.offload and shape.choice.plan.sub_batch >= shape.samples:
            self._step.count_plain()
            return plain(*args, **kwargs)
        try:
            return self._step.begin(step, batch)["output"]
        except NoLossError:
            parts = self._step.drop()
            if parts is None or len(parts) > 1:
                raise
            log.publish(parts)
            return None

    @contextmanager
    def _unseen(self) -> Iterator[None]:
        """While planning runs the user's step, its loggers take nothing."""
        module = self.lightning_module
        assert module is not None
        trainer = module.trainer
        loggers = trainer.loggers
        trainer.loggers = [DummyLogger() for _ in loggers]
        try:
            yield
        finally:
            trainer.loggers = loggers

    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        step, module, plugin = self._step, self.lightning_module, self.precision_plugin
        assert module is not None
        parts = step.parts if step is not None else None
        if step is None or parts is None:
            self.pre_backward(closure_loss)
            closure_loss = plugin.pre_backward(closure_loss, module)
            plugin.backward(closure_loss, module, optimizer, *args, **kwargs)
            closure_loss = plugin.post_backward(closure_loss, module)
            self.post_backward(closure_loss)
            return closure_loss
        assert self._log is not None
        assert self._results is not None
        accumulated = module.trainer.accumulate_grad_batches
        begun = False

        def backward(loss: Tensor) -> None:
            nonlocal begun
            if begun:  # hooks and the scaler have been told of this batch already
                loss = loss / accumulated
                scaler = getattr(plugin, "scaler", None)
                loss = loss if scaler is None else scaler.scale(loss)
            else:
                self.pre_backward(loss)
                loss = plugin.pre_backward(loss, module)
                begun = True
            plugin.backward(loss, module, optimizer, *args, **kwargs)

        whole = step.finish(closure_loss, backward)
        closure_loss = plugin.post_backward(closure_loss, module)
        self.post_backward(closure_loss)
        self._log.publish(parts)
        self._log.warn(parts)
        self._results.put(whole["output"], accumulated)
        return closure_loss.detach()

    def teardown(self) -> None:
        step, self._step = self._step, None
        if step is not None:
            self._last_report, self._plans = step.report(), step.state_dict()
            step.remove()
            rank_zero_info(f"retime: {self._last_report}")
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
        found = checkpoint.get(CHECKPOINT_KEY)
        if found is not None:
            self._plans = found
            if self._step is not None:
                self._step.load_state_dict(found)
        return checkpoint

    def planned(self, batch: Any) -> PlannedShape | None:
        """What was decided for batches like this one; None before that, and after the fit."""
        return None if self._step is None else self._step.planned(batch)

    def report(self) -> BudgetReport | None:
        """What was planned and done so far; None before the first fit."""
        return self._last_report if self._step is None else self._step.report()


def _check_module(module: LightningModule) -> None:
    if not module.automatic_optimization:
        raise ValueError(
            "a memory budget needs automatic optimization: with manual optimization nobody knows where a step begins "
            "and ends. Set automatic_optimization=True, or use BudgetedStep in your training_step"
        )
    if "dataloader_iter" in inspect.signature(module.training_step).parameters:
        raise ValueError(
            "training_step(dataloader_iter) takes batches by itself, so they cannot be planned for: use "
            "training_step(batch, batch_idx)"
        )
