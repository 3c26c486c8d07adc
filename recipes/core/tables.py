"""A result on a terminal: the paper's numbers beside ours, then each point's variants. Tables in Markdown."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from retime.foundations.measure import speedup
from retime.recipes.core.claims import Comparison
from retime.recipes.core.claims import show as with_spread
from retime.recipes.core.results import Point, Result


def show(
    result: Result,
    quantity: str,
    comparisons: Sequence[Comparison],
    notes: Sequence[str],
    references: Callable[[Point], dict[str, str]],
    console: Console,
) -> None:
    """Print the comparisons, one table a point with `quantity` and its ratios, and the notes."""
    for point in result.points:
        console.print(values(point, quantity, references(point), label_of(point.at) or result.title))
    if comparisons:
        table = Table("source", "quantity", "published/wanted", "this machine", "remark", title=result.where)
        for line in comparisons:
            table.add_row(*line.cells())
        console.print(table)
    for note in notes:
        console.print(note, highlight=False)


def values(point: Point, quantity: str, references: dict[str, str], title: str) -> Table:
    """A point's variants: the quantity's median and quartiles, and how many times faster than each reference."""
    headings = {heading: name for heading, name in references.items() if point.has(name, quantity)}
    table = Table("variant", quantity, *headings, title=title)
    for row in point.rows:
        if row.quantity == quantity:
            ratios = [speedup(point.values(name, quantity), row.values) for name in headings.values()]
            table.add_row(row.variant, with_spread(row.spread, row.unit), *(with_spread(r, "x") for r in ratios))
    return table


def label_of(at: dict[str, Any]) -> str:
    """A point's place in words: `batch_size=4`."""
    return " ".join(f"{key}={value}" for key, value in at.items())


def markdown_table(heading: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Return the lines of a table in Markdown."""
    lines = [heading, ["---"] * len(heading), *rows]
    return ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in lines]
