"""Plans in files of their own: the same plan for every run, whatever the clocks of a machine say."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from retime.mechanisms.memory_budget.planning.report import PlannedShape
from retime.mechanisms.memory_budget.planning.saved_plans import plans_in
from retime.mechanisms.memory_budget.planning.step_planner import Step, StepPlanner
from retime.schedules.errors import ScheduleError

__all__ = ["GivenPlans", "PlanFileError", "read_plans", "write_plans"]

_ANOTHER = "Save another one (`retime plan --save FILE`, or save_plan(FILE) of a run without plan=...)"


class PlanFileError(ScheduleError):
    """A file of plans cannot be used, or not for this step."""


def write_plans(path: str | os.PathLike[str], state: Mapping[str, Any]) -> None:
    """What a ``state_dict`` of plans holds, as JSON.

    Raises:
        OSError: it cannot be written.
    """
    Path(path).write_text(json.dumps(state, indent=1) + "\n", encoding="utf-8")


def read_plans(path: str | os.PathLike[str]) -> Any:
    """What :func:`write_plans` wrote.

    Raises:
        OSError: it cannot be read.
        PlanFileError: it is no JSON.
    """
    try:
        return json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise OSError(error.errno, f"plan={os.fspath(path)!r} cannot be read ({error.strerror})") from error
    except (ValueError, RecursionError) as error:
        raise PlanFileError(f"plan={str(path)!r} is no file of plans: {error}. {_ANOTHER}") from None


class GivenPlans:
    """The plans of a file, for the steps of one model; where one of them does not hold, nothing else is tried.

    Args:
        path: of the file.
        planner: examines what it says.

    Raises:
        OSError, PlanFileError: it cannot be read, or was made for something else.
    """

    def __init__(self, path: str | os.PathLike[str], planner: StepPlanner) -> None:
        self._path, self._planner = path, planner
        try:
            self._plans = plans_in(read_plans(path), planner.made_for(), source=f"plan of {path}")
        except ScheduleError as error:
            if isinstance(error, PlanFileError):
                raise
            raise PlanFileError(f"plan={str(path)!r}: {error}. {_ANOTHER}") from None

    def plan(self, name: str, step: Step, batch: Any, samples: int, *, dry: bool) -> PlannedShape:
        """The plan for a batch.

        Args:
            name: of its shape.
            step, batch, samples: what is planned for.
            dry: the step may be called to examine the plan.

        Raises:
            PlanFileError: there is none, or it does not fit the step or the budget.
        """
        found = self._plans.get(name)
        if found is None:
            raise self._refusal(samples, f"it has no plan for this shape: {name}")
        if samples > found.samples:
            raise self._refusal(samples, f"its plan is for batches of {found.samples}")
        if not dry:
            return self._unexamined(found, samples)
        examined = self._planner.of_saved(found, step, batch, samples)
        if examined is None:
            raise self._refusal(
                samples,
                "it does not hold here: the step saves other storages than when it was made, needs more memory than "
                "it did then or than the budget, or cannot be split",
            )
        return examined

    def _unexamined(self, found: PlannedShape, samples: int) -> PlannedShape:
        if found.choice.plan.sub_batch < samples:
            raise self._refusal(samples, "it splits batches, and with dry_run='off' nothing shows that this is allowed")
        if found.choice.peak_bytes + found.choice.spare_bytes > self._planner.budget_bytes:
            raise self._refusal(samples, "it needs more than the budget")
        return found

    def _refusal(self, samples: int, problem: str) -> PlanFileError:
        return PlanFileError(f"plan={str(self._path)!r}, for a batch of {samples} samples: {problem}. {_ANOTHER}")
