"""The table that lists all results, for `results/README.md`, written from the `result.json` files alone."""

from __future__ import annotations

from collections.abc import Mapping
from math import inf
from pathlib import Path

from retime.recipes.core.claims import Target
from retime.recipes.core.machine import CHANGED
from retime.recipes.core.recipe import recipe_of
from retime.recipes.core.results import Point, Result, cores, markdown_table
from retime.recipes.core.verdicts import inside, kind_of

_HEADING = ("result", "what", "experiment", "machine", "measured", "duration", "tree", "targets")


def index(results: Mapping[Path, Result], folder: Path) -> list[str]:
    """The lines of the table in Markdown: one a result.

    Args:
        results: each with the path of its `result.json`.
        folder: that of the page, from which links start.
    """
    rows = []
    for path, result in sorted(results.items()):
        page = path.with_suffix(".md").relative_to(folder).as_posix()
        where = machine(result) + (" (emulated)" if kind_of(result) == "emulated" else "")
        cells = [f"[{result.paper}, {result.where}]({page})", result.title, f"`{result.name}`", where]
        cells += [_days(result.points), duration(sum(point.seconds for point in result.points)), _tree(result.points)]
        rows.append([*cells, verdicts_on_targets(result)])
    return markdown_table(_HEADING, rows)


def machine(result: Result) -> str:
    """Processor, cores that the points were pinned to, and accelerator, or that nothing was measured."""
    if result.simulated:
        return "simulated"
    places = (
        (point.hardware.get("processor", "unknown machine"), cores(point), point.hardware.get("accelerator"))
        for point in result.points
    )
    return "; ".join(dict.fromkeys(", ".join(filter(None, place)) for place in places))


def duration(seconds: float) -> str:
    """Duration of a measurement."""
    if seconds <= 0:
        return "not recorded"
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"


def verdicts_on_targets(result: Result) -> str:
    """Numbers of this project's own targets that are met and missed, and that the quartiles leave undecided."""
    verdicts = [
        inside(line.measured, *((-inf, line.against.value) if line.against.at_most else (line.against.value, inf)))
        for line in recipe_of(result).compare(result)
        if isinstance(line.against, Target) and line.measured is not None
    ]
    counts = {"met": verdicts.count(True), "**missed**": verdicts.count(False), "undecided": verdicts.count(None)}
    return ", ".join(f"{number} {word}" for word, number in counts.items() if number)


def _days(points: list[Point]) -> str:
    days = sorted({point.finished[:10] for point in points if point.finished})
    return days[0] if len(days) == 1 else f"{days[0]} to {days[-1]}" if days else ""


def _tree(points: list[Point]) -> str:
    commits = [point.commit for point in points]
    changed = sum(commit is not None and commit.endswith(CHANGED) for commit in commits)
    if None in commits:
        return "not recorded"
    if not changed:
        return "clean"
    return "changed" if changed == len(points) else f"changed in {changed} of {len(points)} points"
