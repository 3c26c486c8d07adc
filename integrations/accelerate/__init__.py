"""The mechanisms for Accelerate: objects applied after ``accelerator.prepare()``.

Accelerate has no entry point for plug-ins of others and its Trainer builds the Accelerator itself, so the objects work
on what ``prepare`` returned. They need nothing from a loop, and can be made in a ``TrainerCallback`` too.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

try:
    from accelerate import Accelerator
    from accelerate.optimizer import AcceleratedOptimizer, patch_optimizer_step
    from accelerate.utils import DistributedType
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        f"retime.integrations.accelerate needs {error.name}, which is not installed: "
        "pip install 'lightning-retime[accelerate]'",
        name=error.name,
    ) from error
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from retime.integrations.accelerate.kept_state import KeptState
from retime.mechanisms.arguments import checked
from retime.mechanisms.ddp.agreement import RankAgreement
from retime.mechanisms.fusion.backward import BackwardFusion
from retime.mechanisms.fusion.forward import ForwardFusion
from retime.mechanisms.fusion.fuse import fuse_optimizer
from retime.mechanisms.fusion.report import FusionReport, check_mode
from retime.mechanisms.memory.budget import parse_budget
from retime.mechanisms.memory.budget_report import BudgetReport
from retime.mechanisms.memory.budgeted_ddp import SETTING_UP, BudgetedDataParallelStep
from retime.mechanisms.memory.budgeted_step import BudgetedStep
from retime.mechanisms.memory.host import check_host_text, parse_host
from retime.mechanisms.memory.shape_changes import warn_of_dropped
from retime.mechanisms.no_effect import NoEffectWarning
from retime.mechanisms.out_of_order import data_parallel
from retime.mechanisms.out_of_order.kept_k import read_kept_k
from retime.mechanisms.out_of_order.report import OutOfOrderReport

_ONE_PROCESS_OR_DDP = {
    DistributedType.NO,
    DistributedType.MULTI_GPU,
    DistributedType.MULTI_CPU,
}


class FusedOptimizer:
    """Fuse a prepared optimizer into the backward or the next forward pass (Jiang et al. 2021).

    The loop stays as it is, ``with accelerator.accumulate(model):`` included: in backward mode only the backward pass
    that synchronises gradients updates. Weights and optimizer state are bit-identical to the plain loop's.

    :param mode: ``"backward"`` or ``"forward"``; only the latter goes with gradient-norm clipping and with fp16.
    :param clip_value: backward only: clamp gradient elements to [-clip_value, clip_value] before the update.
    :raises ValueError: fp16's GradScaler in backward mode, FSDP, DeepSpeed and other engines that own the optimizer,
        and all that :func:`retime.fuse_optimizer` refuses.
    """

    @checked
    def __init__(
        self,
        accelerator: Accelerator,
        model: nn.Module,
        optimizer: Optimizer,
        mode: str = "backward",
        *,
        bucket_bytes: int | str | None = None,
        clip_value: float | None = None,
    ) -> None:
        self.mode = check_mode(mode)
        if accelerator.distributed_type not in _ONE_PROCESS_OR_DDP:
            raise ValueError(
                f"{accelerator.distributed_type} owns the optimizer's step: fuse the optimizer on one device or under "
                "DistributedDataParallel"
            )
        if self.mode == "backward" and accelerator.scaler is not None:
            raise ValueError(
                "mixed_precision='fp16' scales gradients, and its GradScaler has to see all of them before the first "
                "update: use mode='forward', or mixed_precision='bf16'"
            )
        self._accelerator = accelerator
        self._optimizer = _prepared(optimizer, type(self).__name__)
        self._fusion = fuse_optimizer(
            model, self._optimizer.optimizer, self.mode, bucket_bytes=bucket_bytes, clip_value=clip_value
        )
        if isinstance(self._fusion, BackwardFusion):
            self._fusion.wanted = lambda: bool(accelerator.sync_gradients)
            self._refuse_norm_clipping()
        _renew_captured_steps(self._optimizer)

    def _refuse_norm_clipping(self) -> None:
        def clip_grad_norm_(*args: Any, **kwargs: Any) -> Any:
            raise RuntimeError(
                "backward fusion cannot clip by global norm: updates run before all gradients exist. Use "
                "mode='forward', or clip_value=... with mode='backward'"
            )

        self._accelerator.clip_grad_norm_ = clip_grad_norm_

    def flush(self) -> None:
        """Forward mode: run all pending updates now, for readers that hold an alias of a parameter's memory."""
        if isinstance(self._fusion, ForwardFusion):
            self._fusion.flush()

    def abandon_step(self) -> None:
        """After an exception inside ``backward()``: forget the half-done step, and go on with the next batch."""
        if isinstance(self._fusion, BackwardFusion):
            self._fusion.abandon_step()

    def report(self) -> FusionReport:
        """What was fused so far."""
        return self._fusion.report()

    def remove(self) -> None:
        """Bring all parameters up to date and take everything off again."""
        self._fusion.remove()
        self._accelerator.__dict__.pop("clip_grad_norm_", None)
        _renew_captured_steps(self._optimizer)


