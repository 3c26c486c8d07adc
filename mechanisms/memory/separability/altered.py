"""Other values for those that a step reads: what it computes must not depend on them."""

from __future__ import annotations

import sys
import types
from collections.abc import Container, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from dis import opmap
from typing import Any, Literal

__all__ = ["ALTERATIONS", "Altered"]

Alteration = Literal["other", "low", "high"]
ALTERATIONS: tuple[Alteration, ...] = ("other", "low", "high")
_FAR = 1e9
_SHORTCUTS = ("transformers.masking_utils", "transformers.modeling_attn_mask_utils")
"""Modules that read whether a mask masks anything, and leave it out where it does not: that changes no result."""
_CALLERS = 24  # torch's own are in between


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
