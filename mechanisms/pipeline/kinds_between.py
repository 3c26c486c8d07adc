"""What goes between the layers of a pipeline: what cannot, and noise in it, to see what is made of unlike samples."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence
from torch.utils.checkpoint import CheckpointFunction

from retime.foundations.torch_private import tree_leaves
from retime.mechanisms.pipeline.errors import PipelineError
from retime.mechanisms.pipeline.loss_head import Recorder
from retime.mechanisms.pipeline.values import replaced_tensors, tensors_in_order

__all__ = ["LayerResults", "refuse_kinds"]

_STRONGEST = 4.0
"""Noise of the last sample, beside what a layer gives; it grows from the first, so that micro-batches become unlike."""


def refuse_kinds(name: str, value: Any) -> None:
    """Raise PipelineError if a layer takes or gives, in ``value``, what cannot be sent."""
    for leaf in tree_leaves(value, is_leaf=lambda one: isinstance(one, PackedSequence)):
        if isinstance(leaf, PackedSequence):
            raise PipelineError(
                f"{name} takes or gives a PackedSequence, whose shape depends on how long its sequences are: let "
                "padded sequences go between the layers, and pack them inside of a layer"
            )
        if isinstance(leaf, Tensor) and (leaf.is_nested or leaf.layout != torch.strided):
            what = "nested" if leaf.is_nested else "sparse"
            raise PipelineError(
                f"{name} takes or gives a {what} tensor, which cannot go between the layers of a pipeline: let dense "
                "ones (build nn.TransformerEncoder with enable_nested_tensor=False)"
            )


def _is_checkpointed_reentrantly() -> bool:
    """Whether a reentrant checkpoint has called what runs: there no tensor has a graph, and none can get one."""
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_code is not CheckpointFunction.forward.__code__:
        frame = frame.f_back
    return frame is not None


class LayerResults:
    """A visitor that looks at what goes between the layers, and adds noise to what they return if it is asked to.

    Args:
        names: of the layers.

    Attributes:
        low_precision: they have returned numbers of 16 bits.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self._names, self.low_precision = names, False
        self._recorder: Recorder | None = None
        self._samples: tuple[int, int, int] | None = None
        self._noise: str | None = None
        self._axes: dict[tuple[int, int], set[int]] = {}  # that may run over samples, by layer and tensor

    @property
    def can_have_noise(self) -> bool:
        """Whether layers return anything that has a dimension of samples."""
        return any(self._axes.values())

    def tells(self, recorder: Recorder | None) -> None:
        """From now on a recorder is told what layers return."""
        self._recorder = recorder

    @contextmanager
    def noisy(self, noise: str | None) -> Iterator[None]:
        """Inside, outputs of layers have noise: ``"added"``, or ``"multiplied"``, which keeps signs and bounds."""
        self._noise = noise
        try:
            yield
        finally:
            self._noise = None

    @contextmanager
    def samples(self, first: int, count: int, whole: int) -> Iterator[None]:
        """Inside, a step runs on samples of the first batch, the same number ``first`` there in all runs."""
        self._samples = first, count, whole
        try:
            yield
        finally:
            self._samples = None

    def before(self, layer: int, args: Any, kwargs: Any) -> None:
        name = repr(self._names[layer])
        refuse_kinds(name, (args, kwargs))
        if _is_checkpointed_reentrantly():
            raise PipelineError(
                f"{name} runs inside of torch.utils.checkpoint.checkpoint(..., use_reentrant=True), torch's default, "
                "which cannot be stopped between the layers: give it use_reentrant=False (in transformers "
                "gradient_checkpointing_enable({'use_reentrant': False})), or call it in the layer's own forward"
            )

    def is_here(self, layer: int) -> bool:
        return True

    def instead(self, layer: int, args: Any, kwargs: Any) -> Any:
        raise AssertionError

    def after(self, layer: int, output: Any) -> Any:
        refuse_kinds(repr(self._names[layer]), output)
        tensors = tensors_in_order(output)
        self.low_precision |= any(tensor.dtype in (torch.bfloat16, torch.float16) for tensor in tensors)
        if self._recorder is not None:
            for tensor in tensors:
                self._recorder.at_edge(tensor)
        if self._samples is None:
            return output
        changed = {}
        for number, tensor in enumerate(tensors):
            key = layer, number
            if self._noise is None:
                axes = {axis for axis, length in enumerate(tensor.shape) if length == self._samples[1]}
                self._axes[key] = axes & self._axes.get(key, axes) if tensor.is_floating_point() else set()
            elif self._axes.get(key):
                changed[number] = self._with_noise(tensor, key, min(self._axes[key]))
        return replaced_tensors(output, changed) if changed else output

    def _with_noise(self, tensor: Tensor, key: tuple[int, int], axis: int) -> Tensor:
        """Each sample's noise is the same in whichever part of the batch it is."""
        assert self._samples is not None
        first, _, whole = self._samples
        rows = []
        for position, row in enumerate(tensor.movedim(axis, 0), first):
            strength = (position + 1) / whole
            drawn = torch.Generator().manual_seed(hash((*key, position)) % 2**63)
            if self._noise == "added":
                size = row.detach().float().square().mean().sqrt().nan_to_num(1.0).clamp(min=1.0)
                noise = torch.randn(row.shape, generator=drawn).to(row.device) * size * (_STRONGEST * strength)
                rows.append(row + noise.to(row.dtype))
            else:
                noise = torch.rand(row.shape, generator=drawn).to(row.device)
                rows.append(row * (1 - 0.8 * strength * noise).to(row.dtype))
        return torch.stack(rows).movedim(0, axis)
