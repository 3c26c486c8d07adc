"""`ScanSequential`: an ``nn.Sequential`` whose backward pass is a scan over sparse Jacobians (BPPSA).

Legend: B batch, x_k the output of layer k (x_0 the input), J_k the transposed Jacobian of layer k.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Annotated, Any

import torch
from torch import Tensor, nn
from torch.nn.utils.prune import BasePruningMethod

from retime.foundations.arguments import AtLeast, checked
from retime.foundations.messages import Report, warn_no_effect
from retime.foundations.torch_private.nn_and_optim import backward_hooks, forward_hooks, forward_pre_hooks
from retime.mechanisms.scan import JacobianScan, LayerJacobian, UnknownJacobian, jacobian_of

MOST_JACOBIANS = 1_000
"""Patterns that a model keeps, one a layer and shape."""


@dataclass
class ScanReport(Report):
    """Report on what the last forward pass with gradients did. Layers are named as in ``named_modules()``."""

    scanned: list[str] = field(default_factory=list)
    """Layers whose output gradients the scan computes."""
    plain: dict[str, str] = field(default_factory=dict)
    """Layers in plain autograd, each with the reason; a scan runs before and after them."""
    scans: int = 0
    """Scans of the last backward pass."""
    levels: int | None = None
    """Up-sweep levels asked for; None for all."""

    def what_was_done(self) -> list[str]:
        levels = "all" if self.levels is None else self.levels
        return [f"parallel-scan backward: {len(self.scanned)} layers in {self.scans} scans, up-sweep levels: {levels}"]

    def what_stayed_plain(self) -> list[str]:
        return [f"layer {name}: {reason}" for name, reason in self.plain.items()]


class ScanSequential(nn.Sequential):
    """A chain of layers whose output gradients come from the modified Blelloch scan (Wang et al. 2020, algorithm 1).

    Convolutions, linear layers, poolings, elementwise functions, dropout and flatten are supported; their Jacobians are
    exact and sparse, so gradients equal autograd's up to rounding, as sums have another order. Weight gradients stay
    autograd's own. Any other layer, and one with hooks or a ``forward`` of its own on the instance, runs plain
    between two scans, and one `NoEffectWarning` names it. Constructor, ``state_dict`` and indices are
    ``nn.Sequential``'s. ``create_graph=True`` is refused: no double backward.

    The scan does more arithmetic than back-propagation in fewer dependent steps: it pays on many parallel workers,
    not on a few CPU cores.

    Args:
        args: layers, or one OrderedDict of them, as for ``nn.Sequential``.
        levels: up-sweep levels of the scan; 2 is the paper's choice for VGG-11 (section 5.3), None the whole algorithm,
            0 back-propagation over explicit Jacobians.

    Raises:
        TypeError, ValueError: ``levels`` is no whole number, or negative.
    """

    @checked
    def __init__(self, *args: Any, levels: Annotated[int, AtLeast(0)] | None = 2) -> None:
        super().__init__(*args)
        self.levels = levels
        self._jacobians: dict[tuple[Any, ...], LayerJacobian] = {}
        self._scans: dict[tuple[int, ...], JacobianScan] = {}
        self._report = ScanReport(levels=levels)
        self._warned = False

    @classmethod
    def of(cls, model: nn.Sequential, levels: int | None = 2) -> ScanSequential:
        """The same layers, shared with ``model``, under the same names.

        Raises:
            TypeError: ``model`` has a ``forward`` of its own, or hooks.
        """
        if type(model).forward not in (nn.Sequential.forward, cls.forward) or "forward" in vars(model):
            raise TypeError(f"ScanSequential.of: {type(model).__name__} has a forward of its own, which would not run")
        if _altered(model):
            raise TypeError("ScanSequential.of: the model has hooks, which would not run: register them on the result")
        sequential = cls(levels=levels)
        for name, layer in _layers(model):
            sequential.add_module(name, layer)
        return sequential.train(model.training)

    def forward(self, input: Tensor) -> Tensor:
        """Run ``(B, ...)`` through all layers, as ``nn.Sequential`` does."""
        if not torch.is_grad_enabled():
            output = super().forward(input)  # type: ignore[no-untyped-call]
            assert isinstance(output, Tensor)
            return output
        self._report = ScanReport(levels=self.levels)
        inputs, segment = input, _Segment(input)
        for name, layer in _leaves(self):
            jacobian = self._jacobian(name, layer, inputs)
            if isinstance(jacobian, str):
                self._report.plain[name] = jacobian
                inputs = layer(self._close(segment))
                segment = _Segment(inputs)
            else:
                self._report.scanned.append(name)
                inputs = segment.add(layer, jacobian, inputs)
        output = self._close(segment)
        self._warn()
        return output

    def report(self) -> ScanReport:
        """Report on what the last forward pass with gradients did."""
        return self._report

    def __getstate__(self) -> dict[str, Any]:
        state = super().__getstate__()  # type: ignore[no-untyped-call]
        return {**state, "_jacobians": {}, "_scans": {}}

    def _jacobian(self, name: str, layer: nn.Module, inputs: Tensor) -> LayerJacobian | str:
        """Return the Jacobian of a layer at this input shape, or the reason why it runs plain."""
        if not isinstance(inputs, Tensor) or inputs.dim() < 2:
            return "its input is no tensor with a dimension beside the batch"
        if altered := _altered(layer):
            return altered
        if not inputs.is_floating_point():
            return f"its input is {inputs.dtype}"
        key = (name, type(layer), _settings(layer), inputs.shape[1:], inputs.device)
        jacobian = self._jacobians.get(key)
        if jacobian is None or not jacobian.still_fits(layer):
            try:
                jacobian = jacobian_of(layer, inputs.shape[1:], inputs.device)
            except UnknownJacobian as reason:
                return str(reason)
            if len(self._jacobians) >= MOST_JACOBIANS:  # inputs of ever new shapes
                self._jacobians.clear()
            self._jacobians[key] = jacobian
            self._scans.clear()
        return jacobian

    def _close(self, segment: _Segment) -> Tensor:
        """The segment's output, with a gradient that comes from one scan."""
        wanted = segment.wanted() if segment.layers else []
        if not wanted:
            return segment.outputs[-1]
        self._report.scans += 1
        first = wanted[0]
        layers = [each for each in segment.layers[first:] if not each[0].is_identity]
        key = tuple(id(jacobian) for jacobian, _ in layers)
        if key not in self._scans:
            self._scans[key] = JacobianScan([jacobian.pattern for jacobian, _ in reversed(layers)], self.levels)
        inputs = (segment.outputs[k] for k in wanted)
        output = _ScanBackward.apply(segment, wanted, self._scans[key], *inputs)  # type: ignore[no-untyped-call]
        assert isinstance(output, Tensor)
        return output

    def _warn(self) -> None:
        if self._report.plain and not self._warned:
            self._warned = True
            warn_no_effect(
                f"{len(self._report.plain)} of {len(self._report.plain) + len(self._report.scanned)} layers of "
                f"{type(self).__name__} run in plain autograd: "
                + "; ".join(f"{name}: {reason}" for name, reason in self._report.plain.items())
                + ". Replace them by layers with a known Jacobian, or put them outside."
            )


