"""What a memory planner decided, as data that prints, parses and goes into a checkpoint."""

from __future__ import annotations

import re
from dataclasses import dataclass

from retime.schedules.errors import ScheduleError

_FORM = re.compile(r"sub-batch (\d+), prefetch (\d+), offload (all|none|\d+(?:-\d+)?(?:,\d+(?:-\d+)?)*)(?: of (\d+))?")
MOST_SAVED = 100_000
"""More storages than the forward pass of any step saves."""
_DIGITS = 18
"""Digits of a number; all counts of bytes and samples have fewer."""
_SHOWN = 80


@dataclass(frozen=True)
class OffloadPlan:
    """How one training step stays inside a budget.

    Args:
        sub_batch: samples that go through the model at once; the last sub-batch of a batch may have fewer.
        offload: saved storages that leave the device, numbered by when a forward pass first saves them, from 0.
        prefetch: how many of them are fetched ahead of their use in the backward pass; 0 fetches each when it is used.
        saved: how many storages a forward pass saves altogether.

    Raises:
        ScheduleError: a number is out of range.
    """

    sub_batch: int
    offload: frozenset[int] = frozenset()
    prefetch: int = 1
    saved: int = 0

    def __post_init__(self) -> None:
        if self.sub_batch < 1:
            raise ScheduleError(f"sub_batch={self.sub_batch}: a sub-batch has 1 sample or more")
        if self.prefetch < 0:
            raise ScheduleError(f"prefetch={self.prefetch} must be 0 or more")
        wrong = [number for number in self.offload if not 0 <= number < self.saved]
        if wrong:
            raise ScheduleError(f"offload has {min(wrong)}, but the forward pass saves {self.saved} storages")

    def __str__(self) -> str:
        return f"sub-batch {self.sub_batch}, prefetch {self.prefetch}, offload {_ranges(self.offload)} of {self.saved}"

    @classmethod
    def parse(cls, text: str) -> OffloadPlan:
        """The plan that prints as ``text``.

        Raises:
            ScheduleError: the text is no plan.
        """
        match = _FORM.fullmatch(text.strip())
        if not match:
            raise ScheduleError(
                f"{text[:_SHOWN]!r} is no plan: write 'sub-batch 4, prefetch 1, offload 0-2,5 of 9', or offload none"
            )
        if max(map(len, re.findall(r"\d+", text))) > _DIGITS:
            raise ScheduleError(f"{text[:_SHOWN]!r} is no plan: a number in it has more than {_DIGITS} digits")
        saved = int(match[4] or 0)
        if saved > MOST_SAVED:
            raise ScheduleError(f"of {saved}: a forward pass saves at most {MOST_SAVED} storages")
        return cls(int(match[1]), _numbers(match[3], saved), int(match[2]), saved)


def _ranges(numbers: frozenset[int]) -> str:
    """``{0, 1, 2, 5}`` as ``0-2,5``."""
    parts: list[list[int]] = []
    for number in sorted(numbers):
        if parts and number == parts[-1][-1] + 1:
            parts[-1] = [parts[-1][0], number]
        else:
            parts.append([number])
    return ",".join("-".join(map(str, dict.fromkeys(part))) for part in parts) or "none"


def _numbers(text: str, saved: int) -> frozenset[int]:
    if text in ("all", "none"):
        return frozenset(range(saved)) if text == "all" else frozenset()
    ends = [[int(end) for end in part.split("-")] for part in text.split(",")]
    after = -1
    for part in ends:  # before so many numbers are made
        if not after < part[0] <= part[-1] < saved:
            shown = "-".join(map(str, part))
            raise ScheduleError(f"offload has {shown}: numbers rise, and the forward pass saves {saved} storages")
        after = part[-1]
    return frozenset(number for part in ends for number in range(part[0], part[-1] + 1))
