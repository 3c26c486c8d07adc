"""`results/README.md`: every claim of the papers in their own order, with what we have beside it and a verdict by rule.

Written from `claims.yaml` of each paper and from the `result.json` files; nothing on it is typed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from retime.recipes.core.age import CURRENT, age, changed
from retime.recipes.core.claims import PACKAGES, Comparison, Paper, Published, amount, paper, show
from retime.recipes.core.recipe import Recipe, recipe_of, slug
from retime.recipes.core.results import Result, markdown_table
from retime.recipes.core.verdicts import Judged, Value, Verdict, counted, judge, values_of
from retime.recipes.results_index import duration, index, machine

PAGE, PICTURE = "README.md", "claims.png"
SHOWN_OF_TREND = 8
"""Values that a trend shows at most; of more, three at either end."""
SHOWN = 3
"""A claim with more values shows their range."""
MOST_NAMED = 8
"""Places that a sentence names."""
_PLACE = re.compile(r"(?:Figures?|Tables?|Algorithms?|Eq\.|section|appendix|Abstract)(?: [\w.]+(?: \([a-z]\))?)?")

Age = Callable[[Result, Sequence[str]], str]
_WHAT = (
    "Every claim of the five papers in its own order: what the paper says, what we have, and a verdict that follows by",
    "rule from the recorded values (`recipes/core/verdicts.py`). Written by `python -m retime.recipes.report results`.",
)
_LEGEND = (
    "- *Holds*: median and quartiles of all values confirm it; *holds in simulation*: the same of simulated values, of",
    "  emulated networks and of layers that sleep. *Does not hold*: a value lies outside with its quartiles.",
    "- *Undecided*: quartiles, or all of fewer than five rounds, lie on both sides, or something else was measured "
    "than the claim is of.",
    "- *Not measured*: the recipe is there, a recorded value is not. *Needs hardware*: with the command. *No recipe*:",
    "  what is missing. *Tested, no number*: algorithms and equations that have nothing to measure.",
    "- *Evidence*: `experiment=NAME` of `python -m retime.recipes`, and what it took. *Changed tree*: measured with",
    "  changes that were not committed. *Stale*: in so many of the files that ran the code is another now, comments",
    "  and docstrings apart. *Tries*: least and most median of all measurements with the same settings on the same",
    "  machine, at the place where they differ most; the newest is judged.",
    "- A speedup is confirmed within a quarter of the paper's gain, unless the claim is a bound, a trend or a count.",
    "  Rows *beside* are ours, as of a stronger peer, and not counted.",
)


@dataclass(frozen=True)
class JudgedPaper:
    """A paper and what is said of each of its claims."""

    paper: Paper
    claims: list[Judged]
    results: dict[str, Result]


def judged_papers(results: Mapping[str, Result]) -> list[JudgedPaper]:
    """Judge all claims of all papers by `results`, which are named by their folder."""
    papers = []
    lines: dict[str, list[tuple[Result, list[Comparison]]]] = {}
    for package in PACKAGES:
        one = paper(package)
        claims = []
        for claim in one.claims:
            result = results.get(claim.result)
            if result is not None and claim.result not in lines:
                recipe = recipe_of(result)
                former = [(each, _compared(recipe, each)) for each in result.before()]
                lines[claim.result] = [(result, recipe.compare(result)), *former]
            tries = lines.get(claim.result, [])
            before = tuple(filter(None, (values_of(one, claim, *each) for each in tries[1:])))
            claims.append(replace(judge(one, claim, *(tries[0] if tries else (None, []))), before=before))
        papers.append(JudgedPaper(one, claims, {name: results[name] for name in _read(one) if name in results}))
    return papers


def _compared(recipe: Recipe[Any], former: Result) -> list[Comparison]:
    """A recipe's comparisons of an earlier try; none where that lacks a row or fact which the recipe has got since."""
    try:
        return recipe.compare(former)
    except (LookupError, ValueError):
        return []