class _Segment:
    """Known layers in a row. `outputs` are x_0 .. x_n; a gradient may enter each of them on its own."""

    def __init__(self, inputs: Tensor) -> None:
        self.outputs = [inputs]
        self.layers: list[tuple[LayerJacobian, tuple[Tensor, ...]]] = []

    def add(self, layer: nn.Module, jacobian: LayerJacobian, inputs: Tensor) -> Tensor:
        """Run a layer. Its output hangs on its parameters alone: the scan stands in for the way to its input."""
        outputs, saved = jacobian.run(layer, inputs.detach())
        self.outputs.append(outputs)
        self.layers.append((jacobian, saved))
        return outputs

    def wanted(self) -> list[int]:
        """The k for which somebody needs the gradient of x_k."""
        return [k for k, output in enumerate(self.outputs) if output.requires_grad]


class _ScanBackward(torch.autograd.Function):
    """x_n forward; backward the gradients of all wanted x_k by one scan."""

    @staticmethod
    def forward(ctx: Any, segment: _Segment, wanted: list[int], scan: JacobianScan, *inputs: Tensor) -> Tensor:
        """``inputs`` are the x_k of ``wanted``, which require grad: their values are there already."""
        layers = segment.layers[wanted[0] :]
        ctx.scan, ctx.wanted = scan, wanted
        ctx.jacobians = [jacobian for jacobian, _ in layers]
        ctx.counts = [len(saved) for _, saved in layers]
        ctx.shapes = [(output.shape, output.dtype) for output in segment.outputs]
        ctx.save_for_backward(*(tensor for _, saved in layers for tensor in saved))
        return segment.outputs[-1].detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """The gradient of x_n in, those of the wanted x_k out.

        Raises:
            RuntimeError: ``create_graph=True``.
        """
        if torch.is_grad_enabled():
            raise RuntimeError(
                "ScanSequential has no double backward: call backward without create_graph=True, or use nn.Sequential"
            )
        (gradient,) = gradients
        saved = iter(ctx.saved_tensors)
        dtype = gradient.dtype
        values = []
        for jacobian, count in zip(ctx.jacobians, ctx.counts, strict=True):
            tensors = [next(saved) for _ in range(count)]
            if not jacobian.is_identity:
                values.append(jacobian.values(*tensors))
                dtype = torch.promote_types(dtype, values[-1].dtype)
        flat = gradient.flatten(1).t().to(dtype).contiguous()
        scanned = iter(ctx.scan(flat, [each.to(dtype).contiguous() for each in reversed(values)]))
        at: dict[int, Tensor] = {}
        current, last = next(scanned), len(ctx.shapes) - 1
        at[last] = current
        for back, jacobian in enumerate(reversed(ctx.jacobians), start=1):
            if not jacobian.is_identity:
                current = next(scanned)
            at[last - back] = current
        answers: list[Tensor | None] = [None, None, None]  # of a segment, numbers and a scan there is none
        for k in ctx.wanted:
            shape, wanted_dtype = ctx.shapes[k]
            answers.append(at[k].t().reshape(shape).to(wanted_dtype))
        return tuple(answers)


