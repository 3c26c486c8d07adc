"""How far planning is: which stage of how many, and about how long the rest takes, by counted runs of the step."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from retime.mechanisms.memory.planning.search import MOST_TRIALS
from retime.mechanisms.memory.planning.time_limit import TimeLimit
from retime.schedules.budget import OffloadPlan

__all__ = ["PROBING", "PlanningStages"]

PROBING = "finding out whether sub-batches give the same gradients"
_MEASURING = "measuring on a few samples how long the step and copies to the host take"
_COUNTING = (
    "deterministic algorithms are on, so the plan is chosen by counted bytes and operations and not by measured times: "
    "every run chooses the same"
)
_FLOOR, _SEARCH = 5, 8
"""Dry runs, about, of a step that can be split."""


@dataclass(frozen=True, eq=False)
class _Stage:
    """A part of planning: its runs of the step, dry and real, and samples that go through all real ones together."""

    text: str
    runs: int
    samples: int = 0


class PlanningStages:
    """Tells stages as they begin, after the first one, a dry run.

    What is left follows from the stages before: a real run takes as long as a dry one, and longer for each sample if
    that was seen.

    Args:
        say: is told a line a stage.
        limit: is checked before each.
        dry_s: seconds of the first dry run.
        samples: of the batch.
        probed: samples that the probe runs at once; 0: there is none.
        timed: plans are chosen by measured times.
    """

    def __init__(
        self, say: Callable[[str], None], limit: TimeLimit, dry_s: float, samples: int, *, probed: int, timed: bool
    ) -> None:
        self._say, self._limit = say, limit
        few = max(2, samples // 4)
        self._probe = _Stage(PROBING, 6, 6 * min(probed, samples))
        least = 5 * (1 if probed else few)
        self._least = _Stage("measuring on a few samples what the step needs at least", _FLOOR + 5, least)
        self._costs = _Stage(_MEASURING if timed else _COUNTING, 14, 11 * few)
        self._search = _Stage("searching among plans by dry runs", _SEARCH)
        self._trials = [
            _Stage(f"trying plan {number}", 4, 2 * -(-samples // 2))
            for number in range(1, (MOST_TRIALS if timed else 0) + 1)
        ]
        first = [self._probe] if probed else []
        self._all = [*first, self._least, self._costs, self._search, *self._trials]
        self._run_s, self._sample_s = dry_s, 0.0
        self._now: _Stage | None = None
        self._began_s = time.monotonic()
        self._next_trial = iter(self._trials)

    def probe(self) -> None:
        """Of gradients."""
        self._begin(self._probe)

    def least(self) -> None:
        """What the floor's plan needs."""
        self._begin(self._least)

    def costs(self) -> None:
        """Times and memory of a few samples."""
        self._begin(self._costs)

    def search(self) -> None:
        """Plans that fit."""
        self._begin(self._search)

    def trial(self, plan: OffloadPlan) -> None:
        """Of the next plan."""
        self._begin(next(self._next_trial), f": {plan}")

    def _begin(self, stage: _Stage, what: str = "") -> None:
        self._limit.check()
        now_s = time.monotonic()
        self._learn(now_s - self._began_s)
        self._began_s, self._now = now_s, stage
        at = self._all.index(stage)
        left_s = sum(one.runs * self._run_s + one.samples * self._sample_s for one in self._all[at:])
        number, last = at + 2, len(self._all) + 1  # the dry run was the first
        self._say(f"{stage.text}{what} (stage {number} of at most {last}, about {left_s:.0f} s left)")

    def _learn(self, took_s: float) -> None:
        done = self._now
        if done is None:
            return
        self._run_s = min(self._run_s, took_s / done.runs)  # the first of all loads code
        if done.samples:
            self._sample_s = (took_s - done.runs * self._run_s) / done.samples
