"""Magnitude pruning of See et al. 2016, which the paper's section 4.3 prunes VGG-11 with."""

from __future__ import annotations

from typing import Annotated

from torch import nn
from torch.nn.utils import prune

from retime.foundations.arguments import AtLeast, Below, checked

PRUNED = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.Linear)


@checked
def prune_class_blind(model: nn.Module, share: Annotated[float, AtLeast(0), Below(1)]) -> dict[str, float]:
    """Prune away the ``share`` of all convolution and linear weights that is smallest in magnitude, all layers alike.

    *Class-blind*: one threshold for the whole model, whatever the layer (the scheme that See et al. find best). Biases
    stay. The masks are those of `torch.nn.utils.prune`, so retraining keeps pruned weights at zero and `prune.remove`
    makes them plain zeros.

    Returns:
        The share of weights kept, a layer.

    Raises:
        ValueError: ``share`` is not between 0 and 1, or there is nothing to prune.
    """
    layers = _layers(model)
    weights = [(layer, "weight") for layer in layers.values()]
    prune.global_unstructured(weights, pruning_method=prune.L1Unstructured, amount=float(share))
    return _kept(layers)


@checked
def prune_class_uniform(model: nn.Module, share: Annotated[float, AtLeast(0), Below(1)]) -> dict[str, float]:
    """Prune away the smallest ``share`` of each layer's own weights (See et al.'s *class-uniform*); else as above."""
    layers = _layers(model)
    for layer in layers.values():
        prune.l1_unstructured(layer, "weight", amount=float(share))  # type: ignore[no-untyped-call]
    return _kept(layers)


def _layers(model: nn.Module) -> dict[str, nn.Module]:
    layers: dict[str, nn.Module] = {n: layer for n, layer in model.named_modules() if isinstance(layer, PRUNED)}
    if not layers:
        raise ValueError(f"{type(model).__name__} has no convolution or linear layer to prune")
    return layers


def _kept(layers: dict[str, nn.Module]) -> dict[str, float]:
    return {name: float(layer.get_buffer("weight_mask").float().mean()) for name, layer in layers.items()}
