"""What a recipe leaves behind, one `result.json` a folder, and what is said of it on terminals, charts and pages.

A result is a list of measured points that grows as they finish; one that is measured again keeps what it was. Of points
reports say the machine's name, sizes, and how many times faster one variant is.
"""

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from textwrap import fill
from typing import Any

from retime.foundations.measure import Spread, speedup, spread

FORMAT = 1
FILE, SIMULATED = "result.json", "simulated"


@dataclass(frozen=True)
class Row:
    """One quantity of one variant: a value a round. `values` carry `unit`."""

    variant: str
    quantity: str
    unit: str
    values: list[float]

    @property
    def spread(self) -> Spread:
        return spread(self.values)


def phase_rows(times: Mapping[str, Sequence[Sequence[float]]], phases: Sequence[str]) -> list[Row]:
    """Rows of the phases in ms, from each variant's rounds of a number a phase."""
    return [
        Row(name, phase, "ms", [round(block[index], 5) for block in kept])
        for name, kept in times.items()
        for index, phase in enumerate(phases)
    ]


@dataclass(frozen=True)
class Point:
    """One place of a figure: where it lies (`at`), all settings it was measured with, what came out.

    `facts` are numbers and words that have no spread: parameter counts, why a variant is missing, what a mechanism's
    own report said. `load` is the machine's load average over a minute, before and after. `former` are earlier
    measurements of the same place, oldest first.
    """

    at: dict[str, Any]
    settings: dict[str, Any]
    rows: list[Row]
    facts: dict[str, Any] = field(default_factory=dict)
    hardware: dict[str, str] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    commit: str | None = None
    finished: str = ""
    seconds: float = 0.0
    load: list[float] = field(default_factory=list)
    former: list["Point"] = field(default_factory=list)

    def values(self, variant: str, quantity: str) -> list[float]:
        """The rounds of one quantity of one variant; KeyError names what there is."""
        for row in self.rows:
            if row.variant == variant and row.quantity == quantity:
                return row.values
        there = sorted({f"{row.variant}/{row.quantity}" for row in self.rows})
        raise KeyError(f"{variant}/{quantity} was not measured here; there are {', '.join(there)}")

    def has(self, variant: str, quantity: str) -> bool:
        return any(row.variant == variant and row.quantity == quantity for row in self.rows)

    def spread(self, variant: str, quantity: str) -> Spread:
        """Median and quartiles of one quantity of one variant."""
        return spread(self.values(variant, quantity))

    def median(self, variant: str, quantity: str) -> float:
        """The median round of one quantity of one variant."""
        return self.spread(variant, quantity).median

    def speedup(self, reference: str, variant: str, quantity: str) -> Spread:
        """The reference's quantity over the variant's, round by round: of times, how many times faster it is."""
        return speedup(self.values(reference, quantity), self.values(variant, quantity))

    def variants(self, quantity: str) -> list[str]:
        """The variants measured for one quantity, in the order they were measured."""
        return [row.variant for row in self.rows if row.quantity == quantity]

    def fastest(self, variants: Iterable[str], quantity: str) -> str | None:
        """The one of these variants with the smallest median of a time; None if there are none."""
        return min(variants, key=lambda variant: self.median(variant, quantity), default=None)


@dataclass
class Result:
    """A figure or table as measured: which recipe made it, what it answers, and its points."""

    name: str
    recipe: str
    paper: str
    where: str
    title: str
    points: list[Point] = field(default_factory=list)
    simulated: bool = False
    format: int = FORMAT

    def add(self, point: Point) -> None:
        """Put a point in, in place of one that lies at the same place, which it keeps unless nothing was measured."""
        old = self.find(point.at)
        if old is not None and not self.simulated:
            point = replace(point, former=[*old.former, replace(old, former=[])])
        self.points = [old for old in self.points if old.at != point.at] + [point]

    def before(self) -> list["Result"]:
        """Results measured before, newest first, on the same machine and with the same settings."""
        former = [[old for old in reversed(new.former) if _alike(old) == _alike(new)] for new in self.points]
        tries = max(map(len, former), default=0)
        return [replace(self, points=[each[back] for each in former if back < len(each)]) for back in range(tries)]

    def find(self, at: dict[str, Any]) -> Point | None:
        return next((point for point in self.points if point.at == at), None)

    def save(self, folder: Path) -> None:
        """Write `result.json` so that an interrupted run leaves the old file or the new one, never half of one."""
        path = draft(folder)
        path.write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")
        os.replace(path, folder / FILE)


def draft(folder: Path) -> Path:
    """An empty file that may become `result.json` of a folder; ValueError if that cannot be written."""
    path = folder / f"{FILE}.part"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        path.touch()
    except OSError as error:
        raise ValueError(f"{path} cannot be written ({error.strerror}): choose another results_dir") from error
    return path


def load(path: Path) -> Result:
    """Read a `result.json`; ValueError if another version of this package wrote it in another layout."""
    data = json.loads(path.read_text(encoding="utf-8"))
    if data.get("format") != FORMAT:
        raise ValueError(f"{path} has layout {data.get('format')!r}; this version reads {FORMAT}. Measure it again.")
    return Result(**{**data, "points": [_point(point) for point in data["points"]]})


def _point(data: dict[str, Any]) -> Point:
    former = [_point(old) for old in data.get("former", [])]
    return Point(**{**data, "rows": [Row(**row) for row in data["rows"]], "former": former})


