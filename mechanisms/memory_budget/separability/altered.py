"""Other values for those that a step reads, or that modules give: what is true of a step is true with them too."""

from __future__ import annotations

import sys
import types
from collections.abc import Container, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from dis import opmap
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook

from retime.foundations.torch_private import tree_map, without_dispatch_modes

__all__ = ["ALTERATIONS", "Altered", "SampleNoise"]

Alteration = Literal["other", "low", "high"]
ALTERATIONS: tuple[Alteration, ...] = ("other", "low", "high")
_FAR = 1e9
_SHORTCUTS = ("transformers.masking_utils", "transformers.modeling_attn_mask_utils")
"""Modules that read whether a mask masks anything, and leave it out where it does not: that changes no result."""
_CALLERS = 24  # torch's own are in between
_MOST_SAMPLES = 1000


@dataclass
class Altered:
    """Stands in for the values that a step reads.

    Args:
        which: positions among all reads of those that are altered, and all that follow the last of them.
        how: ``"other"``: the other truth value, and a number that is one larger; ``"low"`` and ``"high"``: false or
            true, and a number far from any.
    """

    which: Container[int]
    last: int
    how: Alteration
    _position: int = -1
    _refused: BaseException | None = None

    @contextmanager
    def within_operation(self) -> Iterator[None]:
        """Around an operation of torch: one that raises an error after it has read a value has checked it."""
        before = self._position
        try:
            yield
        except Exception as error:
            if self._position > before:
                self._refused = error
            raise

    def checked(self, error: BaseException) -> bool:
        """Whether the step raised this because it checks values; otherwise it could not run on what it read."""
        return error is self._refused or _raised_by_step(error)

    def instead_of(self, value: Any) -> Any:
        """What the next read gives."""
        self._position += 1
        if (self._position not in self.which and self._position <= self.last) or _in_shortcut():
            return value
        return self._changed(value)

    def _changed(self, value: Any) -> Any:
        if isinstance(value, list):
            return [self._changed(one) for one in value]
        if isinstance(value, bool):
            return not value if self.how == "other" else self.how == "high"
        if isinstance(value, int):
            return {"other": value + 1, "low": 0, "high": value + 1000}[self.how]
        if isinstance(value, float):
            return {"other": value + 1, "low": -_FAR, "high": _FAR}[self.how]
        if hasattr(value, "dtype") and hasattr(value, "copy"):  # an array of NumPy
            return ~value if value.dtype == bool else value + {"other": 1, "low": -1000, "high": 1000}[self.how]
        return value


class SampleNoise:
    """Changes what modules with parameters give by noise of its size, and of 1 or more, drawn sample by sample.

    A model at its start gives nearly the same for all samples, and then any function of a batch looks like a mean.
    A sample gets the same noise in a batch and in a part of it.

    Attributes:
        names: numbers of the samples that run.
    """

    def __init__(self) -> None:
        self.names: Sequence[int] = ()
        self._calls = 0

    @contextmanager
    def of(self, names: Sequence[int]) -> Iterator[None]:
        """Around a run of the step on these samples."""
        self.names, self._calls = names, 0
        handle = register_module_forward_hook(self._after)
        try:
            yield
        finally:
            handle.remove()

    def _after(self, module: nn.Module, inputs: Any, output: Any) -> Any:
        return tree_map(self._changed, output) if any(True for _ in module.parameters(recurse=False)) else output

    def _changed(self, value: Any) -> Any:
        count = len(self.names)
        if not isinstance(value, Tensor) or not value.is_floating_point() or not value.numel():
            return value
        dimension = next((i for i, length in enumerate(value.shape[:2]) if length % count == 0), None)
        if dimension is None:
            return value
        self._calls += 1
        with without_dispatch_modes(), torch.no_grad():
            rows = value.detach().chunk(count, dimension)
            noise = [self._noise(name, row) for name, row in zip(self.names, rows, strict=True)]
            changed = torch.cat(noise, dimension)
        return (value + changed) * 0.5**0.5  # no larger from layer to layer

    def _noise(self, name: int, row: Tensor) -> Tensor:
        generator = torch.Generator().manual_seed(self._calls * _MOST_SAMPLES + name)
        noise = torch.randn(row.shape, generator=generator).to(row)
        return noise * row.square().mean().sqrt().clamp(min=1)


def _in_shortcut() -> bool:
    frame: types.FrameType | None = sys._getframe(1)
    for _ in range(_CALLERS):
        if frame is None:
            return False
        if frame.f_globals.get("__name__") in _SHORTCUTS:
            return True
        frame = frame.f_back
    return False


def _raised_by_step(error: BaseException) -> bool:
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    if trace is None:
        return False
    code: types.CodeType = trace.tb_frame.f_code
    module = str(trace.tb_frame.f_globals.get("__name__", ""))
    raised = code.co_code[trace.tb_lasti] in (opmap["RAISE_VARARGS"], opmap.get("RERAISE"))
    return raised and module.partition(".")[0] != "torch"
