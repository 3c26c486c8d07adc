"""What the builders share: counting parameters, scaling widths, initial weights, checks of arguments."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn


def parameter_count(model: nn.Module) -> int:
    """Number of parameters of ``model``; a tied parameter counts once. Works on the meta device."""
    return sum(parameter.numel() for parameter in model.parameters())


def parameters_per_layer(model: nn.Module) -> float:
    """Average number of parameters of a layer: the horizontal axis of the optimizer-fusion paper's Figure 6.

    A *layer* is a module that holds parameters itself (not only through its children), so a convolution and its batch
    normalisation are two layers. A tied parameter belongs to the first module that holds it; a module left without
    any parameter of its own is no layer.

    Raises:
        ValueError: ``model`` has no parameters.
    """
    seen: set[int] = set()
    layer_count = 0
    for module in model.modules():
        own = {id(parameter) for parameter in module.parameters(recurse=False)} - seen
        layer_count += bool(own)
        seen |= own
    if layer_count == 0:
        raise ValueError(f"{type(model).__name__} has no parameters, so no average per layer")
    return parameter_count(model) / layer_count


def scaled(channels: int, width: float, divisor: int = 8) -> int:
    """``channels * width`` rounded to a multiple of ``divisor``, at least ``divisor``; unchanged at ``width == 1``.

    Rounding never takes away more than a tenth (the MobileNet family's rule), which matters for narrow layers.
    ValueError if ``width`` is not positive.
    """
    if width <= 0:
        raise ValueError(f"width={width} must be positive: it multiplies every layer's channels")
    if width == 1:
        return channels
    exact = channels * width
    rounded = max(divisor, int(exact + divisor / 2) // divisor * divisor)
    return rounded + divisor if rounded < 0.9 * exact else rounded


def choose(what: str, value: object, choices: Iterable[object]) -> None:
    """Raise a ValueError that repeats ``value`` and lists what is known, unless ``value`` is among it."""
    options = list(choices)
    if value not in options:
        raise ValueError(f"{what}={value!r} is unknown: choose one of {', '.join(repr(option) for option in options)}")


def initialise(model: nn.Module) -> None:
    """He initialisation of every convolution, N(0, 0.01) for every linear layer, zero biases (He et al. 2015).

    torch's default shrinks the signal by about a factor of 2.4 a layer, which leaves a deep chain without batch
    normalisation (VGG-19, say) with no gradient to measure anything on.
    """
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
        elif isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=0.01)
        else:
            continue
        if module.bias is not None:
            nn.init.zeros_(module.bias)