class OutOfOrderDataParallel:
    """Hide gradient communication behind weight gradients and the next forward pass (Oh et al. 2022, section 5.1).

    The loop stays as it is, accumulation, clipping and fp16 included; see
    :class:`retime.mechanisms.out_of_order.OutOfOrderDataParallel` for what happens and for the arguments. Prepare the
    model with ``Accelerator(kwargs_handlers=[DistributedDataParallelKwargs(gradient_as_bucket_view=True)])``. The k
    that ``"auto"`` found is kept by ``accelerator.save_state()``, in a file of its own: plain code takes the folder as
    it is, and a folder without it is as good.

    With one process there is none to hide: then this does nothing, with one ``NoEffectWarning``.

    :raises ValueError: another engine than DistributedDataParallel, a communication hook of its own.
    """

    @checked
    def __init__(
        self,
        accelerator: Accelerator,
        model: nn.Module,
        optimizer: Optimizer,
        k: data_parallel.K = "auto",
        *,
        max_memory: int | str | None = None,
        cross_iteration: bool = True,
        blocks: Iterable[str] | None = None,
    ) -> None:
        self._optimizer = _prepared(optimizer, type(self).__name__)
        self._kept = KeptState(accelerator, type(self).__name__, self.state_dict, self.load_state_dict)
        self._ooo: data_parallel.OutOfOrderDataParallel | None = None
        if accelerator.num_processes < 2:
            text = f"OutOfOrderDataParallel has no effect: {data_parallel.ALONE}"
            warnings.warn(text, NoEffectWarning, stacklevel=3)
            return
        if not isinstance(model, DistributedDataParallel):
            raise ValueError(
                f"OutOfOrderDataParallel needs the DistributedDataParallel model that accelerator.prepare() makes with "
                f"two processes or more, got {type(model).__name__} ({accelerator.distributed_type}, "
                f"{accelerator.num_processes} processes)"
            )
        self._ooo = data_parallel.OutOfOrderDataParallel(
            model,
            [self._optimizer.optimizer] if cross_iteration else [],
            k=k,
            max_memory=max_memory,
            cross_iteration=cross_iteration,
            blocks=blocks,
        )
        _renew_captured_steps(self._optimizer)

    @property
    def k(self) -> int:
        """The number of blocks whose weight gradients run last at the moment."""
        return 0 if self._ooo is None else self._ooo.k

    @checked
    def set_k(self, k: data_parallel.K) -> None:
        """Use this k from the next step on; all ranks must be given the same."""
        if self._ooo is not None:
            self._ooo.set_k(k)

    def state_dict(self) -> dict[str, Any]:
        """What ``accelerator.save_state()`` keeps: the k that was found, nothing while the search is under way."""
        kept = None if self._ooo is None else self._ooo.kept_k()
        return {} if kept is None else kept.state()

    def load_state_dict(self, state: Any) -> None:
        """Take up the k of an earlier run with as many processes, so that ``"auto"`` need not search again."""
        kept = read_kept_k(state)
        if kept is not None and self._ooo is not None:
            self._ooo.use_kept_k(kept)

    def flush(self) -> None:
        """Wait for all gradients and run all pending updates now, for readers that bypass Python."""
        if self._ooo is not None:
            self._ooo.flush()

    def report(self) -> OutOfOrderReport:
        """What was re-ordered so far."""
        return OutOfOrderReport() if self._ooo is None else self._ooo.report()

    def remove(self) -> None:
        """Bring all parameters up to date and take everything off again."""
        self._kept.remove()
        if self._ooo is not None:
            self._ooo.remove()
            _renew_captured_steps(self._optimizer)


