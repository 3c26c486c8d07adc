"""Numbers that papers state or that we set ourselves, as data, so that a report can put each beside what was measured.

Recipes compare with a :class:`Claim` or a :class:`Target`. All of a paper's claims are :class:`Published`, from the
`claims.yaml` beside its recipes: place, value, what would confirm it, our evidence. They stand in the paper's order and
are numbered without a gap. Each has one kind of evidence: a recorded `result` and how it is read, `tests` where there
is nothing to measure, hardware that it `needs`, or what is `missing`.
"""

import importlib.resources
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from omegaconf import OmegaConf

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
        source, wanted, verdict = "target", amount(self.against.value, unit), ""
        if isinstance(self.against, Claim):
            source = f"{self.against.paper}, {self.against.where}"
        else:
            wanted = f"{'≤' if self.against.at_most else '≥'} {wanted}"
            if self.measured is not None:
                verdict = "met" if self.against.met(self.measured.median) else "MISSED"
        return [source, self.against.what, wanted, measured, "; ".join(filter(None, (verdict, self.note)))]


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


PACKAGES = ("fusion", "cpuacc", "modnn", "bppsa", "ooo")
"""Folders of `retime.recipes` that have a `claims.yaml`, in the order of the page."""
KINDS = ("measured", "counted", "emulated", "simulated")
TRENDS = ("rises", "falls", "constant")


@dataclass
class Check:
    """Condition that confirms a claim; several fields hold together."""

    # share of the paper's value by which ours may differ; of a speedup's gain, if the unit is x
    within: float | None = None
    at_least: float | None = None  # bound that all values reach
    at_most: float | None = None  # bound that no value passes
    # how values go along `Reading.over`: rises, falls or constant (within `within` of their mean)
    trend: str | None = None


@dataclass
class Reading:
    """Way to read values from a result. Without a field set, they are the recipe's own comparisons with this claim."""

    # parts of a comparison's `where`, `what` and `note`; without `where` and `what` those with this claim
    lines: dict[str, str] = field(default_factory=dict)
    ratio: list[str] = field(default_factory=list)  # two variants, how many times faster the second is
    difference: list[str] = field(default_factory=list)  # two variants, the first less the second
    row: str = ""  # a variant whose values are taken as they are
    quantity: str = "step"  # of `ratio`, `difference` and `row`
    fact: str = ""  # a number among a point's facts
    at: dict[str, Any] = field(default_factory=dict)  # the points that count; by default all
    over: str = ""  # for a trend, the axis or fact by which points are sorted
    # names along that axis, where they are no numbers; points with others do not count
    order: list[str] = field(default_factory=list)
    alike: list[str] = field(default_factory=list)  # variants with one plan, or the point does not count
    # for a trend, variant and quantity by whose median points are sorted
    over_row: list[str] = field(default_factory=list)


@dataclass
class Published:
    """One claim of a paper."""

    number: int  # within the paper; claims of one figure or sentence share it
    id: str  # short name, unique in the paper
    where: str  # figure, table, equation, algorithm or section
    what: str  # the quantity, or the statement where there is no number
    unit: str = ""  # of `value`; x for ratios
    value: float | None = None  # the paper's number
    derived: str = ""  # how `value` follows from printed numbers, if it is not printed itself
    check: Check = field(default_factory=Check)  # what confirms it
    result: str = ""  # folder of the evidence, below `results/`
    read: Reading = field(default_factory=Reading)  # how values are read from it
    kind: str = ""  # of the evidence, if its result does not say so: measured, counted, emulated or simulated
    why: str = ""  # why it does not hold, one sentence
    note: str = ""  # what a reader has to know in any case
    instead: str = ""  # what was measured in place of what the claim is of; values then refute it or leave it undecided
    # whether the row is not the paper's claim but ours beside it, as of a stronger peer; counts leave it out
    beside: bool = False
    tests: str = ""  # file that tests what has no number
    needs: str = ""  # hardware that a check takes
    command: str = ""  # runs it there
    missing: str = ""  # what is not built, or not recorded, and whether it could be


@dataclass
class Finding:
    """Finding of ours in a paper, and the claims whose rows support it."""

    text: str
    claims: list[str]


