"""The tasks of a training step.

Text form: a letter, a number, and two optional marks::

    F2       forward of layer 2
    F2@1     ... of micro-batch 1 (micro-batches count from 0)
    F2'      ... of the next training step (one apostrophe a step)
    F2@1'    both

Layers count from 1. For D and P the number is that of a tensor: tensor t is the output of layer t, tensor 0 the batch.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum

from retime.schedules.errors import ScheduleError

_FORM = re.compile(r"([A-Z])(\d+)(?:@(\d+))?('*)", re.ASCII)
_FORM_IN_WORDS = (
    "a task is one of the letters F O W S U D P and a number, then optionally @micro-batch and one ' for each step "
    "after the first, such as F2, W3@0 or F1'"
)


class Kind(StrEnum):
    """What a task does; the letter is its text form."""

    F = "F"
    """Forward of a layer."""
    O = "O"  # noqa: E741 - the papers' letter
    """Output gradient: the loss's gradient with respect to the layer's input."""
    W = "W"
    """Weight gradient of a layer."""
    S = "S"
    """Synchronisation of a layer's weight gradient between workers."""
    U = "U"
    """Update of a layer's parameters."""
    D = "D"
    """Offload of a tensor, device to host."""
    P = "P"
    """Prefetch of a tensor, host to device."""

    @property
    def words(self) -> str:
        """The kind in words, for legends."""
        return _WORDS[self]


_WORDS = {
    Kind.F: "forward",
    Kind.O: "output gradient",
    Kind.W: "weight gradient",
    Kind.S: "synchronisation",
    Kind.U: "update",
    Kind.D: "offload",
    Kind.P: "prefetch",
}


@dataclass(frozen=True, order=True)
class Task:
    """One task of a training step; ``str()`` gives the text form and :meth:`parse` reads it back.

    Args:
        kind: what is done.
        layer: which layer, from 1; for D and P which tensor, from 0 (tensor t is the output of layer t).
        micro_batch: which micro-batch, from 0; ``None`` for the whole batch.
        step: which training step, from 0: ``F1'`` is step 1.

    Raises:
        ScheduleError: when a number is out of range.
    """

    kind: Kind
    layer: int
    micro_batch: int | None = None
    step: int = 0

    def __post_init__(self) -> None:
        lowest = 0 if self.kind in (Kind.D, Kind.P) else 1
        if self.layer < lowest:
            what = "tensors count from 0" if lowest == 0 else "layers count from 1"
            raise ScheduleError(f"there is no task {self.kind}{self.layer}: {what}")
        if self.micro_batch is not None and self.micro_batch < 0:
            raise ScheduleError(f"micro_batch={self.micro_batch}: micro-batches count from 0; None is the whole batch")
        if self.step < 0:
            raise ScheduleError(f"step={self.step}: steps count from 0")

    def __str__(self) -> str:
        micro_batch = "" if self.micro_batch is None else f"@{self.micro_batch}"
        return f"{self.kind}{self.layer}{micro_batch}{chr(39) * self.step}"

    @classmethod
    def parse(cls, text: str) -> Task:
        """Read one task from its text form.

        Raises:
            ScheduleError: when ``text`` is not a task; the message repeats it and gives the form.
        """
        match = _FORM.fullmatch(text)
        if match is None or match[1] not in _LETTERS:
            raise ScheduleError(f"cannot read task {text!r}: {_FORM_IN_WORDS}")
        micro_batch = None if match[3] is None else int(match[3])
        return cls(Kind(match[1]), int(match[2]), micro_batch, len(match[4]))


_LETTERS = frozenset(kind.value for kind in Kind)
