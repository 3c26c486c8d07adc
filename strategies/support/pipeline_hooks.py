"""What Lightning and users do around the steps of a pipeline: hooks, clipping, metrics, modules on the meta device."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback, StochasticWeightAveraging, WeightAveraging
from lightning.pytorch.plugins import Precision
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor, nn
from torch.optim import Optimizer
from torchmetrics import Metric

from retime.foundations.messages import warn_difference
from retime.foundations.patching import replaced_attributes
from retime.foundations.torch_private.tensors import version_of
from retime.mechanisms.pipeline import PipelineStep, is_on_meta, refuse_part_of_model


def check_pipeline_fit(module: LightningModule, trainer: Trainer, precision: Precision) -> None:
    if not module.automatic_optimization:
        raise ValueError(
            "a pipeline needs automatic optimization: with manual optimization it is not known where a step begins and "
            "ends. Set automatic_optimization=True, or use retime.mechanisms.pipeline.PipelineStep in a loop of yours"
        )
    if is_overridden("backward", module):
        raise ValueError(
            "a pipeline runs the backward pass in stages and cannot call the module's own backward(): remove it"
        )
    if getattr(precision, "scaler", None) is not None:
        raise ValueError("a pipeline does not scale losses: use precision='bf16-mixed' in place of '16-mixed'")
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, StochasticWeightAveraging | WeightAveraging):
            raise ValueError(
                f"{type(callback).__name__} averages all weights on each rank, which has its own layers only: leave it "
                "out, or average the weights of checkpoints"
            )
    refuse_part_of_model(module)


def wants_outputs(module: LightningModule, trainer: Trainer) -> bool:
    """Return whether a hook of the user's is given what ``training_step`` returns."""
    hook = "on_train_batch_end"
    callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
    others = [one for one in callbacks if not type(one).__module__.startswith(("lightning.", "retime."))]
    return is_overridden(hook, module) or any(is_overridden(hook, one, parent=Callback) for one in others)


def warn_of_gradient_hooks(module: LightningModule, trainer: Trainer) -> None:
    """Hooks that see gradients may take a norm of them, which is that of one rank's layers."""
    names = ("on_after_backward", "on_before_optimizer_step", "on_before_zero_grad")
    own = (*names, "configure_gradient_clipping", "clip_gradients")
    hooks = [f"{type(module).__name__}.{name}" for name in own if is_overridden(name, module)]
    code = getattr(type(module).optimizer_step, "__code__", None)
    used = () if code is None else code.co_names
    if any(name == "grad" or "clip_grad_" in name or "grad_norm" in name for name in used):
        hooks.append(f"{type(module).__name__}.optimizer_step")
    callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
    for one in callbacks:
        hooks += [f"{type(one).__name__}.{name}" for name in names if is_overridden(name, one, parent=Callback)]
    if hooks:
        warn_difference(
            f"under a pipeline {', '.join(hooks)} sees the gradients of one rank's layers: a norm taken there, by "
            "torch.nn.utils.clip_grad_norm_ too, is not that of the model. Use Trainer(gradient_clip_val=...) or "
            "self.clip_gradients(), which count all ranks"
        )


@contextmanager
def left_on_meta(module: LightningModule | None) -> Iterator[None]:
    """Inside, a module that was refused as it is on the meta device may be asked for on the processor."""
    if module is None or not is_on_meta(module):
        yield
        return
    with replaced_attributes(module, cpu=lambda: module):
        yield


@contextmanager
def clipped_by_all(precision: Precision, step: PipelineStep) -> Iterator[None]:
    """Inside, the norm that gradients are clipped by is that of all ranks, and a rank may have no gradients to clip."""
    plain, by_value = precision.clip_grad_by_norm, precision.clip_grad_by_value

    def clip(optimizer: Optimizer, clip_val: float) -> None:
        if not step.is_spread:
            plain(optimizer, clip_val)
            return
        parameters = list(precision.main_params(optimizer))
        nn.utils.clip_grads_with_norm_(parameters, clip_val, step.total_norm(parameters))

    def clip_values(optimizer: Optimizer, clip_val: float) -> None:
        if any(parameter.grad is not None for parameter in precision.main_params(optimizer)):  # else torch raises
            by_value(optimizer, clip_val)

    with replaced_attributes(precision, clip_grad_by_norm=clip, clip_grad_by_value=clip_values):
        yield


@contextmanager
def metrics_of(module: LightningModule, data_group: Any) -> Iterator[None]:
    """Inside, metrics add up over the data parallel ranks: those of a pipeline have the same states."""
    available = {"distributed_available_fn": bool} if data_group is None else {}  # bool() is False, and can be pickled
    with ExitStack() as around:
        for metric in module.modules():
            if isinstance(metric, Metric):
                around.enter_context(replaced_attributes(metric, process_group=data_group, **available))
        yield


# What a training step leaves on its module, where it runs once a micro-batch and not on all ranks.

_LIGHTNINGS = set(vars(LightningModule()))


class KeptAttributes:
    """Notices which attributes of a module a step writes, and which of its lists, sets and dictionaries grow.

    Args:
        module: whose step it is. Its submodules and Lightning's own attributes do not count.
    """

    def __init__(self, module: LightningModule) -> None:
        self._module = module
        self._names: dict[str, None] = {}
        self._logs = False

    def note_logger(self) -> None:
        """The step asks one of the Trainer's loggers to write."""
        self._logs = True

    @contextmanager
    def noticing(self) -> Iterator[None]:
        """Around one call of the step."""
        before = self._found()
        yield
        after = self._found()
        self._names |= dict.fromkeys(name for name, state in after.items() if before.get(name) != state)

    def warn(self) -> None:
        """Say what was noticed, if anything was."""
        if self._names:
            warn_difference(
                f"training_step keeps {', '.join(map(repr, self._names))} on the module: under a pipeline it runs once "
                "a micro-batch, and to its end only on the rank of the last stage. Hooks find the last micro-batch's "
                "values there, and old ones on other ranks. Return them in training_step's dictionary, which "
                "on_train_batch_end gets for the whole batch on all ranks, or use self.log()"
            )

        if self._logs:
            warn_difference(
                "training_step writes to self.logger: under a pipeline it runs once a micro-batch, and to its end only "
                "on the rank of the last stage, while loggers write on the first. Use self.log(), or write in "
                "on_train_batch_end"
            )

    def _found(self) -> dict[str, tuple[Any, ...]]:
        return {
            name: (id(value), *_contents_of(value))
            for name, value in vars(self._module).items()
            if name not in _LIGHTNINGS and not isinstance(value, nn.Module)
        }


def _contents_of(value: Any) -> Iterator[Any]:
    """Yield what changes where code writes into a tensor, an array or a collection, and not the attribute."""
    if isinstance(value, Tensor):
        yield 0 if value.is_inference() else version_of(value)
    elif isinstance(value, np.ndarray):
        yield value.tobytes()
    elif isinstance(value, dict):
        yield from ((key, id(one)) for key, one in value.items())
    elif isinstance(value, list | set | deque):
        yield from map(id, value)