class MemoryBudget:
    """Keep training inside a number of bytes (Chen et al. 2018, moDNN).

    With a loop of your own, activations go to the host around each forward pass, bit-identical::

        budget = MemoryBudget(accelerator, model, optimizer, "8GiB")
        with accelerator.accumulate(model):
            with budget.forward(step, batch):          # step(batch) computes the loss; used for planning only
                loss = step(batch)
            accelerator.backward(loss)

    Given the step, :meth:`run` does forward and backward, in sub-batches too where their gradients add up::

            output = budget.run(step, batch)
            optimizer.step()

    With several processes each plans for its own device: gradients are reduced once a step, with the last sub-batch,
    and if one refuses its budget all raise the error, which ``find_executable_batch_size`` takes for out of memory.
    Plans are kept in ``accelerator.save_state()``, in a file of their own: plain code takes the folder as it is, and a
    folder without it is as good.

    :param budget: of each process: bytes, ``"8GiB"`` or ``"90%"`` of its device's memory; processes on one CPU share
        the percentage.
    :param host: ``"memory"`` (for CUDA), ``"disk:FOLDER"`` (for a CPU); None chooses by device.
    :param options: as for :class:`retime.mechanisms.memory.budgeted_step.BudgetedStep`: ``batchnorm``, ``split``,
        ``loss_weight``, ``on_shape_change``, ``dry_run``, ``plan``, ``say``.
    :raises ValueError: an engine other than DistributedDataParallel, or a budget that cannot be read.
    """

    @checked
    def __init__(
        self,
        accelerator: Accelerator,
        model: nn.Module,
        optimizer: Optimizer,
        budget: int | str = "90%",
        host: str | None = None,
        **options: Any,
    ) -> None:
        if accelerator.distributed_type not in _ONE_PROCESS_OR_DDP:
            raise ValueError(
                f"MemoryBudget runs on one device or under DistributedDataParallel, got {accelerator.distributed_type}"
            )
        if accelerator.num_processes > 1 and not isinstance(model, DistributedDataParallel):
            raise TypeError(
                "with several processes MemoryBudget takes the model that accelerator.prepare(...) returned, got "
                f"{type(model).__name__}"
            )
        prepared = _prepared(optimizer, type(self).__name__)
        check_host_text(host)
        self._accelerator = accelerator
        self._model, self._optimizers = model, [prepared.optimizer]
        here = int(os.environ.get("LOCAL_WORLD_SIZE", accelerator.num_processes))
        self._budget_bytes = parse_budget(budget, accelerator.device, sharing=here)
        self._host, self._options = host, options
        self._whole: BudgetedStep | None = None
        self._parts: BudgetedStep | None = None
        self._kept: dict[str, Any] = {}
        self._kept_state = KeptState(accelerator, type(self).__name__, self.state_dict, self.load_state_dict)

    def run(self, step: Callable[[Any], Any], batch: Any) -> Any:
        """Forward and backward pass; returns what ``step(batch)`` would have returned, detached.

        :raises BudgetError: the budget is below the floor; before anything has run.
        """
        if self._parts is None:
            self._parts = self._make(split_too=True)
        return self._parts.run(step, batch, self._accelerator.backward)

    @contextmanager
    def forward(self, step: Callable[[Any], Any], batch: Any) -> Iterator[None]:
        """Around a forward pass on ``batch``: what it saves is offloaded as planned.

        :raises BudgetError: offloading alone does not keep the budget: use :meth:`run`.
        """
        if self._whole is None:
            self._whole = self._make(split_too=False)
        with self._whole.offloading(step, batch):
            yield

    def report(self) -> list[BudgetReport]:
        """What was planned and done so far, for :meth:`run` and :meth:`forward`."""
        return [one.report() for one in (self._parts, self._whole) if one is not None]

    def state_dict(self) -> dict[str, Any]:
        """What ``accelerator.save_state()`` keeps: plans, so that they need not be searched for again."""
        made = {"parts": self._parts, "whole": self._whole}
        return self._kept | {name: one.state_dict() for name, one in made.items() if one is not None}

    def load_state_dict(self, state: Any) -> None:
        """Take up the plans of an earlier run with the same budget, model and optimizer."""
        if not isinstance(state, dict):
            warn_of_dropped(TypeError(f"they are a {type(state).__name__}, not a mapping"))
            return
        self._kept = dict(state)
        for name, one in (("parts", self._parts), ("whole", self._whole)):
            if one is not None and name in state:
                one.load_state_dict(state[name])

    def save_plan(self, path: str | os.PathLike[str]) -> None:
        """Write the plans so far, of :meth:`run` if there are any, to a file for ``plan=`` in other runs.

        :raises ValueError: nothing was planned yet.
        """
        made = self._parts or self._whole
        if made is None:
            raise ValueError(f"save_plan({str(path)!r}): nothing is planned before the first batch")
        if self._accelerator.is_main_process:
            made.save_plan(path)

    def remove(self) -> None:
        """Give back the host's space and take wrappers off."""
        self._kept_state.remove()
        for one in (self._parts, self._whole):
            if one is not None:
                one.remove()
        self._parts = self._whole = None

    def _say(self, text: str) -> None:
        self._accelerator.print(f"retime: {text}")

    def _make(self, split_too: bool) -> BudgetedStep:
        model = self._model
        options = {"gradients": "kept", "sub_batches": split_too, "say": self._say, **self._options}

        def arguments() -> tuple[Any, ...]:
            return self._optimizers, self._budget_bytes, parse_host(self._host, self._accelerator.device)

        made: BudgetedStep
        if isinstance(model, DistributedDataParallel):
            agreement = RankAgreement()
            made = agreement.each_makes(
                lambda: BudgetedDataParallelStep(model, *arguments(), agreement=agreement, **options),
                BudgetedStep.remove,
                SETTING_UP,
            )
        else:
            made = BudgetedStep(model, *arguments(), **options)
        kept = self._kept.get("parts" if split_too else "whole")
        if kept is not None:
            made.load_state_dict(kept)
        return made


def _prepared(optimizer: Optimizer, name: str) -> AcceleratedOptimizer:
    if not isinstance(optimizer, AcceleratedOptimizer):
        raise TypeError(
            f"apply {name} after accelerator.prepare(...): it takes the optimizer that prepare returned, got "
            f"{type(optimizer).__name__}"
        )
    return optimizer


def _renew_captured_steps(optimizer: AcceleratedOptimizer) -> None:
    """With a scaler, AcceleratedOptimizer holds the step methods that it found when it was made."""
    if optimizer.scaler is not None:
        step = optimizer.optimizer.step
        optimizer._optimizer_original_step_method = step
        optimizer._optimizer_patched_step_method = patch_optimizer_step(optimizer, step)
