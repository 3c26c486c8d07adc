"""BatchNorm under sub-batches: which layers need the whole batch, and what may be done about it.

A BatchNorm layer in train mode normalises with the mean and variance of the batch, so a sub-batch through it gives
other numbers. Two ways are left:

- ``"offload"`` (the default): no sub-batches while such a layer is there.
- ``"ghost"``: each sub-batch is normalised by its own statistics, as in ghost batch normalisation (Hoffer, Hubara and
  Soudry 2017). Other numbers than the plain step's: a choice of the user's.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Literal

import torch
from torch import nn

from retime.foundations.torch_private.nn_and_optim import BatchNormBase, own_buffers

BatchNormChoice = Literal["offload", "ghost"]


def batch_statistics_layers(model: nn.Module) -> list[str]:
    """Names of the BatchNorm layers that take their statistics over the batch: in train mode, or without running ones.

    Frozen layers (``eval()``) are like any other layer.
    """
    return [name for name, module in model.named_modules() if _takes_statistics(module)]


def _takes_statistics(module: nn.Module) -> bool:
    if isinstance(module, torch.jit.ScriptModule):  # it has the methods of a BatchNorm, but is none
        return "BatchNorm" in module.original_name and module.training
    return isinstance(module, BatchNormBase) and _is_live(module)


def _is_live(layer: BatchNormBase) -> bool:
    return layer.training or (layer.running_mean is None and layer.running_var is None)


def fix_statistics(model: nn.Module, layers: Sequence[str]) -> None:
    """Let layers normalise with running statistics, or with mean 0 and variance 1 where they keep none."""
    for name in layers:
        layer = model.get_submodule(name)
        assert isinstance(layer, BatchNormBase)
        if layer.running_mean is None:
            some = next(iter(model.parameters()), torch.zeros(()))
            own_buffers(layer)["running_mean"] = torch.zeros(layer.num_features, device=some.device, dtype=some.dtype)
            own_buffers(layer)["running_var"] = torch.ones(layer.num_features, device=some.device, dtype=some.dtype)
        layer.training = False


@contextmanager
def ghost_momentum(model: nn.Module, parts: int) -> Iterator[None]:
    """Inside, ``parts`` sub-batches move running statistics as much as one batch does outside.

    A layer with momentum m replaces the share m of its running statistics in each forward pass. With
    ``1 - (1 - m) ** (1 / parts)`` in each of ``parts`` passes, the share is m again; the later sub-batches weigh a
    little more than the first. Cumulative averages (``momentum=None``) weigh all passes alike and are left as they are.
    Running variances come from the variances inside sub-batches, which leave out how their means differ.
    """
    layers = [module for module in model.modules() if isinstance(module, BatchNormBase) and _is_live(module)]
    momenta = [layer.momentum for layer in layers]
    try:
        for layer in layers:
            if layer.momentum is not None:
                # the same as 1 - (1 - m) ** (1 / parts), without losing digits for small m
                layer.momentum = 1.0 if layer.momentum >= 1 else -math.expm1(math.log1p(-layer.momentum) / parts)
        yield
    finally:
        for layer, momentum in zip(layers, momenta, strict=True):
            layer.momentum = momentum