def _layers(model: nn.Sequential) -> list[tuple[str, nn.Module]]:
    """The layers in order, by name; one that is there twice is there under both names, as ``nn.Sequential`` runs it."""
    return [one for one in model.named_modules(remove_duplicate=False) if one[0] and "." not in one[0]]


def _leaves(model: nn.Sequential, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """The layers in order, with those of nested plain ``nn.Sequential`` that nobody altered in their place."""
    for name, layer in _layers(model):
        if type(layer) is nn.Sequential and not _altered(layer):
            yield from _leaves(layer, f"{prefix}{name}.")
        else:
            yield prefix + name, layer


def _settings(layer: nn.Module) -> tuple[tuple[str, str], ...]:
    """All that a layer is told beside its weights: another layer may take its place, or be told something else."""
    plain = {name: one for name, one in vars(layer).items() if name != "training" and not name.startswith("_")}
    return tuple((name, repr(one)) for name, one in plain.items() if isinstance(one, _SETTINGS))


_SETTINGS = (bool, int, float, str, tuple, list, type(None))


def _altered(layer: nn.Module) -> str | None:
    """Reason why a layer may do other things than its class; hooks that apply pruning masks to weights may stay."""
    if "forward" in vars(layer):
        return "its forward was replaced on the instance"
    pre = [hook for hook in forward_pre_hooks(layer).values() if not isinstance(hook, BasePruningMethod)]
    return "it has hooks" if pre or forward_hooks(layer) or any(backward_hooks(layer)) else None
