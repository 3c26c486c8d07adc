"""What an accelerator does by itself and, with a part of the model on each process, would do wrong."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from weakref import WeakKeyDictionary

from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from torch import Tensor, nn

from retime.foundations.patching import layered_methods, replaced_attributes
from retime.integrations.accelerate.accelerate_private import prepared_schedulers
from retime.mechanisms.pipeline import PipelineStep, forget_absent

_State = Callable[[], dict[str, Any] | None]


@contextmanager
def guards(accelerator: Accelerator, model: nn.Module, whole_state: _State) -> Iterator[None]:
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


# The folders of ``accelerator.save_state()``, as a plain script writes them.


def keep_in_folders(accelerator: Accelerator, model: nn.Module, state: _State, check: Callable[[], None]) -> None:
    """Save and load this model in folders too, which ``prepare()`` has not seen; behind those that it has.

    Args:
        model: of a pipeline. One that was prepared as well is in the folders already.
        state: that of the whole model, on the process that writes; all call it.
        check: raises where a folder would not be whole, before anything is written to it.
    """

    def save(models: list[nn.Module], weights: list[Any], folder: str) -> None:
        check()
        if all(one is not model for one in models):
            weights.append(state())

    def load(models: list[nn.Module], folder: str) -> None:
        if all(one is not model for one in models):
            models.append(model)

    kept: WeakKeyDictionary[nn.Module, list[Any]]
    kept = vars(accelerator).setdefault("_retime_models_in_folders", WeakKeyDictionary())
    for handle in kept.get(model, ()):  # of a pipeline before this one: a folder has each model once
        handle.remove()
    kept[model] = [accelerator.register_save_state_pre_hook(save), accelerator.register_load_state_pre_hook(load)]


@contextmanager
def whole_folders(
    accelerator: Accelerator, optimizer: AcceleratedOptimizer, step: PipelineStep, optimizer_state: _State
) -> Iterator[None]:
    """Inside, folders have the whole optimizer's state, and are loaded on each process as far as it has the layers.

    Args:
        accelerator: whose ``save_state`` and ``load_state`` all processes call.
        optimizer_state: the whole, on the process that writes; all call it.
    """
    plain_save, plain_load = accelerator.save_state, accelerator.load_state

    def save_state(*args: Any, **kwargs: Any) -> Any:
        if accelerator.project_configuration.save_on_each_node:
            raise RuntimeError(
                "save_on_each_node=True writes folders on machines whose processes have a part of the model only: "
                "leave it out of the ProjectConfiguration, and give save_state a folder that all machines see"
            )
        whole = optimizer_state()
        with replaced_attributes(optimizer, state_dict=lambda: whole):
            return plain_save(*args, **kwargs)

    def load_state(*args: Any, **kwargs: Any) -> Any:
        with step.whole():
            plain_load(*args, **kwargs)
        if step.is_spread:
            forget_absent(optimizer.optimizer, step.owners)

    with layered_methods(accelerator, save_state=save_state, load_state=load_state):
        yield


# Prepared schedulers.


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
