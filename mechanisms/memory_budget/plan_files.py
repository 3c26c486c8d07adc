"""Plans as plain data, for checkpoints and files; what comes back is data from outside, and checked whole.

    state = state_of(planner.made_for(), {name_of(key): shape})
    plans_in(state, planner.made_for())          # the same shapes by name, or an error that says what is off

Only the decision is believed: what a plan needs is found out again by a dry run before it is used.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from retime.mechanisms.memory_budget.planner import Step, StepPlanner
from retime.mechanisms.memory_budget.report import PlannedShape
from retime.mechanisms.memory_budget.search import PlanChoice
from retime.schedules.budget import OffloadPlan
from retime.schedules.errors import ScheduleError

VERSION = 1
"""Version of the file format; raise it with every change to what is kept, or to what it means."""
EARLIER_RUN = "plan of an earlier run"
_MOST, _LENGTH = 2**62, 120
_BYTES = ("in_flight_bytes", "peak_bytes", "scratch_bytes", "spare_bytes", "tensor_bytes", "out_bytes", "in_bytes")
_TIMES = ("step_ms", "plain_ms")
_KINDS: dict[str, Callable[[Any], bool]] = {
    "a text": lambda value: type(value) is str,
    "a whole number from 0 up": lambda value: type(value) is int and 0 <= value < _MOST,
    "a number of milliseconds": lambda value: (
        isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < _MOST  # no nan is
    ),
}


class OtherPlansError(ScheduleError):
    """Plans that were made for another budget, other choices, another model or other optimizers."""


def state_of(made_for: Mapping[str, Any], shapes: Mapping[str, PlannedShape]) -> dict[str, Any]:
    """Plans by name, and what they were made for, in plain types; certificates and costs are left out."""
    plans = [
        {"shape": name, "samples": shape.samples, "plan": str(shape.choice.plan)}
        | {field: getattr(shape.choice, field) for field in (*_BYTES, *_TIMES)}
        | {"note": shape.note}
        for name, shape in shapes.items()
    ]
    return {"version": VERSION, "made_for": dict(made_for), "plans": plans}


def plans_in(state: object, made_for: Mapping[str, Any], source: str = EARLIER_RUN) -> dict[str, PlannedShape]:
    """The plans that :func:`state_of` gave, by name.

    Args:
        source: what reports say of where these plans come from.

    Raises:
        OtherPlansError: they were made for something else.
        ScheduleError: this is no such state.
    """
    fields = _fields(state, "the state", {"version", "made_for", "plans"})
    if type(fields["version"]) is not int or fields["version"] != VERSION:
        raise ScheduleError(f"version is {_shown(fields['version'])}, not {VERSION}")
    there = _fields(fields["made_for"], "made_for", set(made_for))
    for name, value in made_for.items():
        if type(there[name]) is not type(value):
            raise ScheduleError(f"{name} is {_shown(there[name])}, not of type {type(value).__name__}")
    if type(fields["plans"]) is not list:
        raise ScheduleError(f"plans are {_shown(fields['plans'])}, not a list")
    plans = dict(_read(entry, source) for entry in fields["plans"])
    other = [name for name, value in made_for.items() if there[name] != value]
    if other:
        differences = (f"{name} {_shown(there[name])}, not {_shown(made_for[name])}" for name in other)
        raise OtherPlansError(f"made for {'; '.join(differences)}")
    return plans


def _read(entry: object, source: str) -> tuple[str, PlannedShape]:
    text, count, time = _KINDS
    kinds = {
        "shape": text,
        "samples": count,
        "plan": text,
        **dict.fromkeys(_BYTES, count),
        **dict.fromkeys(_TIMES, time),
        "note": text,
    }
    fields = _fields(entry, "a plan", set(kinds))
    for name, kind in kinds.items():
        if not _KINDS[kind](fields[name]):
            raise ScheduleError(f"{name} is {_shown(fields[name])}, not {kind}")
    plan = OffloadPlan.parse(fields["plan"])
    if not plan.sub_batch <= fields["samples"]:
        raise ScheduleError(f"sub-batches of {plan.sub_batch} samples of a batch of {fields['samples']}")
    if fields["tensor_bytes"] + fields["scratch_bytes"] > fields["peak_bytes"]:
        raise ScheduleError("a peak below what tensors and scratch need")
    choice = PlanChoice(plan, **{name: fields[name] for name in (*_BYTES, *_TIMES)})
    return fields["shape"], PlannedShape(fields["samples"], choice, note=fields["note"], source=source)


def _fields(value: object, what: str, names: set[str]) -> dict[str, Any]:
    if type(value) is not dict:
        raise ScheduleError(f"{what} is {_shown(value)}, not a mapping")
    if value.keys() != names:
        odd = sorted(map(_shown, value.keys() ^ names))
        raise ScheduleError(f"{what} lacks these, or has them beside what it should have: {', '.join(odd)}")
    return value


def _shown(value: object) -> str:
    """Return a short text of any value: enough to find it."""
    if isinstance(value, int) and abs(value) >= _MOST:
        return "a huge number"
    return repr(value)[:_LENGTH] if isinstance(value, str | int | float | None) else f"a {type(value).__name__}"


# Plans in files of their own: the same plan for every run, whatever the clocks of a machine say.

_ANOTHER = "Save another one (`retime plan --save FILE`, or save_plan(FILE) of a run without plan=...)"


class PlanFileError(ScheduleError):
    """A file of plans cannot be used, or not for this step."""


def write_plans(path: str | os.PathLike[str], state: Mapping[str, Any]) -> None:
    """Write what a ``state_dict`` of plans holds, as JSON.

    Raises:
        OSError: it cannot be written.
    """
    Path(path).write_text(json.dumps(state, indent=1) + "\n", encoding="utf-8")


def read_plans(path: str | os.PathLike[str]) -> Any:
    """Read what :func:`write_plans` wrote.

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
            dry: the step may be called to examine the plan.

        Raises:
            PlanFileError: there is none, or it does not fit the step or the budget.
        """
        shape = self._plans.get(name)
        if shape is None:
            raise self._refusal(samples, f"it has no plan for this shape: {name}")
        if samples > shape.samples:
            raise self._refusal(samples, f"its plan is for batches of {shape.samples}")
        if not dry:
            if shape.choice.plan.sub_batch < samples:
                raise self._refusal(
                    samples, "it splits batches, and with dry_run='off' nothing shows that this is allowed"
                )
            if shape.choice.peak_bytes + shape.choice.spare_bytes > self._planner.budget_bytes:
                raise self._refusal(samples, "it needs more than the budget")
            return shape
        examined = self._planner.of_saved(shape, step, batch, samples)
        if examined is None:
            raise self._refusal(
                samples,
                "it does not hold here: the step saves other storages than when it was made, needs more memory than "
                "it did then or than the budget, or cannot be split",
            )
        return examined

    def _refusal(self, samples: int, problem: str) -> PlanFileError:
        return PlanFileError(f"plan={str(self._path)!r}, for a batch of {samples} samples: {problem}. {_ANOTHER}")
