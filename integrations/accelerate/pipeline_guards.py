"""What an accelerator does by itself and, with a part of the model on each process, would do wrong."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from torch import Tensor, nn

from retime.integrations.accelerate.accelerate_private import prepared_schedulers
from retime.mechanisms.replaced_attributes import replaced_attributes


@contextmanager
def guards(accelerator: Accelerator, model: nn.Module) -> Iterator[None]:
    """Inside, clipping by the norm of one process and saving the state of one process are refused.

    Args:
        accelerator: of the loop.
        model: that is spread over processes.
    """
    plain, ours = accelerator.clip_grad_norm_, set(model.parameters())

    def clip_grad_norm_(parameters: Tensor | Iterable[Tensor], *args: Any, **kwargs: Any) -> Any:
        given = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        if ours.isdisjoint(given):
            return plain(given, *args, **kwargs)
        raise RuntimeError(
            "accelerator.clip_grad_norm_() would take the norm of this process's layers alone: use "
            "OutOfOrderPipeline.clip_grad_norm_(max_norm)"
        )

    def save_state(models: Any, weights: Any, folder: str) -> None:
        raise RuntimeError(
            "accelerator.save_state() would write the optimizer's state of the first process's layers alone: call "
            "OutOfOrderPipeline.state_dict() and optimizer_state_dict() on all processes, and accelerator.save() them"
        )

    handle = accelerator.register_save_state_pre_hook(save_state)
    try:
        with replaced_attributes(accelerator, clip_grad_norm_=clip_grad_norm_):
            yield
    finally:
        handle.remove()


def one_step_a_batch(accelerator: Accelerator, optimizer: AcceleratedOptimizer, replicas: int, undo: ExitStack) -> None:
    """Have prepared schedulers of an optimizer take one step a training step, where they take one for each process.

    Args:
        accelerator: that prepared them.
        optimizer: theirs.
        replicas: number of pipelines.
        undo: gets what sets them back.

    Raises:
        ValueError: there are several pipelines, for which a scheduler would take a step each, and it cannot.
    """
    for scheduler in prepared_schedulers(accelerator):
        counts = scheduler.step_with_optimizer and not scheduler.split_batches
        if not counts or optimizer not in scheduler.optimizers:
            continue
        if replicas > 1:
            raise ValueError(
                f"a prepared scheduler takes {accelerator.num_processes} steps for each step of the optimizer, one a "
                f"process, where there are {replicas} pipelines: do not prepare the scheduler, and step it where "
                "accelerator.sync_gradients"
            )
        undo.enter_context(replaced_attributes(scheduler, split_batches=True))
