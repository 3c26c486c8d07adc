"""What a recipe is, and how one runs: point by point, saved after each, finished ones skipped."""

import datetime
import importlib.resources
import os
import re
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import Any, Generic, TypeVar

from hydra.utils import get_class
from omegaconf import OmegaConf
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from retime.recipes.core import machine
from retime.recipes.core.claims import Comparison
from retime.recipes.core.measure import pinned
from retime.recipes.core.results import FILE, Point, Result, Row, label_of, load, show
from retime.recipes.core.schema import OUTPUTS, RECORDED, Settings

S = TypeVar("S", bound=Settings)
Tick = Callable[[str], None]

# settings that do not change what a point means
_INCIDENTAL = ("results_dir", "record", "rerun", "title", "allow_dirty")


@dataclass(frozen=True)
class Measured:
    """What a recipe hands back for a point."""

    rows: list[Row]
    facts: dict[str, Any] = field(default_factory=dict)


class Recipe(ABC, Generic[S]):
    """An experiment of a paper: which points it has, how one is measured, what a report says about them.

    Its axes are the settings along which a figure's points lie, those that `over` names and those of `axes`. Overriding
    one of them adds points to the same figure; overriding anything else starts another figure in a folder named after
    the override.
    """

    over: tuple[tuple[str, str], ...] = ()
    """What a point is at and the setting that lists it: `(("network", "cases"), ("ranks", "rank_counts"))`."""
    axes: tuple[str, ...] = ()
    quantity = "step"
    """The quantity a report forms ratios of, in milliseconds."""
    simulated = False
    """Whether nothing is measured, which the result then says."""
    on_cpu = ""
    """What it does that takes `hardware=cpu`, for whoever chooses another device: `trains on a CPU`."""

    def points(self, settings: S) -> list[dict[str, Any]]:
        """Where the points lie; each is a small dictionary of plain values. By default all combinations of `over`."""
        names = [name for name, _ in self.over]
        return [dict(zip(names, at, strict=True)) for at in product(*(getattr(settings, s) for _, s in self.over))]

    @abstractmethod
    def measure(self, settings: S, at: dict[str, Any], tick: Tick) -> Measured:
        """Measure one point. Call `tick(text)` after each block for the progress bar."""

    @abstractmethod
    def draw(self, result: Result, path: Path) -> None:
        """Draw the figure from the result alone."""

    def blocks(self, settings: S) -> int | None:
        """How many ticks a point gives, if that is known before it runs."""
        turns = self.turns(settings)
        return None if turns is None else turns * (settings.rounds + settings.warmup_rounds)

    def turns(self, settings: S) -> int | None:
        """How many variants take turns at a point, a tick each in every round, if that is known before it runs."""
        return None

    def detail(self, settings: S, at: dict[str, Any]) -> dict[str, Any]:
        """Settings behind a point's short names: what `models: {small: ...}` says about `model=small`."""
        blocks = [(at[name], setting, getattr(settings, setting)) for name, setting in self.over if name in at]
        return {setting.removesuffix("s"): named[name] for name, setting, named in blocks if isinstance(named, dict)}

    def references(self, point: Point) -> dict[str, str]:
        """Column heading to variant: the report divides each of these variants by every other one."""
        return {}

    def compare(self, result: Result) -> list[Comparison]:
        """The published numbers and targets, each beside its measured counterpart."""
        return []

    def notes(self, result: Result) -> list[str]:
        """Sentences for the report: fits, bounds, what a reader has to know."""
        return []

    def show(self, result: Result, console: Console) -> None:
        """Print the result for somebody at a terminal."""
        show(result, self.quantity, self.compare(result), self.notes(result), self.references, console)

    @property
    def all_axes(self) -> tuple[str, ...]:
        """The settings that add points to the same figure."""
        return (*self.axes, *(setting for _, setting in self.over))

    def run(self, settings: S, folder: Path, console: Console) -> Result:
        """Measure the points that `folder` does not hold yet (all of them with `rerun`), and save after each.

        A point is kept if settings, machine and versions are the same; another commit alone does not count.

        Raises:
            ValueError: `record` from a working tree with changes, without `allow_dirty`; a device that is not for it.
        """
        if self.on_cpu and settings.hardware.device != "cpu":
            raise ValueError(f"{settings.name} {self.on_cpu}: choose hardware=cpu")
        result = self._open(settings, folder)
        wanted = self.points(settings)
        common = _fingerprint(settings, self.all_axes)
        with _progress(console) as bar, pinned(settings.hardware.cores):
            here = machine.provenance()  # with cores and threads as pinned
            _refuse_changes(settings, here["commit"])
            whole = bar.add_task(settings.name, total=len(wanted))
            for at in wanted:
                label = label_of(at)
                name = f"{settings.name} {label}".rstrip()
                fingerprint = {**common, **self.detail(settings, at)}
                old = result.find(at)
                if old and not settings.rerun and _same(old, fingerprint, here):
                    bar.console.print(f"{name}: measured before, kept (rerun=true measures it again)")
                    bar.advance(whole)
                    continue
                task = bar.add_task(f"  {label}", total=self.blocks(settings))

                def tick(text: str, task: Any = task, label: str = label) -> None:
                    bar.update(task, advance=1, description=f"  {label} {text}")

                before = os.getloadavg()[0]
                started = time.perf_counter()
                measured = self.measure(settings, at, tick)
                seconds = time.perf_counter() - started
                finished = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
                result.add(
                    Point(
                        at=at,
                        settings=fingerprint,
                        rows=measured.rows,
                        facts=measured.facts,
                        finished=finished,
                        seconds=round(seconds, 2),
                        load=[round(before, 2), round(os.getloadavg()[0], 2)],
                        **here,
                    )
                )
                result.save(folder)
                bar.remove_task(task)
                bar.advance(whole)
                bar.console.print(f"{name}: measured in {seconds:.0f} s")
        return result

    def _open(self, settings: S, folder: Path) -> Result:
        path = folder / FILE
        found = load(path) if path.exists() else None
        return Result(
            name=settings.name,
            recipe=settings.recipe,
            paper=settings.paper,
            where=settings.where,
            title=settings.title,
            points=found.points if found else [],
            simulated=self.simulated,
        )


