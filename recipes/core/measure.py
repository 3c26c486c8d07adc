"""How recipes measure: variants interleaved round by round in one process, pinned, reported with their spread.

A round runs one block of steps of every variant, in an order that rotates from round to round, so that drift of the
machine (clock, neighbours, cache) meets every variant alike. A block gives one number, the median of its steps; a
ratio is formed inside each round, and its spread is the spread of those per-round ratios.
"""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any, TypeVar

import numpy as np
import torch

from retime.foundations.measure import Clock

T = TypeVar("T")
# For measuring memory: tensors from this size on are mapped apart and given back when freed (glibc's M_MMAP_THRESHOLD,
# mallopt(3)). It costs page faults, so nothing is timed with it.
MALLOC = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_ARENA_MAX": "1"}


def interleave(
    blocks: Mapping[str, Callable[[], T]],
    rounds: int,
    warmup_rounds: int = 1,
    tick: Callable[[str], None] = lambda name: None,
) -> dict[str, list[T]]:
    """Run every block once a round, in rotating order, and keep what each returned in the measured rounds.

    Warm-up rounds run first and are dropped: they build optimizer states, fill caches and let an autotuner settle.
    `tick` is told the name of each finished block, for a progress bar.
    """
    names = list(blocks)
    kept: dict[str, list[T]] = {name: [] for name in names}
    for number in range(-warmup_rounds, rounds):
        turn = number % len(names)
        for name in names[turn:] + names[:turn]:
            value = blocks[name]()
            if number >= 0:
                kept[name].append(value)
            tick(name)
    return kept


@contextmanager
def pinned(cores: int | None) -> Iterator[None]:
    """Run on `cores` processor cores with as many torch threads, then put both settings back.

    `None` leaves the machine's own choice. The last cores are taken: the first ones serve more interrupts.
    """
    if cores is None:
        yield
        return
    allowed = sorted(os.sched_getaffinity(0))
    if not 1 <= cores <= len(allowed):
        raise ValueError(f"hardware.cores={cores}, but this process may use 1 to {len(allowed)} cores")
    threads = torch.get_num_threads()
    os.sched_setaffinity(0, allowed[-cores:])
    torch.set_num_threads(cores)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        os.sched_setaffinity(0, allowed)


class PhaseClock:
    """Times the phases of steps, in milliseconds: `start()` a step, `mark()` after each phase, then `steps_ms()`.

    On a GPU the marks are events in the current stream, read when all steps have run: the host may run ahead of the
    device as it does in training.
    """

    def __init__(self, device: torch.device) -> None:
        self._clock = Clock(device)
        self._marks: list[list[Any]] = []

    def start(self) -> None:
        self._marks.append([])
        self.mark()

    def mark(self) -> None:
        self._marks[-1].append(self._clock.mark())

    def steps_ms(self) -> list[list[float]]:
        """The phases of each step since the last call."""
        steps, self._marks = self._marks, []
        return [[after - before for before, after in pairwise(self._clock.offsets_ms(marks))] for marks in steps]


def middle_step(steps: Sequence[Sequence[float]]) -> list[float]:
    """The phases of a block's typical step: the median of each phase, then the median of whole steps as last entry.

    `steps` has one list of phase times a step; the result has one entry more than a step has phases.
    """
    table = np.asarray(steps, dtype=float)
    return [*np.median(table, axis=0).tolist(), float(np.median(table.sum(axis=1)))]
