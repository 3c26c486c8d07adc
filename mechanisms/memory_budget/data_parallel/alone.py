"""A rank tries something out by itself: the model's step without the other ranks, who may be doing something else."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from retime.foundations.replaced_attributes import replaced_attributes
from retime.foundations.torch_private import COLLECTIVE_NAMESPACES, BatchNormBase, TorchDispatchMode

__all__ = ["CollectiveError", "alone"]


class CollectiveError(RuntimeError):
    """A step that a rank runs by itself asked for an answer of the other ranks."""


@contextmanager
def alone(model: DistributedDataParallel, *, watch: bool = True) -> Iterator[None]:
    """While open, calls of ``model`` reach the bare module: none of DDP's hooks fires, no buffer is sent.

    SyncBatchNorm layers take the statistics of this rank.

    Args:
        model: the wrapped model.
        watch: refuse collectives of the step's own; looking at each operation takes time.

    Raises:
        CollectiveError: there is one.
    """
    synced = [layer for layer in model.modules() if isinstance(layer, nn.SyncBatchNorm)]
    with ExitStack() as around:
        around.enter_context(replaced_attributes(model, forward=model.module.__call__))
        for layer in synced:
            around.enter_context(replaced_attributes(layer, forward=partial(BatchNormBase.forward, layer)))
        if watch:
            around.enter_context(_NoCollectives())  # type: ignore[no-untyped-call]
        yield


class _NoCollectives(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in COLLECTIVE_NAMESPACES:
            raise CollectiveError(
                f"the step calls {func.__name__.partition('.')[0].strip('_')} on all ranks, so one rank cannot plan "
                "its memory alone: log with self.log(..., sync_dist=True) or a torchmetrics object, or move the "
                "collective out of the step"
            )
        return func(*args, **(kwargs or {}))
