"""Published numbers and our own targets as data, so that a report can put each beside what was measured."""

from dataclasses import dataclass

from retime.foundations.measure import Spread, spread

CLOSE = 0.25
"""A simulated number holds within this share of the published one, of a speedup if its gain does."""


@dataclass(frozen=True)
class Claim:
    """A number somebody published: where, for what, in which unit."""

    paper: str
    where: str
    unit: str
    value: float
    what: str = ""


@dataclass(frozen=True)
class Target:
    """A number this project set itself: `value` is the least allowed, or the most if `at_most`."""

    what: str
    unit: str
    value: float
    at_most: bool = False

    def met(self, measured: float) -> bool:
        return measured <= self.value if self.at_most else measured >= self.value


@dataclass(frozen=True)
class Comparison:
    """One line of a paper-vs-measured table. `measured` is None where this run has no counterpart."""

    against: Claim | Target
    measured: Spread | None = None
    note: str = ""

    def cells(self) -> list[str]:
        """Source, quantity, published or wanted value, measured value with quartiles, remark."""
        unit = self.against.unit
        measured = "not measured" if self.measured is None else show(self.measured, unit)
        if isinstance(self.against, Claim):
            source = f"{self.against.paper}, {self.against.where}"
            wanted, note = amount(self.against.value, unit), self.note
        else:
            source = "target"
            wanted = f"{'≤' if self.against.at_most else '≥'} {amount(self.against.value, unit)}"
            note = self.note
            if self.measured is not None:
                verdict = "met" if self.against.met(self.measured.median) else "MISSED"
                note = f"{verdict}; {note}" if note else verdict
        return [source, self.against.what, wanted, measured, note]


def judged(claim: Claim, value: float, what: str, why_not: str) -> Comparison:
    """Compare a simulated number with the published one: it holds, or does not, and why.

    Args:
        claim: the published number; in the unit ``x`` it is a speedup.
        value: the simulated one.
        what: of which variant or point it is.
        why_not: said where it does not hold.
    """
    nothing = 1.0 if claim.unit == "x" else 0.0
    holds = abs(value - claim.value) <= CLOSE * (claim.value - nothing) + 1e-9
    return Comparison(claim, spread([value]), f"simulated, {what}; {'holds' if holds else f'does not hold: {why_not}'}")


def amount(value: float, unit: str) -> str:
    """A value with its unit, with digits that suit its size: `1.120 x`, `16.70 ms`, `4.00 MiB`, `0.400 %`."""
    if unit == "x" and abs(value) < 10:
        return f"{value:.3f} x"  # the papers print ratios with up to three decimals
    digits = 0 if abs(value) >= 1000 else 1 if abs(value) >= 100 else 2 if abs(value) >= 1 else 3
    return f"{value:.{digits}f} {unit}"


def show(value: Spread, unit: str) -> str:
    """A median with its quartiles: `1.120 x (1.102 to 1.131)`."""
    if value.low == value.high:
        return amount(value.median, unit)
    low, high = (amount(edge, unit).rsplit(" ", 1)[0] for edge in (value.low, value.high))
    return f"{amount(value.median, unit)} ({low} to {high})"