@dataclass
class Paper:
    """A paper with its claims."""

    paper: str  # its folder below `results/`
    letter: str  # in front of the claims' numbers
    authors: str  # with the year
    title: str  # of the paper
    # by kind of evidence, or by result where that has others, the folders and files whose code ran
    code: dict[str, list[str]]
    sizes: dict[str, str] = field(default_factory=dict)  # by result, what was measured there and the paper's size
    findings: list[Finding] = field(default_factory=list)  # what we found in the paper
    claims: list[Published] = field(default_factory=list)  # in the paper's order
    # others that recipes compare with, by name: fields of a :class:`Claim`, of this paper and in x unless they say so
    numbers: dict[str, Any] = field(default_factory=dict)
    tables: dict[str, Any] = field(default_factory=dict)  # printed ones, by name, that recipes compute from
    # what this project wants to reach, by name: fields of a :class:`Target`, or values by case
    targets: dict[str, Any] = field(default_factory=dict)

    def code_of(self, result: str, kind: str) -> list[str]:
        """The folders and files whose code a result of this kind ran."""
        return self.code.get(result) or self.code.get(kind) or self.code.get("measured", [])

    def claim(self, name: str) -> Claim:
        """The claim or number `name` as recipes compare with it; KeyError if it is not there or has no value."""
        if name in self.numbers:
            return Claim(**{"paper": self.paper, "unit": "x", **self.numbers[name]})
        for claim in self.claims:
            if claim.id == name and claim.value is not None:
                return as_claim(self, claim)
        raise KeyError(f"{self.paper} has no claim {name!r} with a value")

    def target(self, name: str) -> Target:
        """The target `name`; KeyError if it is not there."""
        return Target(**{"unit": "x", **self.targets[name]})


def as_claim(paper: Paper, published: Published) -> Claim:
    """A published number as recipes compare with it; ValueError if it has none."""
    if published.value is None:
        raise ValueError(f"{paper.paper}, {published.id}: has no value")
    return Claim(paper.paper, published.where, published.unit, published.value, published.what)


@cache
def paper(package: str) -> Paper:
    """Read `retime/recipes/<package>/claims.yaml`.

    Raises:
        omegaconf.errors.OmegaConfBaseException: an unknown key or a value of another type.
        ValueError: numbers with a gap, an id twice, or a claim whose evidence is none or more than one of its kinds.
    """
    file = importlib.resources.files("retime.recipes") / package / "claims.yaml"
    schema = OmegaConf.structured(Paper)
    text = OmegaConf.create(file.read_text(encoding="utf-8"))
    read: Any = OmegaConf.to_object(OmegaConf.merge(schema, text))
    assert isinstance(read, Paper)
    check(read)
    return read


def check(paper: Paper) -> None:
    """ValueError if claims are numbered with a gap, named twice, or do not say how they are checked."""
    numbers = list(dict.fromkeys(claim.number for claim in paper.claims))
    if numbers != list(range(1, len(numbers) + 1)):
        raise ValueError(f"{paper.paper}: claims are numbered {numbers}; number them 1, 2, 3 ... without a gap")
    seen: set[str] = set()
    for claim in paper.claims:
        where = f"{paper.paper}, claim {claim.id}"
        if claim.id in seen:
            raise ValueError(f"{where}: stands there twice")
        seen.add(claim.id)
        evidence = [name for name in ("result", "tests", "needs", "missing") if getattr(claim, name)]
        if len(evidence) != 1:
            raise ValueError(f"{where}: give one of result, tests, needs and missing; it has {evidence or 'none'}")
        bounds = [b for b in (claim.check.within, claim.check.at_least, claim.check.at_most) if b is not None]
        if claim.result and not bounds and claim.check.trend is None:
            raise ValueError(f"{where}: say in check what would confirm it: within, at_least, at_most or trend")
        if claim.check.trend not in (None, *TRENDS):
            raise ValueError(f"{where}: trend is one of {', '.join(TRENDS)}, not {claim.check.trend}")
        if claim.kind and claim.kind not in KINDS:
            raise ValueError(f"{where}: kind is one of {', '.join(KINDS)}, not {claim.kind}")
        if claim.needs and not claim.command:
            raise ValueError(f"{where}: needs {claim.needs}: give the command that checks it there")
    for finding in paper.findings:
        if unknown := sorted(set(finding.claims) - seen):
            raise ValueError(f"{paper.paper}: the finding {finding.text[:40]!r} names {unknown}, which are no claims")


def claim_of(package: str, name: str) -> Claim:
    """The claim `name` of a paper as its recipes compare with it."""
    return paper(package).claim(name)


def target_of(package: str, name: str) -> Target:
    """The target `name` of a paper's recipes."""
    return paper(package).target(name)
