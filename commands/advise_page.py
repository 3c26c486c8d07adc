"""The advice as text of 100 columns, and as one HTML page that needs nothing else."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable, Iterator
from html import escape
from pathlib import Path
from typing import Any

from retime.foundations.messages import show_bytes
from retime.foundations.workers import KEPT_HEAP
from retime.schedules import Span, write_page

_WIDTH = 100
_TABLES: dict[str, Callable[[dict[str, Any]], bool]] = {
    "over the strongest plain": lambda row: row["gain"] is not None and row["over"] == "plain",
    "over ddp on {devices} ranks": lambda row: row["step_ms"] is not None and row["over"] == "ddp",
    "simulated, over ddp": lambda row: row["verdict"] == "simulated",
}
_SENTENCE = re.compile(r"(?<=[^\d.])\. ")
"""Where the first sentence of a reason ends; the page and JSON have it whole."""
_MODULE = re.compile(r"(retime(?:\.[a-z_]+)*)\.\w+\(")
_HEADINGS = ("speed", "", "step", "peak", "result")

Whole = dict[str, Any]
"""The advice as plain values."""


def text(whole: Whole) -> list[str]:
    """Lines of the answer; the last is the one to paste."""
    if whole["plain"]["step_ms"] is None:
        return ["nothing was measured yet"]
    lines = [_title(whole), "", *(f"{name:<31}{what}" for name, what in _plain(whole))]
    for heading, wanted in _TABLES.items():
        rows = [row for row in whole["methods"] if wanted(row)]
        if rows:
            lines += ["", _line(heading.format(**whole), _HEADINGS)]
            lines += [_line(f"  {row['name']}", _cells(row)) for row in rows]
    without = [row for row in whole["methods"] if row["why"]]
    lines += ["", "without effect here, or not possible"] if without else []
    for row in without:
        lines += _wrapped(f"{row['name']}: {_SENTENCE.split(row['why'])[0]}", "  ", "    ")
    simulated = [note for row in whole["methods"] if row["verdict"] == "simulated" for note in row["notes"]]
    lines += ["", *(line for note in simulated for line in _wrapped(note))] if simulated else []
    return [*lines, "", *(line for paragraph in advice(whole) for line in _wrapped(paragraph)), paste(whole)]


def _wrapped(paragraph: str, first: str = "", later: str = "") -> list[str]:
    lines = textwrap.TextWrapper(_WIDTH, first, later, break_long_words=False, break_on_hyphens=False)
    return lines.wrap(paragraph)


def advice(whole: Whole) -> Iterator[str]:
    """Advice on what to take, and what was measured with it, in paragraphs, without the line to paste."""
    plain, row, on_ranks = whole["plain"], _named(whole, "advised"), _named(whole, "advised_on_ranks")
    if on_ranks is not None:
        of_ddp = f"{on_ranks['name']} has {_gain(on_ranks)} times its speed: {_written(whole, on_ranks)}"
        yield f"If you train with ddp on {whole['devices']} ranks: {of_ddp}"
    strongest = plain["strongest"]
    taken = row or {**strongest, "step_ms": plain["step_ms"]}
    # both ratios are of turns: steps of other minutes are not compared
    own = plain["as_it_is_ms"] / plain["tried_ms"][plain["strongest_is"]]
    own *= 1.0 if row is None or row["gain"] is None else row["gain"]["median"]
    if _nothing_fits(whole):
        yield (
            f"Nothing that was measured fits into {show_bytes(whole['memory_bytes'])}: retime plan says which budget a "
            "step can be kept in."
        )
    elif row is None:
        yield f"Nothing is faster here than the strongest plain step: {own:.2f} times the speed of the step as it is."
    else:
        yield (
            f"Take {row['name']}: {_gain(row)} times the speed of the strongest plain step, {own:.2f} times that of "
            f"the step as it is; {row['result']}."
        )
        for note in row["notes"]:
            yield f"Note: {note}"
        if not row["confirmed"]:
            yield "It was measured once only."
    wants = [f"torch.set_num_threads({taken['threads']})"]
    wants += [f"{' and '.join(whole['job']['optimizers'])} with fused=True"] if strongest["fused"] else []
    yield f"Measured with {', '.join(wants)}{', and started with' if taken['kept_heap'] else ''}"
    if taken["kept_heap"]:
        yield " ".join(f"{name}={value}" for name, value in KEPT_HEAP.items())
    written = [] if row is None else [_written(whole, row)]
    if row is not None and not whole["job"]["is_lightning"] and row["accelerate"]:
        written.append(row["accelerate"])
        yield f"With Accelerate: {row['accelerate']}"
    if written:
        yield f"First: import {', '.join(sorted({'retime', *_MODULE.findall(' '.join(written))}))}"


def paste(whole: Whole) -> str:
    """The line to paste."""
    row = _named(whole, "advised")
    if _nothing_fits(whole):
        return "retime plan"
    if row is None:
        return str(whole["plain"]["trainer"]) if whole["job"]["is_lightning"] else "the loop as it is"
    return _written(whole, row)


def _nothing_fits(whole: Whole) -> bool:
    """Return whether neither the strongest plain step nor what is advised keeps the memory that was given."""
    most = whole["memory_bytes"]
    return most is not None and whole["advised"] is None and whole["plain"]["peak_bytes"] > most


def _written(whole: Whole, row: Whole) -> str:
    return str(row["trainer"] if whole["job"]["is_lightning"] else row["bare"])


def _named(whole: Whole, key: str) -> Whole | None:
    return next((row for row in whole["methods"] if row["name"] == whole[key]), None)


def _title(whole: Whole) -> str:
    job = whole["job"]
    samples = f", {job['samples']} samples a step" if job["samples"] else ""
    return f"{job['model']}, {job['parameters']:,} parameters, {' and '.join(job['optimizers'])}{samples}"


def _plain(whole: Whole) -> Iterator[tuple[str, str]]:
    plain = whole["plain"]
    yield "the step as it is", f"{plain['as_it_is_ms']:.4g} ms, {plain['as_it_is']}"
    how = plain["strongest_is"]
    yield "the strongest plain step", f"{plain['step_ms']:.4g} ms, {show_bytes(plain['peak_bytes'])}, {how}"
    if plain["ddp_ms"] is not None:
        more, devices = whole["devices"] * plain["step_ms"] / plain["ddp_ms"], whole["devices"]
        what = f"{plain['ddp_ms']:.4g} ms, {show_bytes(plain['ddp_bytes'])}"
        yield f"ddp on {devices} ranks", f"{what} a rank, {more:.2f} of the plain step's samples a second"
        if tried := plain["ddp_tried_ms"]:
            fastest = min(tried, key=tried.__getitem__)
            yield "  its buckets", f"{fastest} MiB, the fastest of {', '.join(sorted(tried, key=int))}"
    if whole["memory_bytes"] is not None:
        steps = {"the strongest plain step": plain["peak_bytes"], "ddp": plain["ddp_bytes"]}
        fits = {one: size <= whole["memory_bytes"] for one, size in steps.items() if size is not None}
        said = ", ".join(f"{one} {'fits' if fit else 'does not fit'}" for one, fit in fits.items())
        yield "--memory", f"{show_bytes(whole['memory_bytes'])}: {said}"


def _gain(row: Whole) -> str:
    if row["gain"] is None:
        return ""
    return f"{row['gain']['median']:.2f} ({row['gain']['low']:.2f} to {row['gain']['high']:.2f})"


def _cells(row: Whole) -> tuple[str, ...]:
    step = "" if row["step_ms"] is None else f"{row['step_ms']:.4g} ms"
    peak = "" if row["peak_bytes"] is None else show_bytes(row["peak_bytes"])
    return _gain(row), row["verdict"], step, peak, row["result"]


def _line(name: str, cells: tuple[str, ...]) -> str:
    gain, verdict, step, peak, result = cells
    return f"{name:<31}{gain:<20}{verdict:<11}{step:>9}{peak:>10}  {result}".rstrip()


# The page.

_STYLE = """
table{border-collapse:collapse;width:100%}th,td{text-align:left;padding:.3rem .6rem;border-bottom:1px solid var(--line);
vertical-align:top}th button{all:unset;cursor:pointer;font-weight:600}pre{border:1px solid var(--line);padding:.7rem;
overflow-wrap:anywhere;white-space:pre-wrap}td:nth-child(-n+7){white-space:nowrap}.faster{font-weight:600}
.scroll{overflow-x:auto}
"""
_SCRIPT = """
document.querySelectorAll("th button").forEach((button, column) => button.addEventListener("click", () => {
  const body = document.querySelector("tbody");
  const key = row => row.cells[column].dataset.key ?? row.cells[column].textContent;
  const rows = [...body.rows].sort((a, b) => key(a).localeCompare(key(b), undefined, {numeric: true}));
  const down = button.dataset.down !== "yes";
  button.dataset.down = down ? "yes" : "no";
  body.append(...(down ? rows.reverse() : rows));
}));
"""


def write(file: Path, whole: Whole, spans: dict[str, list[Any]]) -> None:
    """Write one HTML document that needs nothing else: the advice, a step of each timeline, and all methods.

    Args:
        file: where.
        whole: the advice as plain values.
        spans: by method, the phases `(name, start, duration)` in ms of some steps of each rank.
    """
    title, phases = "retime advise", _phases(spans)
    if whole["plain"]["step_ms"] is None:
        write_page(file, {}, title=title, above="<p>Nothing was measured yet.</p>")
        return
    facts = "".join(f"<li>{escape(name)}: {escape(what)}</li>" for name, what in _plain(whole))
    paragraphs = "".join(f"<p>{escape(paragraph)}</p>" for paragraph in advice(whole))
    above = f"<style>{_STYLE}</style><p>{escape(_title(whole))}</p><ul>{facts}</ul>{paragraphs}"
    below = f"<h2>All methods</h2>{_table(whole)}<script>{_SCRIPT}</script>"
    charts = {"The step before and after, as main threads see it": phases} if phases else {}
    write_page(file, charts, title=title, above=f"{above}<pre>{escape(paste(whole))}</pre>", below=below)


def _table(whole: Whole) -> str:
    names = ("method", "speed", "over", "verdict", "step", "peak", "result", "what was said")
    heads = "".join(f"<th><button>{name}</button></th>" for name in names)
    rows = []
    for row in whole["methods"]:
        gain, *others = _cells(row)
        key = row["gain"]["median"] if row["gain"] else 0
        notes = "<br>".join(escape(one) for one in dict.fromkeys([row["why"], *row["notes"]]) if one)
        cells = "".join(f"<td>{escape(one)}</td>" for one in (row["over"], *others))
        first = f'<td>{escape(row["name"])}</td><td data-key="{key:.4f}">{gain}</td>'
        rows.append(f'<tr class="{row["verdict"].split()[0]}">{first}{cells}<td>{notes}</td></tr>')
    return f'<div class="scroll"><table><thead><tr>{heads}</tr></thead><tbody>{"".join(rows)}</tbody></table></div>'


def _phases(spans: dict[str, list[Any]]) -> list[Span]:
    """The step of median length of each, in one chart: a lane a rank."""
    return [
        Span(phase, f"{name}, rank {number}" if len(ranks) > 1 else name, start_ms, length_ms, phase)
        for name, ranks in spans.items()
        for number, rank in enumerate(ranks)
        if rank
        for phase, start_ms, length_ms in sorted(rank, key=_length_ms)[len(rank) // 2]
    ]


def _length_ms(step: list[Any]) -> float:
    return float(max(start + length for _, start, length in step))
