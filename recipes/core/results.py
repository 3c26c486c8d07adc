"""What a recipe leaves behind: one `result.json` a folder, a list of measured points that grows as they finish."""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from retime.foundations.measure import Spread, spread

FORMAT = 1
FILE = "result.json"


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
    own report said. `load` is the machine's load average over a minute, before and after.
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

    def values(self, variant: str, quantity: str) -> list[float]:
        """The rounds of one quantity of one variant; KeyError names what there is."""
        for row in self.rows:
            if row.variant == variant and row.quantity == quantity:
                return row.values
        there = sorted({f"{row.variant}/{row.quantity}" for row in self.rows})
        raise KeyError(f"{variant}/{quantity} was not measured here; there are {', '.join(there)}")

    def has(self, variant: str, quantity: str) -> bool:
        return any(row.variant == variant and row.quantity == quantity for row in self.rows)

    def variants(self, quantity: str) -> list[str]:
        """The variants measured for one quantity, in the order they were measured."""
        return [row.variant for row in self.rows if row.quantity == quantity]


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
        """Put a point in, in place of one that lies at the same place."""
        self.points = [old for old in self.points if old.at != point.at] + [point]

    def find(self, at: dict[str, Any]) -> Point | None:
        return next((point for point in self.points if point.at == at), None)

    def save(self, folder: Path) -> Path:
        """Write `result.json` so that an interrupted run leaves the old file or the new one, never half of one."""
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / FILE
        draft = path.with_suffix(".json.part")
        draft.write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")
        os.replace(draft, path)
        return path


def load(path: Path) -> Result:
    """Read a `result.json`; ValueError if another version of this package wrote it in another layout."""
    data = json.loads(path.read_text(encoding="utf-8"))
    if data.get("format") != FORMAT:
        raise ValueError(f"{path} has layout {data.get('format')!r}; this version reads {FORMAT}. Measure it again.")
    data["points"] = [Point(**{**point, "rows": [Row(**row) for row in point["rows"]]}) for point in data["points"]]
    return Result(**data)
