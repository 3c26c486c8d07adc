"""Which layer has which transposed Jacobian."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import prune

from retime.foundations.arguments import AtLeast, Below, checked
from retime.mechanisms.scan.jacobians.sparse import CsrPattern, SparseJacobian

# What is known about one layer: the pattern of its transposed Jacobian and how an iteration fills it.


class UnknownJacobian(ValueError):  # noqa: N818 -- an answer, not a failure: callers fall back
    """No analytic Jacobian for this layer or input shape; the text says why."""


class LayerJacobian(ABC):
    """The transposed Jacobian ``(dy/dx)^T`` of a layer, for one shape of its input.

    Attributes:
        pattern: inputs by outputs of one sample, both flattened in row-major order. Built once.
        is_identity: the values never change and are ones on the diagonal (flatten): a scan leaves the layer out.
    """

    pattern: CsrPattern
    is_identity = False

    def run(self, layer: nn.Module, inputs: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Call the layer on ``(B, ...)``; its outputs, and what `values` needs of this iteration."""
        outputs = layer(inputs)
        assert isinstance(outputs, Tensor)
        return outputs, self.saved(layer, inputs)

    def saved(self, layer: nn.Module, inputs: Tensor) -> tuple[Tensor, ...]:
        """The tensors that `values` reads."""
        return ()

    @abstractmethod
    def values(self, *saved: Tensor) -> Tensor:
        """The entries' values ``(entries, S)``; S is 1 if they are the same for all samples."""

    def still_fits(self, layer: nn.Module) -> bool:
        """Return whether the pattern is still right; it is not once the layer has been pruned further."""
        return True

    def move(self, device: torch.device) -> None:
        """Put the pattern, and what else was built once, on the device of the layer."""
        self.pattern = self.pattern.to(device)
        vars(self).update({name: one.to(device) for name, one in vars(self).items() if isinstance(one, Tensor)})


# Which inputs the windows of a convolution or pooling cover, in any number of dimensions.
#
# Legend: N spatial dimensions, P output positions of one plane, T places (taps) of one window.


@dataclass(frozen=True)
class Windows:
    """Sliding windows over one plane; taps and positions both in row-major order.

    Attributes:
        inside: bool ``(T, P)``, whether a tap of a window lies on the plane and not on its padding.
        place: int64 ``(T, P)``, the flat index on the plane; any number where ``inside`` is false.
    """

    inside: Tensor
    place: Tensor


Sizes = Sequence[int]
"""A number for each of the N dimensions."""


def windows_of(
    sizes: Sizes, positions: Sizes, kernel: Sizes, stride: Sizes, padding: Sizes, dilation: Sizes
) -> Windows:
    """All windows over a plane; ``padding`` is what lies before the first element."""
    along = []
    for size, count, taps, step, before, apart in zip(sizes, positions, kernel, stride, padding, dilation, strict=True):
        at = torch.arange(count) * step - before + torch.arange(taps)[:, None] * apart
        along.append((at, (at >= 0) & (at < size)))
    return _crossed(sizes, along)


def _crossed(sizes: Sizes, along: Sequence[tuple[Tensor, Tensor]]) -> Windows:
    """Windows from those of each dimension, ``(taps, positions)``: the index of a tap, and whether it is inside."""
    inside, place = torch.ones(1, 1, dtype=torch.bool), torch.zeros(1, 1, dtype=torch.long)
    for size, (at, here) in zip(sizes, along, strict=True):
        inside = (inside[:, None, :, None] & here[None, :, None, :]).flatten(2).flatten(0, 1)
        place = (place[:, None, :, None] * size + at[None, :, None, :]).flatten(2).flatten(0, 1)
    return Windows(inside, place)


def per_dimension(value: int | Sequence[int], dimensions: int) -> tuple[int, ...]:
    """A layer's setting as one number a dimension: 3 becomes ``(3, 3)``.

    Raises:
        ValueError: neither one number nor one a dimension.
    """
    values = (value,) * dimensions if isinstance(value, int) else tuple(value)
    if len(values) == 1:
        values *= dimensions
    if len(values) != dimensions:
        raise ValueError(f"{value} must be one number or {dimensions} of them")
    return values