def page(results: Mapping[Path, Result], folder: Path, age: Age = age) -> str:
    """The page as Markdown; a folder without evidence for any claim gets the list of its results alone.

    Args:
        results: each with the path of its `result.json`.
        folder: the page's own, from which links start.
        age: of a result, given the folders of its code.
    """
    named = {name_of(path, folder): result for path, result in results.items()}
    papers = judged_papers(named)
    if not any(one.results for one in papers):
        return "\n".join(["# Results", "", *index(results, folder)]) + "\n"
    read = {name for one in papers for name in one.results}
    beyond = {path: result for path, result in results.items() if name_of(path, folder) not in read}
    lines = [*_head(papers, results.values()), "## What holds and what does not", "", *_sentences(papers, age), ""]
    lines += [f"![Speedups of the papers beside ours]({PICTURE})", ""]
    lines += ["## What we found in the papers", "", *_findings(papers), ""]
    for one in papers:
        lines += [f"## {one.paper.paper}", "", f"{one.paper.authors}: {one.paper.title}.", ""]
        lines += [*_table(one, folder, age), ""]
    lines += ["## Beyond the papers", ""]
    lines += ["Results that no claim of a paper reads: targets of our own, and what they take.", ""]
    lines += [*index(beyond, folder), "", "## All measurements", "", *index(results, folder)]
    return "\n".join(lines) + "\n"


def name_of(path: Path, folder: Path) -> str:
    """A result's folder as claims name it: `bppsa/figure-8/cpu`."""
    return path.parent.relative_to(folder).as_posix()


def _head(papers: Sequence[JudgedPaper], results: Collection[Result]) -> list[str]:
    heading = ["paper", "claims", *(verdict.value for verdict in Verdict)]
    judged = {f"[{one.paper.paper}](#{one.paper.paper})": one.claims for one in papers}
    judged["all"] = [claim for one in papers for claim in one.claims]
    counts = {name: counted(claims).values() for name, claims in judged.items()}
    rows = [[name, *map(str, (sum(numbers), *numbers))] for name, numbers in counts.items()]
    dirty = sum(map(changed, results))
    tree = (
        f"**{dirty} of the {len(results)} results below come from working trees with changes: to be measured again.**"
    )
    lines = ["# Results", "", tree if dirty else "All results below come from clean working trees.", "", *_WHAT, ""]
    return [*lines, *markdown_table(heading, rows), "", *_LEGEND, ""]


def _sentences(papers: Sequence[JudgedPaper], age: Age) -> list[str]:
    """Four sentences a paper: how many claims have which verdict, where some hold or do not, and what is current."""
    lines = []
    for one in papers:
        counts = counted(one.claims)
        decided = (Verdict.HOLDS, Verdict.IN_SIMULATION, Verdict.FAILS, Verdict.UNDECIDED)
        parts = ", ".join(f"{verdict.value} {counts[verdict]}" for verdict in decided if counts[verdict])
        good = _places(one, Verdict.HOLDS, Verdict.IN_SIMULATION)
        bad = _places(one, Verdict.FAILS)
        lines.append(
            f"- **{one.paper.paper}**, {sum(counts[verdict] for verdict in decided)} claims with values here: {parts}. "
            + (f"Some hold: {good}. " if good else "None holds. ")
            + (f"Some do not: {bad}. " if bad else "None fails. ")
            + _current(one, age)
        )
    return lines


def _current(one: JudgedPaper, age: Age) -> str:
    kinds = {claim.published.result: claim.kind for claim in one.claims if claim.published.result in one.results}
    ages = [age(one.results[name], one.paper.code_of(name, kind)) for name, kind in kinds.items()]
    return f"Results of the code as it stands: {ages.count(CURRENT)} of {len(ages)}."


def _places(one: JudgedPaper, *verdicts: Verdict) -> str:
    links = dict.fromkeys(
        _link(place(claim.published), anchor(one.paper, claim.published))
        for claim in one.claims
        if claim.verdict in verdicts and not claim.published.beside
    )
    more = len(links) - MOST_NAMED
    return ", ".join([*links][:MOST_NAMED]) + (f" and {more} more" if more > 0 else "")


def _findings(papers: Sequence[JudgedPaper]) -> list[str]:
    lines = []
    for one in papers:
        by_name = {claim.id: claim for claim in one.paper.claims}
        for finding in one.paper.findings:
            links = dict.fromkeys(
                _link(f"{one.paper.letter}{by_name[name].number}", anchor(one.paper, by_name[name]))
                for name in finding.claims
            )
            lines.append(f"- **{one.paper.paper}**: {finding.text} ({', '.join(links)})")
    return lines


def _table(one: JudgedPaper, folder: Path, age: Age) -> list[str]:
    heading = ["claim", "the paper says", "here", "verdict", "why, and what to know", "how", "evidence"]
    rows, seen = [], set()
    for claim in one.claims:
        name = anchor(one.paper, claim.published)
        mark = "" if name in seen else f'<a id="{name}"></a>'
        seen.add(name)
        number = f"{mark}{one.paper.letter}{claim.published.number}, {claim.published.where}"
        beside = " (beside)" if claim.published.beside else ""
        cells = [number + beside, says(claim.published), here(claim), f"**{claim.verdict.value}**", because(claim)]
        rows.append([*cells, how(one, claim), evidence(one, claim, folder, age)])
    return markdown_table(heading, rows)


