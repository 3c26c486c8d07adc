"""A byte budget's plans as data: the refusal, the task graph of a training step, and what leaves the device.

The graph says what each task reads, writes and costs (moDNN, section 3.2); a plan prints, parses and goes into a
checkpoint.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from retime.schedules.errors import ScheduleError

_FOR_FINDERS = "For batch size finders this is, on a CPU as on CUDA, a step that runs out of memory."
"""They know their errors by words: Lightning's ``is_oom_error`` looks for "CUDA" and "out of memory", Accelerate's
``should_reduce_batch_size`` for " out of memory." with its full stop.
"""


def sized(nbytes: int) -> str:
    """Write a size to the byte, so that it can be given as a budget, and where it is large in MiB or GiB too."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20)):
        if nbytes >= size:
            return f"{nbytes} bytes ({nbytes / size:.1f} {unit})"
    return f"{nbytes} bytes"


class BudgetError(ScheduleError, RuntimeError):
    """A byte budget is too small. Finders of batch sizes take it for out of memory, and try a smaller batch.

    Args:
        problem: what was asked for.
        floor_bytes: the smallest budget with which this would work.
        task: the task that needs the most.
        hint: what would help.
        samples: the floor is that of so many samples at once; 0: not known.
    """

    def __init__(self, problem: str, *, floor_bytes: int, task: str, layer: str, hint: str, samples: int = 0) -> None:
        at = f" at task {task!r} of layer {layer!r}" if task else ""
        needed = f"at least {sized(floor_bytes)} are needed{at}"
        super().__init__(f"{problem}: {needed}. {hint.rstrip('.')}. {_FOR_FINDERS}")
        self.floor_bytes = floor_bytes
        self.task = task
        self.layer = layer
        self.hint = hint
        self.samples = samples

    def __reduce__(self) -> tuple[object, ...]:
        return type(self).__new__, (type(self), *self.args), self.__dict__


class BlockKind(StrEnum):
    """Kind of data that a block holds."""

    INPUT = "input"
    """A part of the batch: it comes from the host and never needs to be offloaded."""
    ACTIVATION = "activation"
    GRADIENT = "gradient"
    """Gradient of an activation: the paper's delta."""
    WEIGHT = "weight"
    """A parameter or a buffer: stays in device memory."""
    WEIGHT_GRADIENT = "weight gradient"
    STATE = "state"
    """State of the optimizer: stays in device memory."""


class Phase(StrEnum):
    """Part of the step that a task belongs to."""

    FORWARD = "forward"
    BACKWARD = "backward"
    UPDATE = "update"


STAYS = frozenset({BlockKind.WEIGHT, BlockKind.WEIGHT_GRADIENT, BlockKind.STATE})
"""Kinds that a plan leaves in device memory, as the paper does (section 3.2)."""


@dataclass(frozen=True)
class Block:
    """One data block: a tensor's storage, of ``fixed_bytes + samples * sample_bytes``.

    Raises:
        ScheduleError: a size is negative.
    """

    name: str
    kind: BlockKind
    fixed_bytes: int = 0
    sample_bytes: float = 0.0

    def __post_init__(self) -> None:
        if self.fixed_bytes < 0 or self.sample_bytes < 0:
            raise ScheduleError(f"block {self.name!r} has a negative size: give 0 or more bytes")

    def size_bytes(self, samples: int) -> int:
        """Its size with a batch of so many samples, rounded up."""
        return self.fixed_bytes + -int(-self.sample_bytes * samples // 1)


@dataclass(frozen=True)
class Algorithm:
    """One way to run a task: its time and its workspace (section 5.2.3), each fixed and a sample."""

    name: str = "default"
    fixed_ms: float = 0.0
    sample_ms: float = 0.0
    fixed_workspace_bytes: int = 0
    sample_workspace_bytes: float = 0.0

    def ms(self, samples: int) -> float:
        """Its time with a batch of so many samples."""
        return self.fixed_ms + self.sample_ms * samples

    def workspace_bytes(self, samples: int) -> int:
        """Its workspace with a batch of so many samples, rounded up."""
        return self.fixed_workspace_bytes + -int(-self.sample_workspace_bytes * samples // 1)


@dataclass(frozen=True)
class GraphTask:
    """One task: reads blocks, writes blocks, by one of its algorithms; the first one is the baseline of Eq. 10."""

    name: str
    phase: Phase
    layer: str
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    algorithms: tuple[Algorithm, ...] = (Algorithm(),)


@dataclass(frozen=True)
class TaskGraph:
    """Tasks in the order in which they run, and the blocks they name.

    Raises:
        ScheduleError: a task names an unknown block, or reads one that nothing has written and that is neither input
            nor one that stays.
    """

    blocks: Mapping[str, Block]
    tasks: tuple[GraphTask, ...]

    def __post_init__(self) -> None:
        written = {name for name, block in self.blocks.items() if block.kind in STAYS | {BlockKind.INPUT}}
        for task in self.tasks:
            for name in (*task.reads, *task.writes):
                if name not in self.blocks:
                    raise ScheduleError(f"task {task.name!r} names block {name!r}, which the graph does not have")
            for name in task.reads:
                if name not in written:
                    raise ScheduleError(f"task {task.name!r} reads block {name!r} before any task has written it")
            written.update(task.writes)

    def resident_bytes(self, samples: int) -> int:
        """Bytes that stay in device memory throughout: S_W of Eq. 7, with gradients and optimizer states."""
        return sum(block.size_bytes(samples) for block in self.blocks.values() if block.kind in STAYS)


_FORM = re.compile(
    r"sub-batch (\d+), prefetch (\d+), offload (all|none|\d+(?:-\d+)?(?:,\d+(?:-\d+)?)*)(?:(?<=none)| of (\d+))"
)
MOST_SAVED = 100_000
"""More storages than the forward pass of any step saves."""
_DIGITS = 18
"""Digits of a number; all counts of bytes and samples have fewer."""
_SHOWN = 80


@dataclass(frozen=True)
class OffloadPlan:
    """Plan by which one training step stays inside a budget.

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
