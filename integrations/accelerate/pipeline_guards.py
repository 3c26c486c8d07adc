"""What an accelerator does by itself and, with a part of the model on each process, would do wrong."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from torch import Tensor, nn

from retime.foundations.patching import layered_methods, replaced_attributes
from retime.integrations.accelerate.accelerate_private import prepared_schedulers


@contextmanager
def guards(
    accelerator: Accelerator, model: nn.Module, whole_state: Callable[[], dict[str, Any] | None]
) -> Iterator[None]:
    """Inside, clipping by the norm of one process is refused, and ``get_state_dict`` of the model gives the whole.

    Args:
        whole_state: that of the whole model, on the process that writes, None on others; all call it.
    """
    plain, ours = accelerator.clip_grad_norm_, set(model.parameters())
    plain_state = accelerator.get_state_dict

    def clip_grad_norm_(parameters: Tensor | Iterable[Tensor], *args: Any, **kwargs: Any) -> Any:
        given = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        if ours.isdisjoint(given):
            return plain(given, *args, **kwargs)
        raise RuntimeError(
            "accelerator.clip_grad_norm_() would take the norm of this process's layers alone: use "
            "OutOfOrderPipeline.clip_grad_norm_(max_norm)"
        )

    def get_state_dict(given: nn.Module, *args: Any, **kwargs: Any) -> Any:  # save_model() asks here too
        return whole_state() if given is model else plain_state(given, *args, **kwargs)

    with layered_methods(accelerator, clip_grad_norm_=clip_grad_norm_, get_state_dict=get_state_dict):
        yield


def one_step_a_batch(accelerator: Accelerator, optimizer: AcceleratedOptimizer, replicas: int, undo: ExitStack) -> None:
    """Have prepared schedulers of an optimizer take one step a training step, where they take one for each process.

    Args:
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
