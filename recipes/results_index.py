"""The page that lists all results: `results/README.md`, written from the `result.json` files alone."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hydra.utils import get_class

from retime.recipes.core.claims import Target
from retime.recipes.core.recipe import Recipe
from retime.recipes.core.results import Point, Result

PAGE = "README.md"
CHANGED = "+changes"
"""What a point's commit ends in if the working tree had changes that were not committed."""
_HEADING = ("result", "what", "experiment", "machine", "measured", "duration", "tree", "targets")


def index(results: Mapping[Path, Result], folder: Path) -> str:
    """The page as Markdown: one line a result.

    Args:
        results: each with the path of its `result.json`.
        folder: the page's own, from which links start.
    """
    lines = [
        "# Results",
        "",
        "Every measurement of this project. Written by `python -m retime.recipes.report` from the `result.json` files;",
        "each line's link has all numbers, with quartiles, versions and the paper's numbers beside.",
        "",
        "- *experiment*: `python -m retime.recipes experiment=NAME` measures it again.",
        "- *machine*: the processor and its cores; emulated: ranks in network namespaces with shaped links; simulated:",
        "  computed, not measured.",
        "- *duration*: what the measurement took, where that was recorded.",
        "- *tree*: whether the working tree was clean. *changed* means that the code that ran is not quite the commit",
        "  that the result names: that figure is to be measured again before it is relied on.",
        "- *targets*: this project's own, met and missed.",
        "",
        "| " + " | ".join(_HEADING) + " |",
        "| " + " | ".join("---" for _ in _HEADING) + " |",
    ]
    for path, result in sorted(results.items()):
        page = path.with_suffix(".md").relative_to(folder).as_posix()
        cells = (
            f"[{result.paper}, {result.where}]({page})",
            result.title,
            f"`{result.name}`",
            _machine(result),
            _days(result.points),
            _duration(sum(point.seconds for point in result.points)),
            _tree(result.points),
            _targets(result),
        )
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines) + "\n"


def _machine(result: Result) -> str:
    if result.simulated:
        return "simulated"
    places = dict.fromkeys(
        ", ".join(point.hardware[key] for key in ("processor", "cores", "accelerator") if key in point.hardware)
        for point in result.points
    )
    emulated = any(_setting(point, "hardware", "name") == "emulated" for point in result.points)
    return "; ".join(places) + (" (emulated)" if emulated else "")


def _setting(point: Point, *keys: str) -> Any:
    value: Any = point.settings
    for key in keys:
        value = value.get(key) if isinstance(value, dict) else None
    return value


def _days(points: list[Point]) -> str:
    days = sorted({point.finished[:10] for point in points if point.finished})
    return days[0] if len(days) == 1 else f"{days[0]} to {days[-1]}" if days else ""


def _duration(seconds: float) -> str:
    if seconds <= 0:
        return "not recorded"
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"


def _tree(points: list[Point]) -> str:
    commits = [point.commit for point in points]
    changed = sum(commit is not None and commit.endswith(CHANGED) for commit in commits)
    if None in commits:
        return "not recorded"
    if not changed:
        return "clean"
    return "changed" if changed == len(points) else f"changed in {changed} of {len(points)} points"


def _targets(result: Result) -> str:
    recipe: Recipe[Any] = get_class(result.recipe)()
    verdicts = [
        line.against.met(line.measured.median)
        for line in recipe.compare(result)
        if isinstance(line.against, Target) and line.measured is not None
    ]
    missed = verdicts.count(False)
    if not verdicts:
        return ""
    return f"{verdicts.count(True)} met" + (f", **{missed} missed**" if missed else "")