def place(claim: Published) -> str:
    """The last figure, table, equation or section of a claim's place: `Figure 3` of "section 4, Figure 3"."""
    matches = _PLACE.findall(claim.where)
    return matches[-1] if matches else claim.where


def _link(text: str, name: str) -> str:
    """Return a link to an anchor of this page, as HTML: Sphinx knows Markdown's own to headings only."""
    return f'<a href="#{name}">{text}</a>'


def anchor(paper: Paper, claim: Published) -> str:
    """Anchor to which a link leads: `bppsa-figure-8`."""
    return f"{paper.paper}-{slug(place(claim).replace('.', '-'))}"


def says(claim: Published) -> str:
    """The paper's statement and value, and how it follows from printed numbers if it is not printed itself."""
    value = "" if claim.value is None else f": {amount(claim.value, claim.unit)}"
    return f"{claim.what}{value}" + (f" (derived: {claim.derived})" if claim.derived else "")


def here(claim: Judged) -> str:
    """Our values: each if they are few, else their range and how many confirm the claim."""
    unit = claim.published.unit
    if not claim.values:
        return ""
    if len(claim.values) == 1:
        return show(claim.values[0].measured, unit)
    if claim.published.check.trend:
        ordered = sorted(claim.values, key=lambda value: value.place)
        texts = [f"{_name(value)}: {amount(value.measured.median, unit)}" for value in ordered]
        return ", ".join(texts if len(texts) <= SHOWN_OF_TREND else [*texts[:3], "...", *texts[-3:]])
    if len(claim.values) <= SHOWN:
        return ", ".join(amount(value.measured.median, unit) for value in claim.values)
    medians = [value.measured.median for value in claim.values]
    return f"{len(medians)} values, {amount(min(medians), unit)} to {amount(max(medians), unit)}"


def _name(value: Value) -> str:
    """A point on a trend's axis: `16` of `batch_size=16`."""
    return value.label.partition("=")[2] or value.label


def because(claim: Judged) -> str:
    """Reason why it does not hold or cannot be said, and what a reader has to know."""
    published = claim.published
    texts = (claim.why, published.instead, published.note, published.missing)
    return " ".join(dict.fromkeys(filter(None, texts)))


def how(one: JudgedPaper, claim: Judged) -> str:
    """Kind of evidence, machine and size."""
    result = one.results.get(claim.published.result)
    if result is None:
        return claim.published.needs
    words = claim.kind if claim.kind in ("simulated", "counted") else f"{claim.kind}, {machine(result)}"
    size = one.paper.sizes.get(claim.published.result, "")
    return f"{words}; {size}" if size else words


def evidence(one: JudgedPaper, claim: Judged, folder: Path, age: Age) -> str:
    """The experiment with what it took, its age and other tries, or the test, or the command that would run it."""
    published = claim.published
    if published.tests:
        return f"[test](../{published.tests})"
    if published.needs:
        return f"`{published.command}`"
    if not published.result:
        return ""
    result = one.results.get(published.result)
    if result is None:
        return "no result yet"
    taken = duration(sum(point.seconds for point in result.points))
    code = one.paper.code_of(published.result, claim.kind)
    words = [f"[`{result.name}`]({published.result}/result.md)", taken, age(result, code)]
    words += [tried(claim)] if claim.before else []
    return ", ".join([*words, *(["changed tree"] if changed(result) else [])])


def tried(claim: Judged) -> str:
    """Number of tries, with least and most median at the place where they differ most.

    A place is known by its label. Where that does not tell, as it has numbers, the order does in a complete try.
    """
    labels = [value.label for value in claim.values]
    medians = [[value.measured.median] for value in claim.values]
    for values in claim.before:
        for number, value in enumerate(values):
            if labels.count(value.label) == 1:
                medians[labels.index(value.label)].append(value.measured.median)
            elif len(values) == len(labels):
                medians[number].append(value.measured.median)
    text, again = f"{1 + len(claim.before)} tries", [those for those in medians if len(those) > 1]
    if not again:
        return text
    widest = max(again, key=lambda those: max(those) - min(those))
    least, most = (amount(end(widest), claim.published.unit) for end in (min, max))
    return f"{text}: {least} to {most}" + (f" at the widest of {len(again)} places" if len(again) > 1 else "")


def _read(one: Paper) -> list[str]:
    return list(dict.fromkeys(claim.result for claim in one.claims if claim.result))
