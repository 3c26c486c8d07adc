"""CSV, PNG and paper-vs-measured table from `result.json` alone: `python -m retime.recipes.report [FOLDER ...]`."""

import csv
import io
import sys
from pathlib import Path
from typing import Any

from rich.console import Console

from retime.foundations.measure import spread
from retime.recipes.core.age import changed
from retime.recipes.core.claims import show
from retime.recipes.core.recipe import Recipe, recipe_of
from retime.recipes.core.results import FILE, Point, Result, heading, label_of, load, markdown_table, ratio, sizes
from retime.recipes.page_figures import fill
from retime.recipes.results_page import PAGE, PICTURE, judged_papers, name_of, page
from retime.recipes.results_picture import draw

LONGEST_LIST, LONGEST_TEXT = 12, 5000
"""Facts with more values than this are told by their first and last."""


def rebuild(folder: Path, console: Console | None = None) -> list[Path]:
    """Write the report beside every `result.json` in or under `folder`; returns those files.

    A folder of several results gets `README.md` as well, which lists them.

    Raises:
        FileNotFoundError: there is no `result.json` there.
        ValueError: names those without a report and why, when all others have theirs. No list is written then.
    """
    paths, failed = sorted(folder.rglob(FILE)), []
    if not paths:
        raise FileNotFoundError(f"no {FILE} in or under {folder}: run an experiment first, or name another folder")
    for path in paths:
        try:
            write(path, console)
        except Exception as error:
            failed.append(f"{path}: {type(error).__name__}: {error}")
    if failed:
        raise ValueError(
            "\n".join(["no report, and no list of results, until these are measured again or taken away:", *failed])
        )
    if not (folder / FILE).exists():
        list_results(folder)
    return paths


def write(path: Path, console: Console | None = None) -> None:
    """Write `result.csv`, `result.png` and `result.md` beside a `result.json`, and show them on `console`."""
    result = load(path)
    recipe = recipe_of(result)
    text = markdown(result, recipe)
    path.with_suffix(".csv").write_text(table_of_values(result, recipe), encoding="utf-8")
    path.with_suffix(".md").write_text(text, encoding="utf-8")
    recipe.draw(result, path.with_suffix(".png"))
    if console is not None:
        recipe.show(result, console)
        pages = f"{path.with_suffix('.md')}, {path.with_suffix('.png').name}"
        console.print(f"Table and picture: {pages}", soft_wrap=True, highlight=False)


def list_results(folder: Path) -> None:
    """Write `README.md`, all claims beside the results under `folder`, with its picture, and the figures of pages."""
    results = {path: load(path) for path in sorted(folder.rglob(FILE))}
    (folder / PAGE).write_text(page(results, folder), encoding="utf-8")
    draw(judged_papers({name_of(path, folder): result for path, result in results.items()}), folder / PICTURE)
    fill(folder)


def table_of_values(result: Result, recipe: Recipe[Any]) -> str:
    """The result as CSV: one line a point, variant and quantity; of a curve its last value, as of one round."""
    axes = list(dict.fromkeys(key for point in result.points for key in point.at))
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow([*axes, "variant", "quantity", "unit", "median", "quartile_low", "quartile_high", "rounds"])
    for point in result.points:
        place = [point.at.get(axis, "") for axis in axes]
        for row in point.rows:
            value = spread(row.values[-1:] if row.quantity in dict(recipe.curves) else row.values)
            numbers = [f"{number:.6g}" for number in (value.median, value.low, value.high)]
            writer.writerow([*place, row.variant, row.quantity, row.unit, *numbers, len(value.rounds)])
    return stream.getvalue()


def markdown(result: Result, recipe: Recipe[Any]) -> str:
    """The report as Markdown: what it is, where it was measured, paper against measured, all values."""
    lines = [f"# {heading(result)}", ""]
    if changed(result):
        lines += ["**Measured with changes that were not committed: to be measured again.**", ""]
    if result.simulated:
        lines += ["**Simulated, not measured.**", ""]
    if sizes(result):
        lines += [f"Sizes: {sizes(result)}.", ""]
    comparisons = recipe.compare(result)
    if comparisons:
        columns = ["source", "quantity", "published or wanted", "this machine (quartiles over rounds)", "remark"]
        lines += ["## Paper and this machine", "", *markdown_table(columns, [line.cells() for line in comparisons]), ""]
    for note in recipe.notes(result):
        lines += [note, ""]
    lines += ["## Measured", ""]
    for point in result.points:
        lines += [f"### {label_of(point.at)}" if point.at else "### Single point", ""]
        lines += [*_values(point, recipe), ""]
        if point.facts:
            lines += [*(f"- {key}: {_short(value)}" for key, value in point.facts.items()), ""]
    lines += ["## Where", "", *_provenance(result)]
    return "\n".join(lines) + "\n"


def _values(point: Point, recipe: Recipe[Any]) -> list[str]:
    """One line a variant: every quantity, then how many times faster it is than each reference."""
    quantities = list(dict.fromkeys((row.quantity, row.unit) for row in point.rows))
    references = {heading: name for heading, name in recipe.references(point).items() if name}
    lines = []
    for variant in dict.fromkeys(row.variant for row in point.rows):
        cells = [variant]
        for column in quantities:
            rows = [row for row in point.rows if (row.variant, row.quantity, row.unit) == (variant, *column)]
            cells.append(recipe.shown(rows[0]) if rows else "")
        for reference in references.values():
            faster = ratio(point, reference, variant, recipe.quantity)
            cells.append("" if faster is None else show(faster, "x"))
        lines.append(cells)
    return markdown_table(["variant", *(quantity for quantity, _ in quantities), *references], lines)


def _provenance(result: Result) -> list[str]:
    """Machine, versions and commit of the points and what they were before; what was measured differently is apart."""
    places: dict[str, list[str]] = {}
    for point in result.points:
        days: dict[str, list[str]] = {}
        for one in (point, *reversed(point.former)):
            day = one.finished[:10] if one is point else f"before {one.finished[:10]}"
            days.setdefault(_how(one), []).append(day)
        for how, those in days.items():
            places.setdefault(how, []).append(f"{label_of(point.at) or 'all'} ({'; '.join(those)})")
    return [f"- {place}: {', '.join(points)}" for place, points in places.items()]


def _how(point: Point) -> str:
    words = [*point.hardware.values(), *(f"{name} {version}" for name, version in point.versions.items())]
    words += [f"commit {point.commit}"] if point.commit else []
    words += [f"{key} {point.settings[key]}" for key in ("rounds", "steps") if key in point.settings]
    return ", ".join(words)


def main(arguments: list[str]) -> None:
    """Rebuild the reports under each folder named on the command line (default: `results`)."""
    for folder in arguments or ["results"]:
        for path in rebuild(Path(folder)):
            print(path.parent)


def _short(value: Any) -> str:
    """A fact as one short line; long series and tables are in the JSON."""
    if isinstance(value, list) and len(value) > LONGEST_LIST:
        return f"{len(value)} values, from {value[0]} to {value[-1]} (all in result.json)"
    return str(value) if len(str(value)) <= LONGEST_TEXT else f"{str(value)[:500]}... (all in result.json)"


if __name__ == "__main__":
    main(sys.argv[1:])
