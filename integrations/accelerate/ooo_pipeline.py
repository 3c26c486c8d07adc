"""Out-of-order pipeline parallel for Accelerate (Oh et al. 2022, section 5.2)."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import ExitStack
from datetime import timedelta
from typing import Annotated, Any, Literal

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import send_to_device
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from retime.foundations.arguments import AtLeast, Timeout, checked
from retime.foundations.compatibility import Mechanism
from retime.foundations.messages import parse_bytes, warn_no_effect
from retime.foundations.parts import loss_of
from retime.integrations.accelerate.pipeline_guards import guards, keep_in_folders, one_step_a_batch, whole_folders
from retime.integrations.accelerate.prepared import (
    ONE_PROCESS_OR_DDP,
    note_gone,
    note_there,
    prepared_optimizer,
    refuse_beside,
)
from retime.mechanisms.pipeline import (
    LossWeight,
    PipelineReport,
    PipelineStep,
    broadcast_state,
    check_optimizer,
    check_schedule,
    forget_absent,
    make_groups,
    refuse_part_of_model,
    sizes_of,
    warn_of_parts,
    whole_loss,
    whole_model_state,
    whole_optimizer_state,
)

Auto = Literal["auto"]


class OutOfOrderPipeline:
    """Pipeline parallel training of an unmodified module: each process has some of the layers.

    In a loop::

        optimizer, scheduler = accelerator.prepare(optimizer, scheduler)      # not the model
        pipeline = OutOfOrderPipeline(accelerator, model, optimizer)
        for batch in loader:                                # the same batch on all processes of a pipeline
            with accelerator.accumulate(model):
                loss = pipeline.train_batch(batch, lambda part: loss_fn(model(part[0]), part[1]))
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
        pipeline.restore()                                  # the model is whole again

    See :class:`retime.strategies.OOOPipelineStrategy` for what happens, which models can be cut, and the arguments. All
    processes make one of these, and all call its methods. They begin with the values of the first process.

    ``accelerator.save_state()`` and ``load_state()`` include the whole model, after prepared models, and the
    whole optimizer's state: folders are those of a script on one device that prepares the model, and each loads the
    other's, on any number of processes, until :meth:`restore`. All processes call them,
    ``accelerator.get_state_dict(model)`` and ``save_model``. Load other checkpoints, of the optimizer on all processes,
    before the first batch.

    Each process of a pipeline needs the same batches. With one pipeline use a loader that was not prepared, with the
    same seed everywhere; with several, ``accelerate.data_loader.prepare_data_loader(loader,
    num_processes=pipeline.data_parallel_size, process_index=pipeline.data_parallel_rank)``. Under
    ``mixed_precision="bf16"`` all of ``loss_fn`` runs in autocast. With one process this trains the plain way, with one
    ``NoEffectWarning``.

    Raises:
        ValueError: a model in DistributedDataParallel, another engine, fp16, sizes that do not fit the number of
            processes, an unknown schedule, another mechanism on this optimizer, state of it on some processes only.
        TypeError: the optimizer is not prepared.
        PipelineError: there is nothing to cut.
    """

    @checked
    def __init__(
        self,
        accelerator: Accelerator,
        model: nn.Module,
        optimizer: Optimizer,
        *,
        pipeline_parallel_size: Annotated[int, AtLeast(1)] | Auto = "auto",
        data_parallel_size: Annotated[int, AtLeast(1)] | Auto = "auto",
        schedule: str = "ooo2",
        microbatches: Annotated[int, AtLeast(1)] | Auto = "auto",
        layers: str | None = None,
        group: Annotated[int, AtLeast(1)] | Auto = "auto",
        activation_cap: int | str | None = None,
        split: Literal["even", "fastest"] | list[str] = "even",
        loss_weight: LossWeight | None = None,
        timeout: Timeout = timedelta(seconds=60),
    ) -> None:
        check_schedule(schedule)
        cap = None if activation_cap is None else parse_bytes("activation_cap", activation_cap)
        self._accelerator, self._model = accelerator, model
        self._optimizer = prepared_optimizer(optimizer, type(self).__name__)
        _check(accelerator, model, self._optimizer.optimizer)
        refuse_beside(self._optimizer, Mechanism.PIPELINE, once=True)
        stages, replicas = sizes_of(accelerator.num_processes, pipeline_parallel_size, data_parallel_size)
        self.data_parallel_size: int = replicas
        self.data_parallel_rank: int = accelerator.process_index // stages
        self._is_first = accelerator.process_index % stages == 0
        self._step: PipelineStep | None = None
        self._guards = ExitStack()
        self._is_over = False
        self._elsewhere: list[nn.Parameter] = []
        self._last_report = PipelineReport()
        if stages == 1:
            warn_no_effect("OutOfOrderPipeline has no effect: a pipeline needs two processes or more")
        if accelerator.num_processes == 1:
            keep_in_folders(accelerator, model, self.state_dict, self._refuse_parts)
            return
        if stages > 1:
            check_optimizer(self._optimizer.optimizer, model)
        refuse_part_of_model(model)
        _check_state(self._optimizer.optimizer)
        model.to(accelerator.device)
        broadcast_state(model)
        warn_of_parts(model, 2 if microbatches == "auto" else microbatches)
        pipeline_group, data_group = make_groups(stages, replicas, timeout)
        self._step = PipelineStep(
            model,
            group=pipeline_group,
            data_group=data_group,
            microbatches=microbatches,
            schedule=schedule,
            layers=layers,
            layers_per_stage=group,
            activation_cap=cap,
            split=split,
            loss_weight=loss_weight,
        )
        note_there(self._optimizer, Mechanism.PIPELINE)
        self._guards.callback(note_gone, self._optimizer, Mechanism.PIPELINE)
        self._guards.enter_context(guards(accelerator, model, self.state_dict))
        keep_in_folders(accelerator, model, self.state_dict, self._refuse_parts)
        self._guards.enter_context(whole_folders(accelerator, self._optimizer, self._step, self.optimizer_state_dict))

    def train_batch(self, batch: Any, loss_fn: Callable[[Any], Any]) -> Tensor:
        """Add a batch's gradients, divided by ``gradient_accumulation_steps``, to ``.grad``.

        Args:
            batch: whole, the same on all processes of a pipeline.
            loss_fn: the training step for a part of a batch: returns a loss, or an output that contains one.

        Returns:
            The loss of the batch, a scalar without a graph, on all processes.

        Raises:
            PipelineError: the model or the batch cannot go through a pipeline.
            RankLostError: another process did not send what it should have.
            ValueError: a prepared scheduler would count processes in place of batches.
        """
        self._refuse_if_over()
        batch, step = send_to_device(batch, self._accelerator.device), self._in_autocast(loss_fn)
        if self._step is None:
            loss: Tensor = loss_of(step(batch))
            self._accelerator.backward(loss)
            return loss.detach()
        one_step_a_batch(self._accelerator, self._optimizer, self.data_parallel_size, self._guards)
        was_spread = self._step.is_spread
        results = self._step.train(step, batch, divide_by=self._accelerator.gradient_accumulation_steps)
        if not was_spread:
            forget_absent(self._optimizer.optimizer, self._step.owners)
            self._step.take_first_look()
        whole: Tensor = self._step.tell(whole_loss(results).float().cpu() if results else None)
        return whole.to(self._accelerator.device)

    def evaluate(self, batch: Any, step: Callable[[Any], Any]) -> Any:
        """Return ``step(batch)``, without gradients, on all processes of a pipeline; call ``model.eval()`` before.

        Args:
            batch: the same on all processes of a pipeline.
            step: called once, with the whole batch.
        """
        batch, step = send_to_device(batch, self._accelerator.device), self._in_autocast(step)
        with torch.no_grad():
            if self._step is None:
                return step(batch)
            with self._step.outside_whole(), self._step.evaluating():
                return step(batch)

    @checked
    def clip_grad_norm_(self, max_norm: Annotated[float, AtLeast(0)]) -> Tensor:
        """Clip by the 2-norm of the gradients of all processes, and return it; all processes call this."""
        parameters = list(self._model.parameters())
        if self._step is None or not self._step.is_spread:
            return nn.utils.clip_grad_norm_(parameters, max_norm)
        norm = self._step.total_norm(parameters)
        nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)
        return norm

    def state_dict(self) -> dict[str, Any] | None:
        """Return the whole model's state on a pipeline's first process, None on others; all processes call this."""
        state = self._model.state_dict()
        if self._step is not None and self._step.is_spread:
            state = whole_model_state(self._model, state, self._step.owners)
        return state if self._is_first else None

    def optimizer_state_dict(self) -> dict[str, Any] | None:
        """Return the whole optimizer's state on a pipeline's first process, None on others; all processes call this.

        Raises:
            RuntimeError: the model is restored, and each process has a part of the state.
        """
        self._refuse_if_over()
        optimizer = self._optimizer.optimizer
        state: dict[str, Any] = optimizer.state_dict()
        if self._step is not None and self._step.is_spread:
            state = whole_optimizer_state(optimizer, state, self._step.owners)
        return state if self._is_first else None

    def report(self) -> PipelineReport:
        """Report of what this process did so far."""
        return self._last_report if self._step is None else self._step.report()

    def restore(self) -> None:
        """Give each process the whole model back, but not the optimizer's state; after an exception its layers stay.

        From then on ``accelerator.save_state()`` is refused, if the optimizer has a state, until a whole one is loaded.
        """
        step, self._step = self._step, None
        self._guards.close()
        if step is None:
            return
        if step.is_spread:
            self._elsewhere = [step.owners.parameters[name] for name in step.owners.absent]
        self._last_report, self._is_over = step.report(), True
        if sys.exc_info()[0] is None:
            step.restore()
        else:
            step.remove()

    def _in_autocast(self, step: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def run(part: Any) -> Any:
            with self._accelerator.autocast():
                return step(part)

        return run

    def _refuse_parts(self) -> None:
        """Raise where a folder would have a part of the model, or of the optimizer's state, for the whole."""
        if self._step is not None:
            return
        refuse_part_of_model(self._model)
        state = self._optimizer.optimizer.state
        if state and any(parameter not in state for parameter in self._elsewhere):
            raise RuntimeError(
                "this OutOfOrderPipeline was restored, and accelerator.save_state() would write the optimizer's state "
                "of the first process's layers alone: call save_state() before restore()"
            )

    def _refuse_if_over(self) -> None:
        if self._is_over:
            raise RuntimeError(
                "this OutOfOrderPipeline was restored, and each process has the optimizer's state of its own layers: "
                "take optimizer_state_dict() before restore(), and make another pipeline to train on"
            )


