"""Verdicts on claims by rule: what a result's values say about what a paper states. No verdict is typed anywhere."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import combinations
from math import inf

from retime.foundations.measure import Spread, speedup, spread
from retime.recipes.core.claims import Check, Claim, Comparison, Paper, Published, Reading, Target, as_claim
from retime.recipes.core.results import Point, Result, label_of

EXACT = 1e-9
"""Rounding of numbers that are written with few digits."""


class Verdict(StrEnum):
    """Verdicts on a claim, in the order of the page's counts."""

    HOLDS = "holds"
    IN_SIMULATION = "holds in simulation"
    FAILS = "does not hold"
    UNDECIDED = "undecided"
    NOT_MEASURED = "not measured"
    HARDWARE = "needs hardware"
    NO_RECIPE = "no recipe"
    TESTED = "tested, no number"


@dataclass(frozen=True)
class Value:
    """A value of ours beside the paper's, with where on a figure's axis it lies."""

    label: str
    measured: Spread
    published: float | None
    place: float = 0.0


@dataclass(frozen=True)
class Judged:
    """A claim with our values, the kind of evidence and the verdict that follows."""

    published: Published
    verdict: Verdict
    kind: str = ""
    values: tuple[Value, ...] = ()
    why: str = ""
    before: tuple[list[Value], ...] = ()
    """Values of each earlier measurement."""


def judge(paper: Paper, published: Published, result: Result | None, comparisons: Sequence[Comparison]) -> Judged:
    """Say what follows for a claim from its result, which is None if there is none, and that recipe's comparisons."""
    if published.tests:
        return Judged(published, Verdict.TESTED)
    if published.needs:
        return Judged(published, Verdict.HARDWARE)
    if published.missing:
        return Judged(published, Verdict.NO_RECIPE)
    if result is None:
        return Judged(published, Verdict.NOT_MEASURED)
    values = tuple(values_of(paper, published, result, comparisons))
    kind = published.kind or kind_of(result)
    if not values:
        return Judged(published, Verdict.NOT_MEASURED, kind)
    decided = along(published.check, values) if published.check.trend else all_of(published.check, published, values)
    if decided is False:
        return Judged(published, Verdict.FAILS, kind, values, published.why or _said(comparisons, values))
    if decided is None or published.instead:
        why = published.instead if decided else "Rounds lie on both sides."
        return Judged(published, Verdict.UNDECIDED, kind, values, why)
    computed = kind in ("simulated", "emulated")
    return Judged(published, Verdict.IN_SIMULATION if computed else Verdict.HOLDS, kind, values)


def kind_of(result: Result) -> str:
    """Simulated, emulated (network, or layers that sleep) or measured, by what the result says of itself."""
    if result.simulated:
        return "simulated"
    for point in result.points:
        if point.settings.get("hardware", {}).get("name") == "emulated" or point.settings.get("emulate_compute"):
            return "emulated"
    return "measured"


def all_of(check: Check, published: Published, values: Sequence[Value]) -> bool | None:
    """True if every value is confirmed, False if one is clearly not, None if neither can be said."""
    decisions = [inside(value.measured, *accepted(check, value.published, published.unit)) for value in values]
    return False if False in decisions else None if None in decisions else True


def accepted(check: Check, published: float | None, unit: str) -> tuple[float, float]:
    """The least and the most value that confirm a claim."""
    low, high = -inf, inf
    if check.within is not None:
        if published is None:
            raise ValueError("check.within needs a value of the paper")
        nothing = 1.0 if unit == "x" and published >= 1 else 0.0
        reach = check.within * abs(published - nothing)
        low, high = published - reach, published + reach
    low = max(low, -inf if check.at_least is None else check.at_least)
    high = min(high, inf if check.at_most is None else check.at_most)
    return low, high


def inside(measured: Spread, low: float, high: float) -> bool | None:
    """Return whether median and :attr:`Spread.reach` lie within; None if that lies on both sides of a bound."""
    slack = EXACT * max(1.0, abs(measured.median))
    least, most = measured.reach
    if low - slack <= least and most <= high + slack:
        return True
    return False if most < low - slack or least > high + slack else None


