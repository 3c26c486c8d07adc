"""Plans as plain data, for checkpoints and files; what comes back is data from outside, and checked whole.

    state = state_of(planner.made_for(), {name_of(key): shape})
    plans_in(state, planner.made_for())          # the same shapes by name, or an error that says what is off

Only the decision is believed: what a plan needs is found out again by a dry run before it is used.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from retime.mechanisms.memory_budget.planning.choice import PlanChoice
from retime.mechanisms.memory_budget.planning.report import PlannedShape
from retime.schedules.budget import OffloadPlan
from retime.schedules.errors import ScheduleError

__all__ = ["EARLIER_RUN", "OtherPlansError", "plans_in", "state_of"]

VERSION = 1
"""Of the form; raise it with every change to what is kept, or to what it means."""
EARLIER_RUN = "plan of an earlier run"
_MOST, _LENGTH = 2**62, 120
_BYTES = ("in_flight_bytes", "peak_bytes", "scratch_bytes", "spare_bytes", "tensor_bytes", "out_bytes", "in_bytes")
_TIMES = ("step_ms", "plain_ms")


class OtherPlansError(ScheduleError):
    """Plans that were made for another budget, other choices, another model or other optimizers."""


def state_of(made_for: Mapping[str, Any], shapes: Mapping[str, PlannedShape]) -> dict[str, Any]:
    """Plans by name, and what they were made for, in plain types; certificates and costs are left out."""
    return {"version": VERSION, "made_for": dict(made_for), "plans": [_entry(*one) for one in shapes.items()]}


def plans_in(state: object, made_for: Mapping[str, Any], source: str = EARLIER_RUN) -> dict[str, PlannedShape]:
    """The plans that :func:`state_of` gave, by name.

    Args:
        state: from a checkpoint or a file.
        made_for: what they are to be used for now.
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
        told = (f"{name} {_shown(there[name])}, not {_shown(made_for[name])}" for name in other)
        raise OtherPlansError(f"made for {'; '.join(told)}")
    return plans


def _entry(name: str, shape: PlannedShape) -> dict[str, Any]:
    numbers = {field: getattr(shape.choice, field) for field in (*_BYTES, *_TIMES)}
    return {"shape": name, "samples": shape.samples, "plan": str(shape.choice.plan), **numbers, "note": shape.note}


def _read(entry: object, source: str) -> tuple[str, PlannedShape]:
    checks: dict[str, Callable[[str, object], Any]] = {
        "shape": _text,
        "samples": _count,
        "plan": _text,
        **dict.fromkeys(_BYTES, _count),
        **dict.fromkeys(_TIMES, _time),
        "note": _text,
    }
    fields = _fields(entry, "a plan", set(checks))
    for name, check in checks.items():
        check(name, fields[name])
    plan = OffloadPlan.parse(fields["plan"])
    if not plan.sub_batch <= fields["samples"]:
        raise ScheduleError(f"sub-batches of {plan.sub_batch} samples of a batch of {fields['samples']}")
    if fields["tensor_bytes"] + fields["scratch_bytes"] > fields["peak_bytes"]:
        raise ScheduleError("a peak below what tensors and scratch need")
    choice = PlanChoice(plan, **{name: fields[name] for name in (*_BYTES, *_TIMES)})
    return fields["shape"], PlannedShape(fields["samples"], choice, note=fields["note"], source=source)


def _fields(found: object, what: str, names: set[str]) -> dict[str, Any]:
    if type(found) is not dict:
        raise ScheduleError(f"{what} is {_shown(found)}, not a mapping")
    if found.keys() != names:
        odd = sorted(map(_shown, found.keys() ^ names))
        raise ScheduleError(f"{what} lacks these, or has them beside what it should have: {', '.join(odd)}")
    return found


def _text(name: str, value: object) -> None:
    if type(value) is not str:
        raise ScheduleError(f"{name} is {_shown(value)}, not a text")


def _count(name: str, value: object) -> None:
    if type(value) is not int or not 0 <= value < _MOST:
        raise ScheduleError(f"{name} is {_shown(value)}, not a whole number from 0 up")


def _time(name: str, value: object) -> None:
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value < _MOST:  # no nan is
        raise ScheduleError(f"{name} is {_shown(value)}, not a number of milliseconds")


def _shown(value: object) -> str:
    """Of anything, whatever its size: enough to find it."""
    if isinstance(value, int) and abs(value) >= _MOST:
        return "a huge number"
    return repr(value)[:_LENGTH] if isinstance(value, str | int | float | None) else f"a {type(value).__name__}"
