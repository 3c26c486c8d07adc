"""What ``accelerator.prepare()`` has made: which engines the objects take, and the optimizer in its wrapper."""

from __future__ import annotations

from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils import DistributedType
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from retime.foundations.compatibility import Mechanism, refuse, why_aside
from retime.foundations.lazy_updates import is_compiled

ONE_PROCESS_OR_DDP = {DistributedType.NO, DistributedType.MULTI_GPU, DistributedType.MULTI_CPU}
"""Engines that leave gradients, and the optimizer's step, where the mechanisms can reach them."""


def prepared_optimizer(optimizer: Optimizer, name: str) -> AcceleratedOptimizer:
    """The optimizer, if ``prepare`` has wrapped it.

    Args:
        name: of the object that it was given to, for the error.

    Raises:
        TypeError: it is not wrapped.
    """
    if not isinstance(optimizer, AcceleratedOptimizer):
        raise TypeError(
            f"apply {name} after accelerator.prepare(...): it takes the optimizer that prepare returned, got "
            f"{type(optimizer).__name__}"
        )
    return optimizer


def prepared_for_ranks(accelerator: Accelerator, model: nn.Module, name: str) -> DistributedDataParallel:
    """The model, if ``prepare`` has wrapped it for several processes.

    Raises:
        ValueError: it is not wrapped, or by another engine, or compiled behind that.
    """
    if not isinstance(model, DistributedDataParallel):
        compiled = ": compile it before prepare(), and leave out Accelerate's own torch.compile"
        raise ValueError(
            f"{name} needs the DistributedDataParallel model that accelerator.prepare() makes with two processes or "
            f"more, got {type(model).__name__} ({accelerator.distributed_type}, {accelerator.num_processes} processes)"
            + compiled
            * is_compiled(model)
        )
    return model


def refuse_beside(optimizer: AcceleratedOptimizer, wanted: Mechanism, *, once: bool = False) -> None:
    """Raise for a mechanism that does not go with those which this optimizer has already.

    Args:
        once: a second one of the same is refused here too, where it does not refuse that itself.

    Raises:
        ValueError: with what to do.
    """
    there = [one for one in _there(optimizer) if once or one is not wanted]
    refuse(wanted, there)
    aside = why_aside(wanted, there)
    if aside is not None:  # a strategy would warn and run the plain way
        raise ValueError(f"{aside}, which is FusedOptimizer(..., mode='forward') here")


def note_there(optimizer: AcceleratedOptimizer, mechanism: Mechanism) -> None:
    """Note that this optimizer has the mechanism from now on."""
    _there(optimizer).append(mechanism)


def note_gone(optimizer: AcceleratedOptimizer, mechanism: Mechanism) -> None:
    """It has been removed, perhaps for the second time."""
    if mechanism in _there(optimizer):
        _there(optimizer).remove(mechanism)


def _there(optimizer: AcceleratedOptimizer) -> list[Mechanism]:
    there: list[Mechanism] = optimizer.optimizer.__dict__.setdefault("_retime_mechanisms", [])  # may be wrapped anew
    return there
