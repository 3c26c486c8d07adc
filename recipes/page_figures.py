"""Measured figures on pages for users, filled in from the recorded results, so that none is typed.

On a page a figure stands as `<!--=NAME-->1.03<!--/-->`, of which code hosts and the site show 1.03. What NAME is says
`figures.yaml` in the folder of results, by result.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from retime.foundations.measure import Spread, spread
from retime.recipes.core.claims import Reading
from retime.recipes.core.recipe import recipe_of
from retime.recipes.core.results import FILE, load
from retime.recipes.core.verdicts import read
from retime.recipes.results_index import duration

FIGURES = "figures.yaml"
PAGES = ("*.md", "docs/**/*.md", "foundations/**/README.md", "mechanisms/**/README.md")
"""Pages that may have figures, below the folder that holds the results' one."""
MARK = re.compile(r"<!--=([\w.-]+)-->(.*?)<!--/-->")
TOOK = "took-"
_FORMS = ("median", "quartiles", "range", "least", "most")


@dataclass
class Figure(Reading):
    """Way in which a figure is read from its result, and in which it is written."""

    # `median` or `quartiles` (behind the median) of one value, or of several ones' medians `range`, `least` or `most`
    form: str = "median"
    digits: int = 2  # behind the point
    times: float = 1.0  # factor of what is read, as 100 for shares in percent
    inverse: bool = False  # whether the figure is one over what is read, as the speed of a ratio of times


def fill(folder: Path) -> None:
    """Write the figures of all pages that have some, from the results under `folder`.

    Raises:
        ValueError: a figure that cannot be read, is not said in `figures.yaml`, or is on no page.
    """
    if not (folder / FIGURES).exists():
        return
    texts = texts_of(folder)
    pages = {page: page.read_text(encoding="utf-8") for page in pages_of(folder)}
    shown = {mark[0] for text in pages.values() for mark in MARK.findall(text)}
    unused = {name for name in texts if not name.startswith(TOOK)} - shown
    if unused:
        raise ValueError(f"{folder / FIGURES} has {', '.join(sorted(unused))}, which no page shows: take them out")
    new = {page: filled(text, texts) for page, text in pages.items() if MARK.search(text)}
    for page, text in new.items():
        page.write_text(text, encoding="utf-8")


def pages_of(folder: Path) -> list[Path]:
    """The pages that may have figures from the results under `folder`."""
    return sorted(page for pattern in PAGES for page in folder.parent.glob(pattern))


def filled(text: str, texts: Mapping[str, str]) -> str:
    """A page with its figures written as in `texts`; ValueError for a name that is not there."""
    unknown = {mark[0] for mark in MARK.findall(text)} - set(texts)
    if unknown:
        raise ValueError(f"no figure is named {', '.join(sorted(unknown))}: say in {FIGURES} how it is read")
    return MARK.sub(lambda mark: f"<!--={mark[1]}-->{texts[mark[1]]}<!--/-->", text)


def texts_of(folder: Path) -> dict[str, str]:
    """Text written for each figure of `figures.yaml`, by name; ValueError for one that cannot be read.

    Those with :data:`TOOK` before an experiment's name say how long it took.
    """
    results = [load(path) for path in sorted(folder.rglob(FILE))]
    texts = {TOOK + one.name: duration(sum(point.seconds for point in one.points)) for one in results}
    stated: Any = OmegaConf.load(folder / FIGURES)
    for name_of_result, entries in stated.items():
        result = load(folder / name_of_result / FILE)
        comparisons = recipe_of(result).compare(result)
        for name, entry in entries.items():
            figure: Any = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(Figure), entry))
            try:
                texts[name] = written(figure, [value.measured for value in read(figure, result, comparisons)])
            except ValueError as error:
                raise ValueError(f"{FIGURES}, {name_of_result}, {name}: {error}") from error
    return texts


def written(figure: Figure, values: Sequence[Spread]) -> str:
    """A figure as it stands on a page: `1.03`, `1.03 (1.01 to 1.04)` or `0.85 to 1.09`.

    Raises:
        ValueError: an unknown form, no value, or several where the form takes one.
    """
    if figure.form not in _FORMS:
        raise ValueError(f"form is one of {', '.join(_FORMS)}, not {figure.form}")
    if not values or (len(values) > 1 and figure.form in ("median", "quartiles")):
        raise ValueError(f"{len(values)} values: change at, lines or form, so that there is one, or a range of several")
    numbers = [[figure.times * (1 / number if figure.inverse else number) for number in one.rounds] for one in values]
    spreads = sorted((spread(one) for one in numbers), key=lambda one: one.median)
    least, most = (f"{one.median:.{figure.digits}f}" for one in (spreads[0], spreads[-1]))
    if figure.form == "range" and least != most:
        return f"{least} to {most}"
    if figure.form == "quartiles":
        return f"{least} ({spreads[0].low:.{figure.digits}f} to {spreads[0].high:.{figure.digits}f})"
    return most if figure.form == "most" else least