# The transposed Jacobian of a convolution of any size, stride, padding, dilation and groups.
#
# Wang et al. 2020, appendix D.1 (algorithms 2 to 4), gives it for 3x3 filters with padding 1. There, `indptr` counts
# six entries a row and output channel at the top and bottom edge and leaves explicit zeros at the left and right one;
# here those places are no entries, which is what Table 1's 0.99157 counts.

Convolution = nn.Conv1d | nn.Conv2d | nn.Conv3d


class WeightJacobian(LayerJacobian):
    """Its values are weights, so that all samples share them; weights that are pruned away are no entries."""

    _mask: Tensor | None

    def saved(self, layer: nn.Module, inputs: Tensor) -> tuple[Tensor, ...]:
        assert isinstance(layer.weight, Tensor)
        return (layer.weight.detach(),)

    def still_fits(self, layer: nn.Module) -> bool:
        one, other = self._mask, mask_of(layer)
        if one is None or other is None:
            return one is other
        return one.device == other.device and torch.equal(one, other)


class ConvolutionJacobian(WeightJacobian):
    """Entry (input c, y; output o, x) holds ``weight[o, c, tap]`` for the tap of window x that lies on y.

    Args:
        layer: a plain ``nn.Conv1d``, ``Conv2d`` or ``Conv3d``.
        input_shape: ``(channels, *sizes)`` of one sample.

    Raises:
        UnknownJacobian: no channel dimension, another number of channels, or padding with something else than zeros.
    """

    def __init__(self, layer: Convolution, input_shape: torch.Size) -> None:
        dimensions = len(layer.kernel_size)
        if len(input_shape) != dimensions + 1 or input_shape[0] != layer.in_channels:
            raise UnknownJacobian(
                f"input {tuple(input_shape)} a sample, but it takes ({layer.in_channels}, {'size, ' * dimensions})"
            )
        if layer.padding_mode != "zeros":
            raise UnknownJacobian(f"padding_mode={layer.padding_mode!r}: only 'zeros' is known")
        windows = _convolution_windows(layer, input_shape[1:])
        self._mask = mask_of(layer)
        kept = torch.ones(layer.weight.shape, dtype=torch.bool) if self._mask is None else self._mask.cpu() != 0
        # one line a weight: output channel, input channel of the group, tap
        out_channel, in_channel, tap = kept.flatten(2).nonzero().unbind(1)
        in_channel = in_channel + out_channel // (layer.out_channels // layer.groups) * kept.shape[1]
        inside = windows.inside[tap]
        plane, positions = input_shape[1:].numel(), windows.inside.shape[1]
        row_of = (windows.place[tap] + in_channel[:, None] * plane)[inside]
        column_of = (torch.arange(positions) + out_channel[:, None] * positions)[inside]
        weight_of = kept.flatten().nonzero().expand(-1, positions)[inside]
        rows, columns = input_shape.numel(), layer.out_channels * positions
        self.pattern, order = CsrPattern.from_coordinates(rows, columns, row_of, column_of)
        self._weight_of = weight_of[order]

    def values(self, *saved: Tensor) -> Tensor:
        (weight,) = saved
        return weight.reshape(-1).index_select(0, self._weight_of)[:, None]