def along(check: Check, values: Sequence[Value]) -> bool | None:
    """Return whether values go as the trend says.

    Two values in the wrong order, beyond the quartiles of both, refute it; it is confirmed if there are none and the
    last value lies beyond the quartiles of the first.
    """
    ordered = [value.measured for value in sorted(values, key=lambda value: value.place)]
    if check.trend == "constant":
        mean = sum(value.median for value in ordered) / len(ordered)
        reach = (0.0 if check.within is None else check.within) * abs(mean)
        decisions = [inside(value, mean - reach, mean + reach) for value in ordered]
        return False if False in decisions else None if None in decisions else True
    if check.trend == "falls":
        ordered.reverse()
    if len(ordered) < 2:
        return None
    if any(after.high < before.low for before, after in combinations(ordered, 2)):
        return False
    first, last = ordered[0], ordered[-1]
    if last.low > first.high:
        return True
    exact = all(value.low == value.high for value in ordered)
    return False if exact else None


def values_of(paper: Paper, published: Published, result: Result, comparisons: Sequence[Comparison]) -> list[Value]:
    """Read a claim's values from a result as its `read` says; what was not measured is left out."""
    how = published.read
    if not (how.ratio or how.difference or how.row or how.fact or {"where", "what"} & how.lines.keys()):
        comparisons = [line for line in comparisons if line.against == as_claim(paper, published)]
    return read(how, result, comparisons, published.value)


def read(
    how: Reading, result: Result, comparisons: Sequence[Comparison], published: float | None = None
) -> list[Value]:
    """Read values from a result, or from its recipe's comparisons; what was not measured is left out."""
    if not (how.ratio or how.difference or how.row or how.fact):
        return _from_lines(how.lines, comparisons)
    values = []
    for point in result.points:
        if any(point.at.get(key) != wanted for key, wanted in how.at.items()):
            continue
        if how.order and str(point.at.get(how.over)) not in how.order:
            continue
        measured = _from_point(how, point)
        place = None if measured is None else _place(how, point)
        if measured is not None and place is not None:
            label = label_of({key: value for key, value in point.at.items() if key not in how.at})
            values.append(Value(label, measured, published, place))
    return values


def _from_lines(wanted: Mapping[str, str], comparisons: Sequence[Comparison]) -> list[Value]:
    """The lines of a recipe's comparison table with these texts; targets of ours stand at the place "target"."""
    values = []
    for line in comparisons:
        against = line.against
        if line.measured is None or (isinstance(against, Target) and "where" not in wanted):
            continue
        where = against.where if isinstance(against, Claim) else "target"
        texts = {"where": where, "what": against.what, "note": line.note}
        if all(part in texts[key] for key, part in wanted.items()):
            label = against.what if "where" in wanted and "what" not in wanted else line.note
            values.append(Value(label, line.measured, against.value))
    return values


def _from_point(how: Reading, point: Point) -> Spread | None:
    if how.fact:
        number = point.facts.get(how.fact)
        return spread([float(number)]) if number is not None else None
    names = how.ratio or how.difference or [how.row]
    one_plan = len({point.facts.get("plans", {}).get(name) for name in how.alike}) <= 1
    if not one_plan or not all(point.has(name, how.quantity) for name in names):
        return None
    numbers = [point.values(name, how.quantity) for name in names]
    if how.ratio:
        return speedup(numbers[0], numbers[1])
    if how.difference:
        return spread([before - after for before, after in zip(numbers[0], numbers[1], strict=True)])
    return spread(numbers[0])


def _place(how: Reading, point: Point) -> float | None:
    """Place of a point on a trend's axis; None if that was not measured."""
    if how.over_row:
        variant, quantity = how.over_row
        return point.median(variant, quantity) if point.has(variant, quantity) else None
    if not how.over:
        return 0.0
    place = point.at.get(how.over, point.facts.get(how.over))
    return place if place is None else float(how.order.index(str(place)) if how.order else place)


def _said(comparisons: Sequence[Comparison], values: Sequence[Value]) -> str:
    """Words of the recipe itself on a value that does not hold."""
    mark = "does not hold: "
    labels = {value.label for value in values}
    notes = [line.note.split(mark, 1)[1] for line in comparisons if mark in line.note and line.note in labels]
    return notes[0] if notes else ""


def counted(judged: Sequence[Judged]) -> dict[Verdict, int]:
    """Number of the paper's claims with each verdict, in the verdicts' order."""
    claims = [claim for claim in judged if not claim.published.beside]
    return {verdict: sum(claim.verdict is verdict for claim in claims) for verdict in Verdict}
