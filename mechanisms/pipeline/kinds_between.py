"""What cannot go between the layers of a pipeline: values that cannot be sent, calls that cannot be stopped there."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence
from torch.utils.checkpoint import CheckpointFunction

from retime.mechanisms.pipeline.errors import PipelineError
from retime.mechanisms.torch_private import tree_leaves

__all__ = ["KindsBetween", "refuse_kinds"]


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


class KindsBetween:
    """A visitor that looks at what goes between the layers, and changes nothing.

    Args:
        names: of the layers.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self._names = names

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
        return output
