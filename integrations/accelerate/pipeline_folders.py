"""A pipeline's model and optimizer in the folders of ``accelerator.save_state()``, as a plain script writes them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from torch import nn

from retime.foundations.patching import layered_methods, replaced_attributes
from retime.mechanisms.pipeline import PipelineStep, forget_absent

_State = Callable[[], dict[str, Any] | None]


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
