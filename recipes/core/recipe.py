"""What a recipe is, and how one runs: point by point, saved after each, finished ones skipped."""

import datetime
import importlib.resources
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
from rich.table import Table

from retime.recipes.core import machine
from retime.recipes.core.claims import Comparison, amount, show
from retime.recipes.core.measure import pinned
from retime.recipes.core.results import FILE, Point, Result, Row, draft, label_of, load
from retime.recipes.core.schema import OUTPUTS, RECORDED, Settings

S = TypeVar("S", bound=Settings)
Tick = Callable[[str], None]

# settings that do not change what a point means
_INCIDENTAL = ("results_dir", "record", "rerun", "title", "allow_dirty", "minutes")
_STARTED = time.perf_counter()


@dataclass(frozen=True)
class Measured:
    """Rows and facts that a recipe hands back for a point."""

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
    needed: tuple[str, ...] = ()
    """Variants without which there is nothing to draw or compare."""
    curves: tuple[tuple[str, str], ...] = ()
    """Quantities with a value a step or check of one training, not a round, and what of: `(("loss", "steps"),)`."""

    def points(self, settings: S) -> list[dict[str, Any]]:
        """Places of the points; each is a small dictionary of plain values. By default all combinations of `over`."""
        names = [name for name, _ in self.over]
        return [dict(zip(names, at, strict=True)) for at in product(*(getattr(settings, s) for _, s in self.over))]

    @abstractmethod
    def measure(self, settings: S, at: dict[str, Any], tick: Tick) -> Measured:
        """Measure one point. Call `tick(text)` after each block for the progress bar."""

    @abstractmethod
    def draw(self, result: Result, path: Path) -> None:
        """Draw the figure from the result alone."""

    def blocks(self, settings: S) -> int | None:
        """Number of ticks that a point gives, if that is known before it runs."""
        turns = self.turns(settings)
        return None if turns is None else turns * (settings.rounds + settings.warmup_rounds)

    def turns(self, settings: S) -> int | None:
        """Number of variants taking turns at a point, a tick each in every round, if that is known before it runs."""
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

    def tables(self, result: Result) -> list[Table]:
        """Tables that a terminal shows of the points: by default one each with `quantity` and its ratios."""
        return [self.table(point, result.title) for point in result.points]

    def table(self, point: Point, title: str) -> Table:
        """A point's variants: `quantity`, and how many times faster than each reference."""
        of = self.quantity
        headings = {heading: name for heading, name in self.references(point).items() if point.has(name, of)}
        table = Table("variant", of, *headings, title=label_of(point.at) or title)
        for row in point.rows:
            if row.quantity == of:
                ratios = [point.speedup(name, row.variant, of) for name in headings.values()]
                table.add_row(row.variant, self.shown(row), *(show(ratio, "x") for ratio in ratios))
        return table

    def shown(self, row: Row) -> str:
        """Median and quartiles over rounds; of a curve its ends: `2.30 to 0.150 nats over 90 steps`."""
        along = dict(self.curves).get(row.quantity)
        if along is None:
            return show(row.spread, row.unit)
        first, last = amount(row.values[0], row.unit).rsplit(" ", 1)[0], amount(row.values[-1], row.unit).strip()
        return f"{first} to {last} over {len(row.values)} {along}"

    def show(self, result: Result, console: Console) -> None:
        """Print the tables, the comparisons and the notes for somebody at a terminal."""
        for each in self.tables(result):
            console.print(each)
        if comparisons := self.compare(result):
            table = Table("source", "quantity", "published/wanted", "this machine", "remark", title=result.where)
            for line in comparisons:
                table.add_row(*line.cells())
            console.print(table)
        for note in self.notes(result):
            console.print(note, highlight=False)

    @property
    def all_axes(self) -> tuple[str, ...]:
        """The settings that add points to the same figure."""
        return (*self.axes, *(setting for _, setting in self.over))

    def needs(self, settings: S) -> str:
        """Requirement beside a processor: root for links that are shaped, or a GPU."""
        return {"emulated": "root", "cuda": "GPU"}.get(settings.hardware.name, "")

    def stored(self, settings: S, folder: Path) -> Result:
        """The result that `folder` holds, or one without points."""
        points = load(folder / FILE).points if (folder / FILE).exists() else []
        words = (settings.name, settings.recipe, settings.paper, settings.where, settings.title)
        return Result(*words, points, self.simulated)

    def kept(self, settings: S, result: Result) -> list[dict[str, Any]]:
        """Points where a run measures nothing: of the same settings, machine and versions; none with `rerun`."""
        if settings.rerun or not result.points:
            return []
        with pinned(settings.hardware.cores):  # cores and threads are part of the machine
            here = machine.hardware(), machine.versions()
        places = [(at, result.find(at)) for at in self.points(settings)]
        return [at for at, old in places if old and _same(old, self._fingerprint(settings, at), *here)]

    def _fingerprint(self, settings: S, at: dict[str, Any]) -> dict[str, Any]:
        """Everything that a point is measured with, except its own place on the figure's axes."""
        common = {key: value for key, value in asdict(settings).items() if key not in (*_INCIDENTAL, *self.all_axes)}
        return {**common, **self.detail(settings, at)}

    def run(self, settings: S, folder: Path, console: Console) -> Result:
        """Measure the points that `folder` does not hold yet (all of them with `rerun`), and save after each.

        A point is kept if settings, machine and versions are the same; another commit alone does not count. With
        `minutes` no point begins after so many, so that the next call goes on there.

        Raises:
            ValueError: `record` from a working tree with changes, without `allow_dirty`; a device that is not for it;
                variants that lack one which it needs; a folder that cannot be written.
        """
        if self.on_cpu and settings.hardware.device != "cpu":
            raise ValueError(f"{settings.name} {self.on_cpu}: choose hardware=cpu")
        if missing := [name for name in self.needed if name not in getattr(settings, "variants", ())]:
            raise ValueError(f"{settings.name} is drawn against {', '.join(missing)}: add it to variants")
        result = self.stored(settings, folder)
        wanted, kept = self.points(settings), self.kept(settings, result)
        columns = (TextColumn("{task.description}"), BarColumn(20), MofNCompleteColumn(), TimeElapsedColumn())
        # once a second: drawing is work for a core that ranks of the recipe train on
        with Progress(*columns, console=console, refresh_per_second=1) as bar, pinned(settings.hardware.cores):
            commit = machine.commit()
            # cores and threads as pinned
            here: dict[str, Any] = {"hardware": machine.hardware(), "versions": machine.versions(), "commit": commit}
            if settings.record and not settings.allow_dirty and (commit or "").endswith(machine.CHANGED):
                raise ValueError(
                    "record=true from a working tree with changes: no commit would name the code that runs. Commit "
                    "them first, or record with allow_dirty=true, which the pages then say first"
                )
            whole = bar.add_task(settings.name, total=len(wanted))
            for at in wanted:
                label = label_of(at)
                name = f"{settings.name} {label}".rstrip()
                if at in kept:
                    bar.console.print(f"{name}: measured before, kept (rerun=true measures it again)")
                    bar.advance(whole)
                    continue
                if settings.minutes is not None and time.perf_counter() - _STARTED > 60 * settings.minutes:
                    bar.console.print(f"{name}: left for the next call, as minutes={settings.minutes:g} are over")
                    continue
                task = bar.add_task(f"  {label}", total=self.blocks(settings))

                def tick(text: str, task: Any = task, label: str = label) -> None:
                    bar.update(task, advance=1, description=f"  {label} {text}")

                draft(folder).unlink()  # which says at once if that cannot be written
                fingerprint, before, gpus = self._fingerprint(settings, at), machine.load(), machine.gpus()
                started = time.perf_counter()
                try:
                    measured = self.measure(settings, at, tick)
                except BaseException:
                    if result.points:
                        again = "the same command" + " without rerun=true" * settings.rerun
                        bar.console.print(f"{name}: stopped; {again} goes on behind the points in {folder / FILE}")
                    raise
                seconds = time.perf_counter() - started
                finished = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
                facts = {**measured.facts, **({"GPUs before and after": [*gpus, *machine.gpus()]} if gpus else {})}
                here |= {"finished": finished, "seconds": round(seconds, 2), "load": [before, machine.load()]}
                result.add(Point(at, fingerprint, measured.rows, facts, **here))
                result.save(folder)
                bar.remove_task(task)
                bar.advance(whole)
                bar.console.print(f"{name}: measured in {seconds:.0f} s")
        return result


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
    same = ("experiment", "hardware", *_INCIDENTAL, *axes)
    others = [override for override in sorted(overrides) if override.lstrip("+~").split("=", 1)[0] not in same]
    kept = [re.sub(r"[^\w.,=+~-]+", "_", override) for override in others]
    folder = RECORDED if settings.record else settings.results_dir
    return Path(folder, settings.paper, slug(settings.where), settings.hardware.name, *kept)


def slug(text: str) -> str:
    """`Figure 3` as a folder name: `figure-3`."""
    return re.sub(r"[^a-z0-9.]+", "-", text.lower()).strip("-")


def _same(old: Point, fingerprint: dict[str, Any], hardware: dict[str, str], versions: dict[str, str]) -> bool:
    measured_here = (old.hardware, old.versions) == (hardware, versions)
    return measured_here and _without_module(old.settings) == _without_module(fingerprint)


def _without_module(settings: dict[str, Any]) -> dict[str, Any]:
    """With the recipe's class alone: it may have moved since."""
    return {**settings, "recipe": settings["recipe"].rpartition(".")[2]}


class SimulatedRecipe(Recipe[S]):
    """A recipe whose result says that it is simulated."""

    simulated = True
