"""Training inside a byte budget for ``transformers.Trainer`` (moDNN, Chen et al. 2019)."""

from __future__ import annotations

import copy
import os
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn
from transformers import Trainer

from retime.foundations.arguments import checked
from retime.foundations.compatibility import Mechanism
from retime.foundations.messages import warn_no_effect
from retime.foundations.patching import layered_methods
from retime.integrations.accelerate.memory_budget import BudgetReports
from retime.integrations.accelerate.memory_budget import MemoryBudget as Budget
from retime.integrations.transformers.during_training import DuringTraining, Removable
from retime.mechanisms.memory_budget import BudgetOptions, check_host_text, parse_budget
from retime.schedules.budget import BudgetError

_INSTEAD = (
    "Under transformers.Trainer batches are never split: a smaller per_device_train_batch_size with more "
    "gradient_accumulation_steps would help."
)


class MemoryBudget(DuringTraining[BudgetReports]):
    """Keep a trainer's steps inside a number of bytes (Chen et al. 2019, moDNN), in each ``train()``.

    Activations are offloaded to the host during ``compute_loss`` and come back in the backward pass, as planned for the
    first batch of each shape. Weights, losses and checkpoints are bit-identical to the plain Trainer's. Batches are
    never cut into sub-batches, so budgets are refused that a ``memory_budget`` strategy would keep. Batches of
    evaluation are not planned for.

    Plans are kept from one ``train()`` to the next, and for other runs by :meth:`save_plan`; checkpoints have none.

    Args:
        trainer: before ``train()``; one of a class that inherits from ``Trainer`` as well.
        budget: of each process: bytes, ``"8GiB"`` or ``"90%"`` of its device's memory; processes on one CPU share
            the percentage.
        host: ``"memory"`` (for CUDA), ``"disk:FOLDER"`` (for a CPU); None chooses by device.
        options: as for :class:`retime.mechanisms.memory_budget.BudgetedStep`: ``on_shape_change``, ``dry_run``,
            ``plan``, ``say``, ``split``. ``dry_run`` is ``"off"`` if the trainer's class overrides ``compute_loss``
            or it was given a ``compute_loss_func``, which may count and log: then it is called once a batch. ``"auto"``
            plans better.

    Raises:
        ValueError: a budget that cannot be read; DeepSpeed, FSDP and DataParallel; backward fusion beside it; several
            processes and a ``compute_loss`` of one's own, unless ``dry_run="auto"`` is given.
        BudgetError: from ``train()``, before the first step of a shape: offloading alone does not keep the budget.
            With ``dry_run="off"`` it comes with the second step, since plans follow from the first one.
            ``auto_find_batch_size`` treats it as out of memory.
    """

    @checked
    def __init__(self, trainer: Trainer, budget: int | str = "90%", host: str | None = None, **options: Any) -> None:
        accelerator = trainer.accelerator
        here = int(os.environ.get("LOCAL_WORLD_SIZE", accelerator.num_processes))
        parse_budget(budget, accelerator.device, sharing=here)
        check_host_text(host)
        BudgetOptions(**options)  # what is wrong with them shows here
        self._budget, self._host, self._options = budget, host, options
        self._plans: dict[str, Any] = {}
        self._batches = self._first_step = 0
        super().__init__(trainer, Mechanism.MEMORY_BUDGET, BudgetReports())

    def save_plan(self, path: str | os.PathLike[str]) -> None:
        """Write the plans so far to a file, for ``plan=`` in other runs; during a training, as from a callback.

        Raises:
            ValueError: nothing was planned yet, or no training runs.
        """
        if not isinstance(self._made, Budget):
            raise ValueError(f"save_plan({str(path)!r}): call it while train() runs, as from a callback's on_step_end")
        self._made.save_plan(path)

    def _has_own_loss(self) -> bool:
        trainer = self._trainer
        is_own = type(trainer).compute_loss is not Trainer.compute_loss or "compute_loss" in vars(trainer)
        return is_own or trainer.compute_loss_func is not None

    def _check(self) -> None:
        processes = self._trainer.accelerator.num_processes
        if processes > 1 and self._has_own_loss() and self._options.get("dry_run") != "auto":
            raise ValueError(
                f"with {processes} processes plans are made by dry runs, which call compute_loss more often than "
                f"training does, and {type(self._trainer).__name__} has one of its own (or a "
                "compute_loss_func), which may count or log: give dry_run='auto' if it does neither"
            )

    def _make(self, accelerator: Accelerator, model: nn.Module, optimizer: Any) -> Budget:
        trainer = self._trainer
        options = {"dry_run": "off" if self._has_own_loss() else "auto", **self._options}
        budget = Budget(accelerator, model, optimizer, self._budget, self._host, **options)
        budget.load_state_dict(self._plans)
        self._batches, self._first_step = 0, trainer.state.global_step
        plain = trainer.compute_loss

        def compute_loss(model: nn.Module, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            if not (model.training and torch.is_grad_enabled()):
                return plain(model, inputs, *args, **kwargs)  # of an evaluation
            self._batches += 1

            def planned(batch: dict[str, Any]) -> Any:
                now = {name: value for name, value in batch.items() if name != "inputs"}
                output = plain(model, copy.copy(batch["inputs"]), *args, **now)  # labels are taken out of it
                return output[0] if isinstance(output, tuple) else output

            try:
                with budget.forward(planned, {"inputs": copy.copy(inputs), **kwargs}):
                    return plain(model, inputs, *args, **kwargs)
            except BudgetError as error:
                error.add_note(_INSTEAD)
                raise

        self._on.enter_context(layered_methods(trainer, compute_loss=compute_loss))
        return budget

    def _ended(self, method: Removable) -> None:
        assert isinstance(method, Budget)
        self._plans = method.state_dict()
        if self._trainer.state.global_step > self._first_step and not self._batches:
            warn_no_effect(
                f"MemoryBudget had no effect: the training_step of {type(self._trainer).__name__} did not call "
                "compute_loss, which is the call that runs within a budget"
            )