def _convolution_windows(layer: Convolution, sizes: torch.Size) -> Windows:
    """The windows over an input of these spatial sizes."""
    count = len(sizes)
    kernel, stride, dilation = (per_dimension(one, count) for one in (layer.kernel_size, layer.stride, layer.dilation))
    if layer.padding == "same":  # which torch takes with stride 1 only
        padding = tuple(d * (k - 1) // 2 for d, k in zip(dilation, kernel, strict=True))
        return windows_of(sizes, sizes, kernel, stride, padding, dilation)
    padding = (0,) * count if isinstance(layer.padding, str) else per_dimension(layer.padding, count)
    positions = _output_sizes(sizes, kernel, stride, padding, dilation)
    return windows_of(sizes, positions, kernel, stride, padding, dilation)


def mask_of(layer: nn.Module) -> Tensor | None:
    """The mask by which `torch.nn.utils.prune` prunes ``layer.weight``, or None."""
    mask = getattr(layer, "weight_mask", None)
    return mask.detach().clone() if isinstance(mask, Tensor) else None


# The transposed Jacobians of max-pooling and of average pooling, plain or adaptive.
#
# Legend: c channels, P output positions of a plane, B batch.

MaxPool = nn.MaxPool1d | nn.MaxPool2d | nn.MaxPool3d
AveragePool = nn.AvgPool1d | nn.AvgPool2d | nn.AvgPool3d
AdaptiveAveragePool = nn.AdaptiveAvgPool1d | nn.AdaptiveAvgPool2d | nn.AdaptiveAvgPool3d
_MAX_POOLS = {1: F.max_pool1d, 2: F.max_pool2d, 3: F.max_pool3d}


class MaxPoolJacobian(LayerJacobian):
    """Entries at all inputs of each window, one of them 1: the one that torch picks.

    The paper's routine (appendix D.3, algorithms 8 to 10) stores the picked ones only, so that its pattern changes with
    the input. Here the pattern is Table 1's, all that is not a guaranteed zero, and only values change.

    Raises:
        UnknownJacobian: no channel dimension, or the layer returns indices too.
    """

    def __init__(self, layer: MaxPool, input_shape: torch.Size) -> None:
        sizes = _spatial(layer, input_shape)
        if layer.return_indices:
            raise UnknownJacobian("return_indices=True: it has two outputs")
        self._options: dict[str, Any] = {
            name: getattr(layer, name) for name in ("kernel_size", "stride", "padding", "dilation", "ceil_mode")
        }
        kernel, stride, padding, dilation = (
            per_dimension(self._options[name], len(sizes)) for name in ("kernel_size", "stride", "padding", "dilation")
        )
        output = _output_sizes(sizes, kernel, stride, padding, dilation, layer.ceil_mode)
        windows = windows_of(sizes, output, kernel, stride, padding, dilation)
        self.pattern, entry = _planes(windows, input_shape)
        self._input_of_plane = windows.place[windows.inside].repeat(input_shape[0])[entry]

    def run(self, layer: nn.Module, inputs: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        outputs, picked = _MAX_POOLS[inputs.dim() - 2](inputs, **self._options, return_indices=True)
        return outputs, (picked, inputs.new_empty(0))

    def values(self, *saved: Tensor) -> Tensor:
        picked, like = saved
        of_entry = picked.flatten(1).t().index_select(0, self.pattern.indices)
        return (of_entry == self._input_of_plane[:, None]).to(like.dtype)


class AveragePoolJacobian(LayerJacobian):
    """Entries at all inputs of each window, all of them one over the divisor.

    Raises:
        UnknownJacobian: no channel dimension.
    """

    def __init__(self, layer: AveragePool | AdaptiveAveragePool, input_shape: torch.Size) -> None:
        sizes = _spatial(layer, input_shape)
        if isinstance(layer, AdaptiveAveragePool):
            windows = _adaptive(sizes, layer.output_size)
            divisor = windows.inside.sum(0)
        else:
            count = len(sizes)
            kernel, stride, padding = (
                per_dimension(value, count) for value in (layer.kernel_size, layer.stride, layer.padding)
            )
            ones = (1,) * count
            output = _output_sizes(sizes, kernel, stride, padding, ones, layer.ceil_mode)
            windows = windows_of(sizes, output, kernel, stride, padding, ones)
            divisor = windows.inside.sum(0)
            if layer.count_include_pad:
                # padding counts, what ceil_mode adds beyond it does not
                padded = tuple(size + 2 * pad for size, pad in zip(sizes, padding, strict=True))
                divisor = windows_of(padded, output, kernel, stride, (0,) * count, ones).inside.sum(0)
            override = getattr(layer, "divisor_override", None)
            if override:
                divisor = torch.full_like(divisor, override)
        self.pattern, _ = _planes(windows, input_shape)
        self._weight = (1 / divisor.double())[self.pattern.indices % divisor.numel()][:, None]

    def saved(self, layer: nn.Module, inputs: Tensor) -> tuple[Tensor, ...]:
        return (inputs.new_empty(0),)

    def values(self, *saved: Tensor) -> Tensor:
        (like,) = saved
        return self._weight.to(like.dtype)


def _spatial(layer: nn.Module, input_shape: torch.Size) -> tuple[int, ...]:
    dimensions = int(type(layer).__name__.removesuffix("d")[-1])
    if len(input_shape) != dimensions + 1:
        raise UnknownJacobian(f"input {tuple(input_shape)} a sample, but it takes (channels, {'size, ' * dimensions})")
    return tuple(input_shape[1:])


def _output_sizes(
    sizes: Sizes, kernel: Sizes, stride: Sizes, padding: Sizes, dilation: Sizes, ceil_mode: bool = False
) -> tuple[int, ...]:
    """Positions along each dimension; with `ceil_mode` a window may hang over, but must start inside or on padding."""
    counts = []
    for size, k, s, pad, d in zip(sizes, kernel, stride, padding, dilation, strict=True):
        room = size + 2 * pad - d * (k - 1) - 1
        count = (math.ceil(room / s) if ceil_mode else room // s) + 1
        if ceil_mode and (count - 1) * s >= size + pad:
            count -= 1
        counts.append(count)
    return tuple(counts)


def _planes(windows: Windows, input_shape: torch.Size) -> tuple[CsrPattern, Tensor]:
    """The pattern of the same windows on every channel, and the order of its entries (see `from_coordinates`)."""
    channels, plane = input_shape[0], input_shape[1:].numel()
    positions = windows.inside.shape[1]
    channel = torch.arange(channels)[:, None]
    row_of = (windows.place[windows.inside] + channel * plane).flatten()
    column_of = torch.arange(positions).expand_as(windows.place)[windows.inside] + channel * positions
    return CsrPattern.from_coordinates(channels * plane, channels * positions, row_of, column_of.flatten())


def _adaptive(sizes: Sizes, wanted: Any) -> Windows:
    """Windows from floor(i * size / out) to ceil((i + 1) * size / out), exclusive."""
    outputs = (wanted,) * len(sizes) if isinstance(wanted, int) else tuple(wanted)
    along = []
    for size, given in zip(sizes, outputs, strict=True):
        out = size if given is None else given
        start = torch.arange(out) * size // out
        stop = -(-(torch.arange(1, out + 1) * size) // out)
        at = start + torch.arange(int((stop - start).max()))[:, None]
        along.append((at, at < stop))
    return _crossed(sizes, along)


# The transposed Jacobians of linear layers, elementwise functions and reshapes.


class LinearJacobian(WeightJacobian):
    """The transposed weight matrix.

    Raises:
        UnknownJacobian: the input of a sample is not one vector of ``in_features`` numbers.
    """

    def __init__(self, layer: nn.Linear, input_shape: torch.Size) -> None:
        if tuple(input_shape) != (layer.in_features,):
            raise UnknownJacobian(f"input {tuple(input_shape)} a sample, but it takes ({layer.in_features},)")
        self.pattern = CsrPattern.full(layer.in_features, layer.out_features)
        self._mask = mask_of(layer)
        self._kept: Tensor | None = None
        if self._mask is not None:
            kept = self._mask.cpu().t().reshape(-1) != 0
            self.pattern, self._kept = self.pattern.only(kept), kept.nonzero()[:, 0]

    def values(self, *saved: Tensor) -> Tensor:
        (weight,) = saved
        flat = weight.t().reshape(-1, 1)
        return flat if self._kept is None else flat.index_select(0, self._kept)


class ReLUJacobian(LayerJacobian):
    """A diagonal of ones where the input is positive (appendix D.2, algorithms 5 to 7); NaN passes as in autograd."""

    def __init__(self, layer: nn.Module, input_shape: torch.Size) -> None:
        self.pattern = CsrPattern.diagonal(input_shape.numel())

    def saved(self, layer: nn.Module, inputs: Tensor) -> tuple[Tensor, ...]:
        return (inputs,)

    def values(self, *saved: Tensor) -> Tensor:
        (inputs,) = saved
        return (~(inputs.flatten(1) <= 0)).t().to(inputs.dtype)


class ElementwiseJacobian(LayerJacobian):
    """A diagonal: the derivative of any function of single elements, by autograd's own formula in one call.

    Args:
        layer: computes every output from the input at the same place (dropout too: its mask is that of the run).
        input_shape: of one sample.

    Raises:
        UnknownJacobian: the layer works in place, so that autograd cannot be asked.
    """

    def __init__(self, layer: nn.Module, input_shape: torch.Size) -> None:
        if getattr(layer, "inplace", False):
            raise UnknownJacobian("it works in place; set inplace=False")
        self.pattern = CsrPattern.diagonal(input_shape.numel())

    def run(self, layer: nn.Module, inputs: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        with torch.enable_grad():
            leaf = inputs.detach().requires_grad_()
            outputs = layer(leaf)
            (derivative,) = torch.autograd.grad(outputs, leaf, torch.ones_like(outputs))
        return outputs.detach(), (derivative,)

    def values(self, *saved: Tensor) -> Tensor:
        (derivative,) = saved
        return derivative.flatten(1).t()


class ReshapeJacobian(LayerJacobian):
    """The identity: flatten and unflatten of one sample's dimensions move nothing in row-major order.

    Raises:
        UnknownJacobian: the batch dimension takes part.
    """

    is_identity = True

    def __init__(self, layer: nn.Module, input_shape: torch.Size) -> None:
        dimension = layer.start_dim if isinstance(layer, nn.Flatten) else getattr(layer, "dim", 1)
        if isinstance(layer, nn.Flatten | nn.Unflatten) and (not isinstance(dimension, int) or dimension < 1):
            raise UnknownJacobian(f"it reshapes from dimension {dimension}, and 0 is the batch; use 1 or more")
        self.pattern = CsrPattern.diagonal(input_shape.numel())

    def saved(self, layer: nn.Module, inputs: Tensor) -> tuple[Tensor, ...]:
        return (inputs.new_ones(()),)

    def values(self, *saved: Tensor) -> Tensor:
        (one,) = saved
        return one.expand(self.pattern.entries, 1)


# Magnitude pruning of See et al. 2016, which the paper's section 4.3 prunes VGG-11 with.

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


Builder = Callable[[Any, torch.Size], LayerJacobian]

_ELEMENTWISE = (
    *(nn.CELU, nn.ELU, nn.GELU, nn.Hardshrink, nn.Hardsigmoid, nn.Hardswish, nn.Hardtanh, nn.LeakyReLU, nn.LogSigmoid),
    *(nn.Mish, nn.ReLU6, nn.SELU, nn.Sigmoid, nn.SiLU, nn.Softplus, nn.Softshrink, nn.Softsign, nn.Tanh),
    *(nn.Tanhshrink, nn.Threshold, nn.Dropout),
)
_BUILDERS: dict[type[nn.Module], Builder] = {
    **dict.fromkeys((nn.Conv1d, nn.Conv2d, nn.Conv3d), ConvolutionJacobian),
    **dict.fromkeys((nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d), MaxPoolJacobian),
    **dict.fromkeys((nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d), AveragePoolJacobian),
    **dict.fromkeys((nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d), AveragePoolJacobian),
    **dict.fromkeys(_ELEMENTWISE, ElementwiseJacobian),
    **dict.fromkeys((nn.Flatten, nn.Unflatten, nn.Identity), ReshapeJacobian),
    nn.Linear: LinearJacobian,
    nn.ReLU: ReLUJacobian,
}


@checked
def jacobian_of(
    layer: nn.Module, input_shape: tuple[int, ...], device: torch.device | str | None = None
) -> LayerJacobian:
    """The transposed Jacobian of ``layer`` for inputs of ``input_shape`` a sample (no batch dimension).

    Patterns are built here, once; they lie on ``device`` (default: the CPU). Layers are known by their exact type, as
    a subclass may compute something else.

    Raises:
        UnknownJacobian: this layer, or this layer with these settings, has no analytic Jacobian here.
        ValueError: a size below 1.
    """
    if any(isinstance(size, bool) or not isinstance(size, int) or size < 1 for size in input_shape):
        raise ValueError(f"input_shape={tuple(input_shape)}: give whole numbers of 1 or more")
    builder = _BUILDERS.get(type(layer))
    if builder is None:
        raise UnknownJacobian(f"{type(layer).__name__} has no analytic Jacobian here")
    try:
        jacobian = builder(layer, torch.Size(input_shape))
    except UnknownJacobian as reason:
        raise UnknownJacobian(f"{type(layer).__name__}: {reason}") from None
    if device is not None:
        jacobian.move(torch.device(device))
    return jacobian


@checked
def transposed_jacobian(layer: nn.Module, inputs: Tensor) -> tuple[Tensor, SparseJacobian]:
    """Run ``layer`` on ``inputs`` ``(B, ...)``: its outputs and the transposed Jacobians of all samples.

    Raises:
        UnknownJacobian: as for `jacobian_of`.
    """
    jacobian = jacobian_of(layer, inputs.shape[1:], inputs.device)
    outputs, saved = jacobian.run(layer, inputs)
    return outputs, SparseJacobian(jacobian.pattern, jacobian.values(*saved))
