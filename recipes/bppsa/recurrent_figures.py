"""BPPSA's recurrent figures: loss against wall-clock time, and what the speedup depends on.

Loss with both backward passes: Figure 7 (RNN on bitstreams), Figure 13 (GRU on IRMAS). Sensitivity: Figure 8 with
Tables 4 and 5 (RNN), Figure 9 with Table 6 (GRU).
"""

import copy
import itertools
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from matplotlib.ticker import NullLocator
from torch import nn
from torch.utils.data import Dataset, default_collate

from retime.recipes.bppsa.recurrent import (
    BASELINE,
    MOVED,
    OURS,
    PHASES,
    RAN,
    TIMES,
    Batch,
    Recurrent,
    TrainingLoop,
    bound,
    label,
    network,
    ratio,
    scans,
    solver_taken,
    steps_for,
    worst_difference,
)
from retime.recipes.bppsa.settings import RecurrentSettings, claim, of_epochs
from retime.recipes.core import charts
from retime.recipes.core.build import build
from retime.recipes.core.claims import Claim, Comparison, amount, show
from retime.recipes.core.measure import interleave, middle_step
from retime.recipes.core.recipe import Measured, Tick
from retime.recipes.core.results import Point, Result, label_of, phase_rows, titled
from retime.recipes.data import ArrayData

MOST_POINTS = 500
"""A stored curve has at most so many points, each the mean of a window of steps."""
SMOOTHED = 20
"""A drawn curve is the mean of so large a part of it."""


class Shuffled:
    """Batches of a data set in a seeded order, epoch after epoch; the same number always gives the same batch."""

    def __init__(self, data: Dataset[Any], batch_size: int, seed: int, device: torch.device) -> None:
        self._data, self._size, self._seed, self._device = data, batch_size, seed, device
        self._per_epoch = len(data) // batch_size  # type: ignore[arg-type]
        if not self._per_epoch:
            raise ValueError(f"batch_size={batch_size}, but the data set has only {len(data)} examples")  # type: ignore[arg-type]
        self._epoch, self._order = -1, torch.empty(0)

    def __getitem__(self, number: int) -> Batch:
        epoch, place = divmod(number, self._per_epoch)
        if epoch != self._epoch:
            generator = torch.Generator().manual_seed(self._seed + epoch)
            self._epoch, self._order = epoch, torch.randperm(len(self._data), generator=generator)  # type: ignore[arg-type]
        rows = self._order[place * self._size : (place + 1) * self._size]
        if isinstance(self._data, ArrayData) and self._data.normalise is None:
            inputs, targets = self._data.inputs[rows], self._data.targets[rows]
        else:
            inputs, targets = default_collate([self._data[row] for row in rows.tolist()])
        return inputs.to(self._device), targets.to(self._device)

    def __iter__(self) -> Any:
        raise TypeError("endless: ask for a batch by its number")


class Training:
    """A variant in training: its loop, and what it has seen so far. Batches are made outside of the time measured."""

    def __init__(self, loop: TrainingLoop, batches: Shuffled) -> None:
        self._loop, self._batches = loop, batches
        self.losses: list[float] = []
        self.seconds: list[float] = []

    def slice(self, steps: int) -> list[float]:
        """Train `steps` steps further; the typical step's phases and whole time in ms."""
        numbers = range(len(self.losses), len(self.losses) + steps)
        losses = [self._loop.step(self._batches[number]) for number in numbers]
        times = self._loop.times_ms()
        self.losses += [float(loss) for loss in losses]
        before = self.seconds[-1] if self.seconds else 0.0
        self.seconds += [before + total / 1e3 for total in itertools.accumulate(sum(step) for step in times)]
        return middle_step(times)