def _check(accelerator: Accelerator, model: nn.Module, optimizer: Optimizer) -> None:
    if isinstance(model, DistributedDataParallel):
        raise ValueError(
            "OutOfOrderPipeline needs the model itself, and accelerator.prepare() has put it in "
            "DistributedDataParallel: prepare only the optimizer and the scheduler, and pass the model that was not "
            "prepared"
        )
    if accelerator.distributed_type not in ONE_PROCESS_OR_DDP:
        raise ValueError(f"OutOfOrderPipeline divides the model itself, and so does {accelerator.distributed_type}")
    if accelerator.scaler is not None or accelerator.mixed_precision not in ("no", "bf16"):
        raise ValueError(
            f"mixed_precision={accelerator.mixed_precision!r} does not go through a pipeline, which does not scale "
            "losses: use mixed_precision='bf16'"
        )
    if any(parameter.device.type == "meta" for parameter in model.parameters()):
        raise ValueError(
            "parameters are on the meta device, and the first batch needs them whole: build the model with values"
        )
    parameters = set(model.parameters())
    if any(parameter not in parameters for group in optimizer.param_groups for parameter in group["params"]):
        raise ValueError("the optimizer has parameters that are not the model's: give them an optimizer of their own")


def _check_state(optimizer: Optimizer) -> None:
    """Raise for a state that only some processes have: each would go on with a part of it, or without."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, [number for number, one in enumerate(parameters) if one in optimizer.state])
    if any(one != everyone[0] for one in everyone):
        raise ValueError(
            "the processes have the optimizer's state of different parameters, as after the restore() of another "
            "pipeline: give all of them what optimizer_state_dict() returned on the first, by load_state_dict()"
        )