class CaseRecipe(Recipe[S]):
    """A recipe with a point for each of its settings' `cases`."""

    over: tuple[tuple[str, str], ...] = (("case", "cases"),)


def recipe_of(result: Result) -> Recipe[Any]:
    """The recipe that made a result; where its module is no longer there, that of the experiment of its name."""
    path = result.recipe
    shipped = importlib.resources.files("retime.conf") / "experiment" / f"{result.name}.yaml"
    if find_spec(path.rpartition(".")[0]) is None and shipped.is_file():
        path = OmegaConf.create(shipped.read_text(encoding="utf-8")).recipe
    recipe: Recipe[Any] = get_class(path)()
    return recipe


def result_folder(settings: Settings, overrides: Sequence[str], axes: Sequence[str]) -> Path:
    """`outputs/<paper>/<figure>/<hardware>[/<override>...]`, where each override that is not an axis adds a folder.

    `results_dir` puts another folder in front, and `record` the one of recorded results.

    Raises:
        ValueError: `results_dir` stands beside `record`, or leads to recorded results without it.
    """
    recorded, base = Path(RECORDED).resolve(), Path(settings.results_dir).resolve()
    if settings.record and settings.results_dir != OUTPUTS:
        raise ValueError(
            f"record=true writes into {RECORDED}/: leave out results_dir={settings.results_dir}, or record"
        )
    if not settings.record and recorded in (base, *base.parents):
        raise ValueError(
            f"results_dir={settings.results_dir} is where recorded results are: record=true adds to them, and without "
            f"results_dir a run writes into {OUTPUTS}/"
        )
    kept = []
    for override in sorted(overrides):
        key = override.lstrip("+~").split("=", 1)[0]
        if key not in ("experiment", "hardware", "results_dir", "record", "rerun", "allow_dirty", *axes):
            kept.append(re.sub(r"[^\w.,=+~-]+", "_", override))
    folder = RECORDED if settings.record else settings.results_dir
    return Path(folder, settings.paper, slug(settings.where), settings.hardware.name, *kept)


def _refuse_changes(settings: Settings, commit: str | None) -> None:
    if settings.record and not settings.allow_dirty and commit is not None and commit.endswith(machine.CHANGED):
        raise ValueError(
            "record=true from a working tree with changes: no commit would name the code that runs. Commit them first, "
            "or record with allow_dirty=true, which the pages then say first"
        )


def slug(text: str) -> str:
    """`Figure 3` as a folder name: `figure-3`."""
    return re.sub(r"[^a-z0-9.]+", "-", text.lower()).strip("-")


def _fingerprint(settings: Settings, axes: Sequence[str]) -> dict[str, Any]:
    """Everything a point was measured with, except its own place on the figure's axes."""
    return {key: value for key, value in asdict(settings).items() if key not in (*_INCIDENTAL, *axes)}


def _same(old: Point, fingerprint: dict[str, Any], here: machine.Provenance) -> bool:
    machine_is_same = old.hardware == here["hardware"] and old.versions == here["versions"]
    return machine_is_same and _without_module(old.settings) == _without_module(fingerprint)


def _without_module(settings: dict[str, Any]) -> dict[str, Any]:
    """With the recipe's class alone: it may have moved since."""
    return {**settings, "recipe": settings["recipe"].rpartition(".")[2]}


def _progress(console: Console) -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(20), MofNCompleteColumn(), TimeElapsedColumn())
    # once a second: drawing is work for a core that ranks of the recipe train on
    return Progress(*columns, console=console, refresh_per_second=1)


class SimulatedRecipe(Recipe[S]):
    """A recipe whose result says that it is simulated."""

    simulated = True
