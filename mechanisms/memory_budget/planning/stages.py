"""How far planning is: which stage of how many."""

from __future__ import annotations

from collections.abc import Callable

from retime.mechanisms.memory_budget.planning.search import MOST_TRIALS
from retime.mechanisms.memory_budget.planning.time_limit import TimeLimit
from retime.schedules.budget import OffloadPlan

__all__ = ["PROBING", "PlanningStages"]

PROBING = "finding out whether sub-batches give the same gradients"
_MEASURING = "measuring on a few samples how long the step and copies to the host take"
_COUNTING = (
    "deterministic algorithms are on, so the plan is chosen by counted bytes and operations and not by measured times: "
    "every run chooses the same"
)


class PlanningStages:
    """Tells stages as they begin, after the first one, a dry run.

    How long one takes is not said: it depends on the step's Python code, the disk and what else the machine does.

    Args:
        say: is told a line a stage.
        limit: is checked before each.
        probed: whether gradients are probed.
        timed: plans are chosen by measured times.
    """

    def __init__(self, say: Callable[[str], None], limit: TimeLimit, *, probed: bool, timed: bool) -> None:
        self._say, self._limit, self._timed = say, limit, timed
        self._trial = 0
        self._number, self._last = 1, 4 + probed + (MOST_TRIALS if timed else 0)

    def probe(self) -> None:
        """Of gradients."""
        self._begin(PROBING)

    def least(self) -> None:
        """What the floor's plan needs."""
        self._begin("measuring on a few samples what the step needs at least")

    def costs(self) -> None:
        """Times and memory of a few samples."""
        self._begin(_MEASURING if self._timed else _COUNTING)

    def search(self) -> None:
        """Plans that fit."""
        self._begin("searching among plans by dry runs")

    def trial(self, plan: OffloadPlan) -> None:
        """Of the next plan."""
        self._trial += 1
        self._begin(f"trying plan {self._trial}: {plan}")

    def _begin(self, text: str) -> None:
        self._limit.check()
        self._number += 1
        self._say(f"{text} (stage {self._number} of at most {self._last})")