class Curves(Recurrent):
    """Each variant trains from the same weights on the same batches, in turns of `steps` steps, `rounds` turns.

    The optimizer's time is in the curve; making the batches is not.
    """

    def blocks(self, settings: RecurrentSettings) -> int | None:
        return len(settings.variants) * settings.rounds

    def data(self, settings: RecurrentSettings, at: dict[str, Any]) -> dict[str, Any]:
        return {**settings.data, "steps": settings.sequence_length}

    def measure(self, settings: RecurrentSettings, at: dict[str, Any], tick: Tick) -> Measured:
        device = torch.device(settings.hardware.device)
        data = build(self.data(settings, at))
        batches = Shuffled(data, settings.batch_size, settings.seed, device)
        start = network(settings, batches[0][0], device)
        runs = {name: Training(self._warm(name, start, settings, batches[0]), batches) for name in settings.variants}
        blocks: dict[str, Callable[[], list[float]]] = {
            name: partial(run.slice, settings.steps) for name, run in runs.items()
        }
        times = interleave(blocks, settings.rounds, 0, tick)
        facts: dict[str, Any] = {"data": data.name, "steps": settings.rounds * settings.steps}
        if OURS in runs:
            facts[RAN] = solver_taken(start, batches[0])
        for name, run in runs.items():
            facts[f"{name} seconds"] = thinned(run.seconds, last=True)
            facts[f"{name} losses"] = thinned(run.losses)
        return Measured(phase_rows(times, TIMES), facts)

    def _warm(self, name: str, start: nn.Module, settings: RecurrentSettings, batch: Batch) -> TrainingLoop:
        """A fresh loop, after a thrown-away one has warmed the caches and kernels up."""
        device = batch[0].device
        TrainingLoop(name, copy.deepcopy(start), settings.optimizer, device).block(batch, settings.warmup_rounds)
        return TrainingLoop(name, start, settings.optimizer, device)

    def compare(self, result: Result) -> list[Comparison]:
        return [
            Comparison(theirs, ratio(point, name, phase), label(name, point))
            for point in result.points
            for name in scans(point)
            for phase, theirs in self.published(point).items()
        ]

    def published(self, point: Point) -> dict[str, Claim]:
        """The paper's speedups, by phase."""
        return {"step": claim("figure-7-overall"), "backward": claim("figure-7-backward")}

    def notes(self, result: Result) -> list[str]:
        return [line for point in result.points for line in curve_notes(point)]

    def draw(self, result: Result, path: Path) -> None:
        rows = len(result.points)
        drawing, panels = charts.panels(titled(result), 2 * rows, height=4.4 * rows, rows=rows)
        for point, clock, step in zip(result.points, panels[::2], panels[1::2], strict=True):
            window = max(1, len(point.facts[f"{point.variants('step')[0]} losses"]) // SMOOTHED)
            for index, name in enumerate(point.variants("step")):
                raw, colour = point.facts[f"{name} losses"], charts.COLOURS[index]
                losses, text = smoothed(raw, window), label(name, point)
                width = max(0.8, 4.6 - 1.9 * index)  # curves on each other: all are seen
                clock.plot(point.facts[f"{name} seconds"], losses, color=colour, label=text, linewidth=1.4)
                numbers = [(k + 1) * point.facts["steps"] / len(raw) for k in range(len(raw))]
                step.plot(numbers, losses, color=colour, label=text, linewidth=width)
                step.plot(numbers, raw, color=colour, linewidth=0.6, alpha=0.2)
            clock.set_xlabel("seconds of training steps")
            step.set_xlabel("training steps")
            mean = f", mean of {window}" if window > 1 else ""
            clock.set_ylabel(f"training loss (nats){mean}" + (f", {label_of(point.at)}" if point.at else ""))
            clock.legend(fontsize=7)
        charts.save(drawing, path)


class InstrumentCurves(Curves):
    """Figure 13: the GRU on each of IRMAS's feature sets."""

    over = (("features", "features"),)

    def data(self, settings: RecurrentSettings, at: dict[str, Any]) -> dict[str, Any]:
        return {**settings.data, "features": at["features"]}

    def published(self, point: Point) -> dict[str, Claim]:
        return of_epochs("Table 6", f"GRU, {point.at['features']}, B=16")


def curve_notes(point: Point) -> list[str]:
    """Per variant: how far its loss curve lies from torch.nn's, and how long torch.nn trained for the same."""
    if BASELINE not in point.variants("step"):
        return []
    plain = point.facts[f"{BASELINE} losses"]

    def apart(name: str) -> float:
        losses = point.facts[f"{name} losses"]
        return float(max(abs(mine - theirs) for mine, theirs in zip(losses, plain, strict=True)))

    control = ""
    if MOVED in point.variants("step"):
        control = f" ({label(MOVED)}: {apart(MOVED):.1g})"
    lines = []
    for name in scans(point):
        losses, seconds = point.facts[f"{name} losses"], point.facts[f"{name} seconds"]
        longer = point.facts[f"{BASELINE} seconds"][-1] / seconds[-1]
        place = f"{label_of(point.at)}, " if point.at else ""
        lines.append(
            f"- {place}{label(name, point)}: loss {plain[0]:.3f} to {losses[-1]:.3f}, at most {apart(name):.1g} from "
            f"torch.nn's at the same step{control}; torch.nn's steps took {amount(longer, 'x')} as long"
        )
    return lines


def smoothed(values: list[float], window: int) -> list[float]:
    """Each value's mean with those before it, `window` in all."""
    return [sum(values[max(0, k + 1 - window) : k + 1]) / min(window, k + 1) for k in range(len(values))]


def thinned(values: list[float], *, last: bool = False) -> list[float]:
    """At most `MOST_POINTS` numbers: the mean of each window, or its last value."""
    width = -(-len(values) // MOST_POINTS)
    windows = [values[start : start + width] for start in range(0, len(values), width)]
    return [round(window[-1] if last else sum(window) / len(window), 6) for window in windows]


class Scaling(Recurrent):
    """Figure 8, Tables 4 and 5: over T at one batch size, and over the batch size at one T."""

    axes = ("sequence_length", "sequence_lengths", "batch_size", "batch_sizes")

    def points(self, settings: RecurrentSettings) -> list[dict[str, Any]]:
        places = [(length, settings.batch_size) for length in settings.sequence_lengths]
        places += [(settings.sequence_length, size) for size in settings.batch_sizes]
        places = places or [(settings.sequence_length, settings.batch_size)]
        return [{"T": length, "B": size} for length, size in dict.fromkeys(places)]

    def measure(self, settings: RecurrentSettings, at: dict[str, Any], tick: Tick) -> Measured:
        data = {**settings.data, "steps": at["T"], "length": at["B"]}
        return self.time(settings, tick, data, at["B"], steps_for(settings, at["T"]))

    def compare(self, result: Result) -> list[Comparison]:
        lines = most(result, "figure-8")
        for point in over_length(result):
            lines += against(point, by_length(point))
        for point in over_batch(result):
            lines += against(point, by_batch(point))
        return lines

    def notes(self, result: Result) -> list[str]:
        return [*bounds(result), worst_difference(result), EPOCHS]

    def draw(self, result: Result, path: Path) -> None:
        rows: list[tuple[list[Point], Callable[[Point], float], str, Published]] = [
            (over_length(result), length_of, "time steps T", by_length),
            (over_batch(result), fraction_of, "fraction of the device a sample, 1/B", by_batch),
        ]
        rows = [row for row in rows if row[0]] or [(result.points, *rows[0][1:])]
        drawing, panels = charts.panels(titled(result), 3 * len(rows), 14, 4.4 * len(rows), rows=len(rows))
        for row, (points, where, text, published) in enumerate(rows):
            latency, speed, breakdown = panels[3 * row : 3 * row + 3]
            draw_backward(latency, points, where)
            draw_speedups(speed, points, where, published)
            draw_breakdown(breakdown, points, [tick_label(where(point)) for point in points], published)
            for axes in (latency, speed):
                axes.set_xscale("log")
                ticks = [where(point) for point in points]
                axes.set_xticks(ticks, [tick_label(tick) for tick in ticks], fontsize=8)
                axes.xaxis.set_minor_locator(NullLocator())
            for axes in (latency, speed, breakdown):
                axes.set_xlabel(text)
        charts.save(drawing, path)


class Instruments(Recurrent):
    """Figure 9 and Table 6: a GRU on IRMAS's feature sets S, M and L, over batch sizes."""

    over = (("features", "features"), ("B", "batch_sizes"))

    def measure(self, settings: RecurrentSettings, at: dict[str, Any], tick: Tick) -> Measured:
        return self.time(settings, tick, {**settings.data, "features": at["features"]}, at["B"], settings.steps)

    def compare(self, result: Result) -> list[Comparison]:
        lines = most(result, "figure-9")
        for point in result.points:
            lines += against(point, by_features(point))
        return lines

    def notes(self, result: Result) -> list[str]:
        overhead = (
            "Overhead: ours computes the GRU's gates again inside the backward pass, so its time is in `backward`; the "
            "paper's is in the forward pass (FO), and its backward speedup leaves it out."
        )
        return [*bounds(result), worst_difference(result), overhead, EPOCHS]

    def draw(self, result: Result, path: Path) -> None:
        drawing, axes = charts.figure(titled(result), width=11)
        names = [f"{point.at['features']}, B={point.at['B']}" for point in result.points]
        draw_breakdown(axes, result.points, names, by_features)
        charts.save(drawing, path)


Published = Callable[[Point], dict[str, Claim]]
TABLES_OF = "V100"
BELOW: Any = {"fontsize": 7, "loc": "upper center", "bbox_to_anchor": (0.5, -0.13), "ncols": 2, "frameon": False}
EPOCHS = "Tables 4 to 6 give seconds an epoch; their ratios stand beside ours, which are ratios of steps."


def by_length(point: Point) -> dict[str, Claim]:
    """Table 4 at the point's T, by phase."""
    return of_epochs("Table 4", f"RNN, T={point.at['T']}, B=16")


def by_batch(point: Point) -> dict[str, Claim]:
    """Table 5 at the point's batch size, by phase."""
    return of_epochs("Table 5", f"RNN, T=1000, B={point.at['B']}")


def by_features(point: Point) -> dict[str, Claim]:
    """Table 6 at the point's features and batch size, by phase."""
    return of_epochs("Table 6", f"GRU, {point.at['features']}, B={point.at['B']}")


def most(result: Result, figure: str) -> list[Comparison]:
    """The largest speedups over all points and variants beside the paper's largest."""
    lines = []
    for phase, which in (("backward", "backward"), ("step", "overall")):
        speeds = [(ratio(point, name, phase), point, name) for point in result.points for name in scans(point)]
        best = max(((s, p, n) for s, p, n in speeds if s), key=lambda entry: entry[0].median, default=None)
        over, note = (best[0], f"{label_of(best[1].at)}, {label(best[2], best[1])}") if best else (None, "")
        lines.append(Comparison(claim(f"{figure}-{which}"), over, note))
    return lines


def against(point: Point, row: dict[str, Claim]) -> list[Comparison]:
    """A table's row, if there is one, beside the fastest of our variants at that point."""
    ours = point.fastest(scans(point), "step")
    published = row.items() if ours else ()
    return [Comparison(theirs, ratio(point, str(ours), phase), label(str(ours), point)) for phase, theirs in published]


def bounds(result: Result) -> list[str]:
    """How close each point comes to a backward pass that takes no time."""
    lines = []
    for point in result.points:
        ours, most_possible = point.fastest(scans(point), "step"), bound(point)
        reached = ratio(point, ours, "step") if ours else None
        if reached and most_possible:
            lines.append(
                f"- {label_of(point.at)}: step {show(reached, 'x')} over torch.nn; with torch.nn's forward pass and a "
                f"backward pass that took no time it would be {show(most_possible, 'x')}"
            )
    if lines:
        lines.append(
            "Ours can pass that bound: its forward pass records no graph of every time step, so it is faster as well."
        )
    return lines


def over_length(result: Result) -> list[Point]:
    """The points along T, at the batch size that most of them share."""
    return _along(result, "T", "B")


def over_batch(result: Result) -> list[Point]:
    """The points along the batch size, at the T that most of them share; falling, as the fraction of a device rises."""
    return _along(result, "B", "T")[::-1]


def _along(result: Result, axis: str, fixed: str) -> list[Point]:
    values = [point.at[fixed] for point in result.points]
    shared = max(values, key=lambda value: (values.count(value), value))
    points = sorted((p for p in result.points if p.at[fixed] == shared), key=lambda p: int(p.at[axis]))
    return points if len(points) > 1 else []


def length_of(point: Point) -> float:
    return float(point.at["T"])


def fraction_of(point: Point) -> float:
    """The paper's "fraction of GPU per sample"."""
    return 1 / int(point.at["B"])


def tick_label(value: float) -> str:
    return f"{value:g}" if value >= 1 else f"1/{round(1 / value)}"


def draw_backward(axes: Any, points: list[Point], where: Callable[[Point], float]) -> None:
    """Panels a and d: milliseconds of a backward pass."""
    for index, name in enumerate([BASELINE, *scans(points[0])]):
        values = [point.spread(name, "backward") for point in points]
        charts.points_with_spread(axes, [where(p) for p in points], values, label(name), index, line=True)
    axes.set_yscale("log")
    charts.plain_numbers(axes.yaxis)
    axes.set_ylabel("backward pass of a step (ms)")
    axes.legend(**BELOW)


def draw_speedups(axes: Any, points: list[Point], where: Callable[[Point], float], published: Published) -> None:
    """Panels b and e: speedup of the backward pass, and of the whole step beside it; the paper's hollow."""
    index = 0
    rows = [(where(point), row) for point in points if (row := published(point))]
    for colour, marker, phase in zip(charts.COLOURS, "os", ("backward", "step"), strict=False):
        theirs = [row[phase].value for _, row in rows]
        text = f"the paper's ({TABLES_OF}): {'whole step' if phase == 'step' else phase}"
        axes.plot([x for x, _ in rows], theirs, marker, markerfacecolor="none", color=colour, label=text)
    for name in scans(points[0]):
        for phase in ("backward", "step"):
            text = f"{label(name)}: {'whole step' if phase == 'step' else phase}"
            values = [ratio(point, name, phase) for point in points]
            charts.points_with_spread(axes, [where(p) for p in points], values, text, index, line=True)
            index += 1
    charts.even_line(axes, "torch.nn")
    axes.set_yscale("log")
    charts.plain_numbers(axes.yaxis)
    axes.set_ylabel("speedup over torch.nn (x)")
    axes.legend(**BELOW)


def draw_breakdown(axes: Any, points: list[Point], names: list[str], published: Published) -> None:
    """Panels c and f, and Figure 9: phases of a step as parts of torch.nn's step, torch.nn's bar beside ours.

    A hollow circle is the paper's whole step.
    """
    for number, point in enumerate(points):
        row = published(point)
        if row:
            text = f"the paper's step ({TABLES_OF})" if not number else None
            axes.plot(number + 0.2, 1 / row["step"].value, "ko", markerfacecolor="none", label=text)
        whole = point.median(BASELINE, "step")
        ours = point.fastest(scans(point), "step")
        for shift, name in ((-0.2, BASELINE), (0.2, ours)):
            bottom = 0.0
            for colour, phase in zip(charts.COLOURS, PHASES, strict=False):
                height = point.median(name, phase) / whole if name else 0.0
                text = phase if not number and name == BASELINE else None
                axes.bar(
                    number + shift, height, 0.36, bottom=bottom, color=colour, label=text, alpha=1 if shift < 0 else 0.7
                )
                bottom += height
    axes.set_xticks(range(len(points)), names, fontsize=8)
    axes.set_ylabel("time over torch.nn's step")
    axes.grid(axis="x", visible=False)
    which = "left bar: torch.nn, right bar: our fastest"
    axes.legend(**BELOW, title=which, title_fontsize=7)