def _alike(point: Point) -> Any:
    """Key shared by measurements of a place that differ by when and how often they were made; code may have changed."""
    return point.hardware, {**point.settings, "recipe": "", "rounds": 0, "warmup_rounds": 0}


def best_of(point: Point, beginning: str | tuple[str, ...], quantity: str) -> str | None:
    """The fastest of the variants whose labels begin like this."""
    names = [name for name in point.variants(quantity) if name.startswith(beginning)]
    return point.fastest(names, quantity)


def ratio(point: Point, reference: str | None, variant: str, quantity: str = "step") -> Spread | None:
    """Speed of `variant` over that of `reference`; None if one of them was not measured."""
    if reference is None or not point.has(reference, quantity) or not point.has(variant, quantity):
        return None
    return point.speedup(reference, variant, quantity)


def percent_more(point: Point, name: str, other: str, quantity: str) -> Spread | None:
    """By how many percent a variant's values are above another's, in each round."""
    over = ratio(point, name, other, quantity)
    return None if over is None else spread([100 * (one - 1) for one in over.rounds])


_SIZES = {
    "image_size": "{} px",
    "width": "width {}",
    "layers": "{} layers",
    "hidden_size": "hidden size {}",
    "tokens": "{} tokens",
    "batch_size": "batch {}",
}
"""What a title says of the sizes among a point's settings, in this order."""
_BATCH_AXES = {"B", "batch_size", "images"}
LONGEST_LINE, MOST_LINES, MOST_NAMED = 75, 2, 4


def titled(result: Result, more: str = "") -> str:
    """A chart's title: what it is, with `more` if there is any, and below it where that was measured and its sizes.

    Where all sizes would take more lines than :data:`MOST_LINES`, only those that every point has are there, unnamed.
    """
    where = "" if SIMULATED in result.title else hardware_line(result)
    for of_all in (False, True):
        below = fill("; ".join(filter(None, (where, sizes(result, of_all=of_all)))), LONGEST_LINE)
        if below.count("\n") < MOST_LINES:
            break
    return result.title + (f", {more}" if more else "") + (f"\n{below}" if below else "")


def heading(result: Result) -> str:
    """A page's title, which says once that nothing was measured: many places and titles do."""
    title = result.title.removesuffix(f", {SIMULATED}") if SIMULATED in result.where else result.title
    return f"{result.paper}, {result.where}: {title}"


def sizes(result: Result, *, of_all: bool = False) -> str:
    """Sizes of images, networks and batches, as settings say: `64 px, width 0.5 (VGG-16), batch 8 to 32`.

    Nothing of a simulation: what it takes from its settings differs from point to point. With `of_all` names of points
    are left out, and sizes that some points do not have.
    """
    if result.simulated:
        return ""
    values: dict[str, dict[float, list[str]]] = {key: {} for key in _SIZES}
    names = [", ".join(str(value) for value in point.at.values() if isinstance(value, str)) for point in result.points]
    for name, point in zip(names, result.points, strict=True):
        for key, value in _sizes_in(point.settings).items():
            if key != "batch_size" or not _BATCH_AXES & point.at.keys():
                values[key].setdefault(value, []).append(name)
    words = []
    for key, text in _SIZES.items():
        if not values[key] or (of_all and {name for of in values[key].values() for name in of} != {*names}):
            continue
        named = {value: list(dict.fromkeys(of)) for value, of in values[key].items() if set(of) != set(names)}
        if len(values[key]) > 2 or sum(map(len, named.values())) > (0 if of_all else MOST_NAMED):
            ends = dict.fromkeys(f"{end(values[key]):g}" for end in (min, max))
            words.append(text.format(" to ".join(ends)))
        else:
            of_some = {value: f" ({', '.join(of)})" for value, of in named.items()}
            words += [text.format(f"{value:g}") + of_some.get(value, "") for value in values[key]]
    return ", ".join(words)


def _sizes_in(settings: dict[str, Any]) -> dict[str, float]:
    """The sizes by name; those of a case, a network or data inside take the place of the settings' own."""
    sizes = {
        key: value for key, value in settings.items() if key in _SIZES and isinstance(value, int | float) and value
    }
    for value in settings.values():
        sizes |= _sizes_in(value) if isinstance(value, dict) else {}
    return sizes


def hardware_line(result: Result) -> str:
    """The points' machines, for a chart's title; emulated networks and simulations are named."""
    if result.simulated:
        return SIMULATED
    machines: dict[str, None] = {}
    for point in result.points:
        name = point.hardware.get("accelerator", point.hardware.get("processor", "unknown machine"))
        network = "emulated network" if point.settings.get("hardware", {}).get("name") == "emulated" else ""
        machines[", ".join(filter(None, (name, cores(point), network)))] = None
    return " and ".join(machines)


def cores(point: Point) -> str:
    """Cores as pinned: results name the machine's, which are more where a recipe ran on fewer."""
    number = point.settings.get("hardware", {}).get("cores") or point.hardware.get("cores")
    return f"{number} core{'s' if str(number) != '1' else ''}" if number else ""


def label_of(at: dict[str, Any]) -> str:
    """A point's place in words: `batch_size=4`."""
    return " ".join(f"{key}={value}" for key, value in at.items())


def markdown_table(heading: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Return the lines of a table in Markdown."""
    lines = [heading, ["---"] * len(heading), *rows]
    return ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in lines]
