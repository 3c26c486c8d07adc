"""Training inside a byte budget for Accelerate (moDNN, Chen et al. 2019)."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from accelerate import Accelerator
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from retime.foundations.arguments import checked
from retime.foundations.compatibility import Mechanism
from retime.foundations.ddp import RankAgreement
from retime.foundations.messages import Report
from retime.integrations.accelerate.prepared import (
    ONE_PROCESS_OR_DDP,
    note_gone,
    note_there,
    prepared_for_ranks,
    prepared_optimizer,
    refuse_beside,
)
from retime.integrations.accelerate.state_file import StateFile
from retime.mechanisms.memory_budget import (
    SETTING_UP,
    BudgetedDataParallelStep,
    BudgetedStep,
    BudgetOptions,
    BudgetReport,
    check_host_text,
    parse_budget,
    parse_host,
    warn_of_dropped,
)


class BudgetReports(Report, list[BudgetReport]):
    """The reports of :meth:`MemoryBudget.run` and :meth:`MemoryBudget.forward`, which print as one."""

    def what_was_done(self) -> list[str]:
        done = [text for one in self for text in one.what_was_done()]
        return done or ["memory budget: nothing is planned before the first batch"]

    def what_stayed_plain(self) -> list[str]:
        return [text for one in self for text in one.what_stayed_plain()]

    def what_was_measured(self) -> list[str]:
        return [text for one in self for text in one.what_was_measured()]

    def figures(self) -> dict[str, Any]:
        return {"reports": list(self)}


class MemoryBudget:
    """Keep training inside a number of bytes (Chen et al. 2019, moDNN).

    :meth:`forward` offloads activations to the host during a forward pass; results are bit-identical::

        budget = MemoryBudget(accelerator, model, optimizer, "8GiB")
        with accelerator.accumulate(model):
            with budget.forward(step, batch):          # step(batch) computes the loss; used for planning only
                loss = step(batch)
            accelerator.backward(loss)

    :meth:`run` does the forward and the backward pass, in sub-batches too if their gradients add up::

            output = budget.run(step, batch)
            optimizer.step()

    With several processes each plans for its own device: gradients are reduced once a step, with the last sub-batch,
    and if one refuses its budget all raise the error, which ``find_executable_batch_size`` treats as out of memory.
    ``accelerator.save_state()`` keeps plans in a separate file, which plain code ignores and ``load_state()`` does not
    need.

    Args:
        budget: of each process: bytes, ``"8GiB"`` or ``"90%"`` of its device's memory; processes on one CPU share
            the percentage.
        host: ``"memory"`` (for CUDA), ``"disk:FOLDER"`` (for a CPU); None chooses by device.
        options: as for :class:`retime.mechanisms.memory_budget.BudgetedStep`: ``batchnorm``, ``split``,
            ``loss_weight``, ``on_shape_change``, ``dry_run``, ``plan``, ``say``.

    Raises:
        ValueError: an engine other than DistributedDataParallel, backward fusion beside it, or a budget that cannot be
            read.
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
        if accelerator.distributed_type not in ONE_PROCESS_OR_DDP:
            raise ValueError(
                f"MemoryBudget runs on one device or under DistributedDataParallel, got {accelerator.distributed_type}"
            )
        if accelerator.num_processes > 1:
            prepared_for_ranks(accelerator, model, type(self).__name__)
        self._prepared = prepared = prepared_optimizer(optimizer, type(self).__name__)
        refuse_beside(prepared, Mechanism.MEMORY_BUDGET)
        check_host_text(host)
        self._accelerator = accelerator
        self._model, self._optimizers = model, [prepared.optimizer]
        here = int(os.environ.get("LOCAL_WORLD_SIZE", accelerator.num_processes))
        self._budget_bytes = parse_budget(budget, accelerator.device, sharing=here)
        defaults: dict[str, Any] = {"gradients": "kept", "say": self._say}
        self._host, self._options = host, BudgetOptions(**defaults | options)
        self._whole: BudgetedStep | None = None
        self._parts: BudgetedStep | None = None
        self._kept: dict[str, Any] = {}
        self._state_file = StateFile(accelerator, type(self).__name__, self.state_dict, self.load_state_dict)
        note_there(prepared, Mechanism.MEMORY_BUDGET)

    def run(self, step: Callable[[Any], Any], batch: Any) -> Any:
        """Forward and backward pass; returns what ``step(batch)`` would have returned, detached.

        Raises:
            BudgetError: the budget is below the floor; before anything has run.
        """
        if self._parts is None:
            self._parts = self._make(split_too=True)
        return self._parts.run(step, batch, self._accelerator.backward)

    @contextmanager
    def forward(self, step: Callable[[Any], Any], batch: Any) -> Iterator[None]:
        """Offload what a forward pass on ``batch`` saves, as planned; a context manager.

        Raises:
            BudgetError: offloading alone does not keep the budget: use :meth:`run`.
        """
        if self._whole is None:
            self._whole = self._make(split_too=False)
        with self._whole.offloading(step, batch):
            yield

    def report(self) -> BudgetReports:
        """Reports on plans and steps so far, for :meth:`run` and :meth:`forward`: a list that prints as text."""
        return BudgetReports(one.report() for one in (self._parts, self._whole) if one is not None)

    def state_dict(self) -> dict[str, Any]:
        """State that ``accelerator.save_state()`` keeps: plans, so that they need not be searched for again."""
        steps = {"parts": self._parts, "whole": self._whole}
        return self._kept | {name: one.state_dict() for name, one in steps.items() if one is not None}

    def load_state_dict(self, state: Any) -> None:
        """Use the plans of an earlier run with the same budget, model and optimizer."""
        if not isinstance(state, dict):
            warn_of_dropped(TypeError(f"they are a {type(state).__name__}, not a mapping"))
            return
        self._kept = dict(state)
        for name, one in (("parts", self._parts), ("whole", self._whole)):
            if one is not None and name in state:
                one.load_state_dict(state[name])

    def save_plan(self, path: str | os.PathLike[str]) -> None:
        """Write the plans so far, of :meth:`run` if there are any, to a file for ``plan=`` in other runs.

        Raises:
            ValueError: nothing was planned yet.
        """
        step = self._parts or self._whole
        if step is None:
            raise ValueError(f"save_plan({str(path)!r}): nothing is planned before the first batch")
        if self._accelerator.is_main_process:
            step.save_plan(path)

    def remove(self) -> None:
        """Free the host's space and remove all wrappers."""
        self._state_file.remove()
        note_gone(self._prepared, Mechanism.MEMORY_BUDGET)
        for one in (self._parts, self._whole):
            if one is not None:
                one.remove()
        self._parts = self._whole = None

    def _say(self, text: str) -> None:
        self._accelerator.print(f"retime: {text}")

    def _make(self, split_too: bool) -> BudgetedStep:
        model = self._model
        options = replace(self._options, sub_batches=split_too and self._options.sub_batches)

        def arguments() -> tuple[Any, ...]:
            return self._optimizers, self._budget_bytes, parse_host(self._host, self._accelerator.device), options

        step: BudgetedStep
        if isinstance(model, DistributedDataParallel):
            agreement = RankAgreement()
            step = agreement.each_makes(
                lambda: BudgetedDataParallelStep(model, *arguments(), agreement=agreement),
                BudgetedStep.remove,
                SETTING_UP,
            )
        else:
            step = BudgetedStep(model, *arguments())
        kept = self._kept.get("parts" if split_too else "whole")
        if kept is not None:
            step.load_state_dict(kept)
        return step
