"""BPPSA's recurrent figures: loss against wall-clock time, and what the speedup depends on.

Loss with both backward passes: Figure 7 (RNN on bitstreams), Figure 13 (GRU on IRMAS). Sensitivity: Figure 8 with
Tables 4 and 5 (RNN), Figure 9 with Table 6 (GRU).
"""

import itertools
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from matplotlib.ticker import NullLocator
from torch import Tensor

from retime.foundations.measure import speedup
from retime.mechanisms.scan import Solver, parse_solver
from retime.recipes.bppsa import recurrent
from retime.recipes.bppsa.recurrent import BASELINE, MOVED, OURS, Recurrent, label, ratio, scans
from retime.recipes.bppsa.settings import RecurrentSettings, claim, compared, of_epochs
from retime.recipes.bppsa.training import Batch, batches
from retime.recipes.core import charts
from retime.recipes.core.build import build, build_batches
from retime.recipes.core.claims import Claim, Comparison, amount, paper, show
from retime.recipes.core.measure import PhaseClock, interleave, middle_step
from retime.recipes.core.recipe import Measured, Tick
from retime.recipes.core.results import Point, Result, Row, label_of, phase_rows, titled
from retime.recipes.fusion.variants import PHASES

MOST_POINTS = 500
"""A stored curve has at most so many points, each the mean of a window of steps."""
SMOOTHED = 20
"""A drawn curve is the mean of so large a part of it."""


class Training(recurrent.TrainingLoop):
    """A variant in training, with what it has seen so far. Batches are made outside of the time measured."""

    def __init__(self, feed: Iterator[Batch], *loop: Any) -> None:
        super().__init__(*loop)
        self._feed = feed
        self.losses: list[float] = []
        self.seconds: list[float] = []

    def slice(self, steps: int) -> list[float]:
        """Train `steps` steps further; the typical step's phases and whole time in ms."""
        losses = [self.step(batch) for batch in itertools.islice(self._feed, steps)]
        times = self.clock.steps_ms()
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
        feeds = {name: batches(data, settings.batch_size, settings.seed, device) for name in settings.variants}
        first = next(batches(data, settings.batch_size, settings.seed, device))
        start = recurrent.network(settings, first[0], device)
        loop = (start, settings.optimizer, first)
        for name in settings.variants:  # loops that are thrown away warm caches and kernels up
            recurrent.TrainingLoop(name, *loop).block(settings.warmup_rounds)
        runs = {name: Training(feed, name, *loop) for name, feed in feeds.items()}
        blocks = {name: partial(run.slice, settings.steps) for name, run in runs.items()}
        times = interleave(blocks, settings.rounds, 0, tick)
        facts: dict[str, Any] = {"data": data.name, "steps": settings.rounds * settings.steps}
        if OURS in runs:
            facts[recurrent.RAN] = recurrent.solver_taken(start.recurrent, first[0].transpose(0, 1))
        for name, run in runs.items():
            facts[f"{name} seconds"] = thinned(run.seconds, last=True)
            facts[f"{name} losses"] = thinned(run.losses)
        return Measured(phase_rows(times, recurrent.TIMES), facts)

    def compare(self, result: Result) -> list[Comparison]:
        return [
            Comparison(theirs, ratio(point, name, phase), label(name, point))
            for point in result.points
            for name in scans(point)
            for phase, theirs in self.claims(point).items()
        ]

    def claims(self, point: Point) -> dict[str, Claim]:
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

    def claims(self, point: Point) -> dict[str, Claim]:
        return of_epochs("Table 6", f"GRU, {point.at['features']}, B={point.settings['batch_size']}")


def curve_notes(point: Point) -> list[str]:
    """Per variant: how far its loss curve lies from torch.nn's, and how long torch.nn trained for the same."""
    if BASELINE not in point.variants("step"):
        return []
    plain = point.facts[f"{BASELINE} losses"]

    def apart(name: str) -> float:
        losses = point.facts[f"{name} losses"]
        return float(max(abs(mine - theirs) for mine, theirs in zip(losses, plain, strict=True)))

    control = f" ({label(MOVED)}: {apart(MOVED):.1g})" if MOVED in point.variants("step") else ""
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
    needed = (BASELINE,)

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
        for axis, table in (("T", "Table 4"), ("B", "Table 5")):
            for point in along(result, axis):
                lines += against(point, table)
        return lines

    def notes(self, result: Result) -> list[str]:
        return [*bounds(result), worst_difference(result), EPOCHS]

    def draw(self, result: Result, path: Path) -> None:
        rows = [
            (along(result, "T"), "T", "time steps T", "Table 4"),
            (along(result, "B"), "B", "fraction of the device a sample, 1/B", "Table 5"),
        ]
        rows = [row for row in rows if row[0]] or [(result.points, *rows[0][1:])]
        drawing, panels = charts.panels(titled(result), 3 * len(rows), 14, 4.4 * len(rows), rows=len(rows))
        for row, (points, axis, text, table) in enumerate(rows):
            latency, speed, breakdown = panels[3 * row : 3 * row + 3]
            places = [point.at["T"] if axis == "T" else 1 / point.at["B"] for point in points]
            names = [str(point.at["T"]) if axis == "T" else f"1/{point.at['B']}" for point in points]
            for index, name in enumerate([BASELINE, *scans(points[0])]):
                values = [point.spread(name, "backward") for point in points]
                charts.points_with_spread(latency, places, values, label(name), index, line=True)
            latency.set_ylabel("backward pass of a step (ms)")
            draw_speedups(speed, points, places, table)
            draw_breakdown(breakdown, points, names, table)
            for axes in (latency, speed):
                axes.set_yscale("log")
                charts.plain_numbers(axes.yaxis)
                axes.legend(**BELOW)
                axes.set_xscale("log")
                axes.set_xticks(places, names, fontsize=8)
                axes.xaxis.set_minor_locator(NullLocator())
            for axes in (latency, speed, breakdown):
                axes.set_xlabel(text)
        charts.save(drawing, path)


def steps_for(settings: RecurrentSettings, sequence_length: int) -> int:
    """Steps of a block: `settings.steps` at 1000 time steps, up to 20 times as many at fewer, at least one at more."""
    return max(1, min(20 * settings.steps, round(settings.steps * 1000 / sequence_length)))


class Instruments(Recurrent):
    """Figure 9 and Table 6: a GRU on IRMAS's feature sets S, M and L, over batch sizes."""

    over = (("features", "features"), ("B", "batch_sizes"))
    needed = (BASELINE,)

    def detail(self, settings: RecurrentSettings, at: dict[str, Any]) -> dict[str, Any]:
        return {**super().detail(settings, at), "overhead": "measured"}  # points of earlier code have none

    def measure(self, settings: RecurrentSettings, at: dict[str, Any], tick: Tick) -> Measured:
        data = {**settings.data, "features": at["features"]}
        measured = self.time(settings, tick, data, at["B"], settings.steps)
        (batch,) = build_batches(data, at["B"], 1, torch.device(settings.hardware.device))
        return Measured([*measured.rows, *overhead(settings, batch[0])], measured.facts)

    def compare(self, result: Result) -> list[Comparison]:
        lines = most(result, "figure-9")
        for point in result.points:
            lines += [*against(point, "Table 6"), *against_overhead(point)]
        return lines

    def notes(self, result: Result) -> list[str]:
        where = (
            "Overhead: ours computes the GRU's gates again inside the backward pass, so its time is in `backward`; the "
            "paper's is in the forward pass (FO), and its backward speedup leaves it out."
        )
        return [*bounds(result), worst_difference(result), where, EPOCHS]

    def draw(self, result: Result, path: Path) -> None:
        drawing, axes = charts.figure(titled(result), width=11)
        names = [f"{point.at['features']}, B={point.at['B']}" for point in result.points]
        draw_breakdown(axes, result.points, names, "Table 6")
        charts.save(drawing, path)


PLAIN_ALONE, ALONE = "layer alone, torch.nn", "layer alone, scan"
GATES, JACOBIANS, OVERHEAD = "gates again", "Jacobians written out", "overhead"


class Marks:
    """A solver that marks on a clock when gates are there, and when Jacobians are as the paper's scan takes them."""

    safe = True

    def __init__(self, clock: PhaseClock) -> None:
        self._clock, self._solver = clock, parse_solver("sequential")

    def solve(self, jacobians: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        self._clock.mark()
        jacobians.dense()
        self._clock.mark()
        return self._solver.solve(jacobians, gradient)


def overhead(settings: RecurrentSettings, inputs: Tensor) -> list[Row]:
    """Time that the Jacobians of a network's layer add to torch.nn's forward pass, in %, and the parts of ours in ms.

    The paper has all of it in the forward pass; ours records less there, and does the rest before the scan.
    """
    layer, (batch_size, length) = recurrent.network(settings, inputs, inputs.device).recurrent, inputs.shape[:2]
    clocks = {name: PhaseClock(inputs.device) for name in (PLAIN_ALONE, ALONE)}
    ways: dict[str, str | Solver] = {PLAIN_ALONE: BASELINE, ALONE: Marks(clocks[ALONE])}
    loops = {name: recurrent.LayerLoop(ways[name], layer, length, batch_size, clock) for name, clock in clocks.items()}
    blocks = {name: partial(loop.block, settings.steps) for name, loop in loops.items()}
    times = interleave(blocks, settings.rounds, settings.warmup_rounds)
    plain = [block[0] for block in times[PLAIN_ALONE]]
    parts = {
        "forward": [block[0] for block in times[ALONE]],
        # a long backward pass goes in windows of one size: of each gates, Jacobians, and all up to the next Jacobians
        GATES: [block[1] * (len(block) // 2 - 1) for block in times[ALONE]],
        JACOBIANS: [sum(block[2:-2:2]) for block in times[ALONE]],
    }
    percent = [100 * (sum(ours) / before - 1) for before, *ours in zip(plain, *parts.values(), strict=True)]
    rows = [Row(ALONE, part, "ms", values) for part, values in parts.items()]
    return [Row(PLAIN_ALONE, "forward", "ms", plain), *rows, Row(ALONE, OVERHEAD, "%", percent)]


def against_overhead(point: Point) -> list[Comparison]:
    """Table 6's overhead, if it has one there, beside ours and the parts of ours."""
    what = TABLES["Table 6"].format(**point.at)
    seconds = paper("bppsa").tables["Table 6"].get(what)
    if seconds is None or not point.has(ALONE, OVERHEAD):
        return []
    percent, whole = 100 * (seconds[3] / seconds[0] - 1), point.median(PLAIN_ALONE, "forward")
    shares = (f"{part} {100 * point.median(ALONE, part) / whole:.0f} %" for part in ("forward", GATES, JACOBIANS))
    theirs = Claim("bppsa", "Table 6", "%", percent, f"{what}, overhead ({TABLES_OF})")
    words = f"{what}: {', '.join(shares)} of torch.nn's forward pass"
    return [compared(theirs, point.spread(ALONE, OVERHEAD), words)]


TABLES = {"Table 4": "RNN, T={T}, B=16", "Table 5": "RNN, T=1000, B={B}", "Table 6": "GRU, {features}, B={B}"}
TABLES_OF = "V100"
BELOW: Any = {"fontsize": 7, "loc": "upper center", "bbox_to_anchor": (0.5, -0.13), "ncols": 2, "frameon": False}
PASSED = "Ours can pass that bound: its forward pass records no graph of every time step, so it is faster as well."
EPOCHS = "Tables 4 to 6 give seconds an epoch; their ratios stand beside ours, which are ratios of steps."


def published(table: str, point: Point) -> dict[str, Claim]:
    """Claims of one of the paper's tables at a point, by phase."""
    return of_epochs(table, TABLES[table].format(**point.at))


def most(result: Result, figure: str) -> list[Comparison]:
    """The largest speedups over all points and variants beside the paper's largest."""
    lines = []
    for phase, which in (("backward", "backward"), ("step", "overall")):
        speeds = [(ratio(point, name, phase), point, name) for point in result.points for name in scans(point)]
        best = max(((s, p, n) for s, p, n in speeds if s), key=lambda entry: entry[0].median, default=None)
        over, note = (best[0], f"{label_of(best[1].at)}, {label(best[2], best[1])}") if best else (None, "")
        lines.append(Comparison(claim(f"{figure}-{which}"), over, note))
    return lines


def against(point: Point, table: str) -> list[Comparison]:
    """A table's row, if there is one, beside the fastest of our variants at that point."""
    ours = point.fastest(scans(point), "step")
    rows = published(table, point).items() if ours else ()
    return [Comparison(theirs, ratio(point, str(ours), phase), label(str(ours), point)) for phase, theirs in rows]


def bounds(result: Result) -> list[str]:
    """Closeness of each point to a backward pass that takes no time; a scan leaves the forward pass alone."""
    lines = []
    for point in result.points:
        ours = point.fastest(scans(point), "step")
        if ours and point.has(BASELINE, "step"):
            whole, backward = (point.values(BASELINE, phase) for phase in ("step", "backward"))
            possible = speedup(whole, [a - b for a, b in zip(whole, backward, strict=True)])
            reached = show(point.speedup(BASELINE, ours, "step"), "x")
            lines.append(
                f"- {label_of(point.at)}: step {reached} over torch.nn; with torch.nn's forward pass and a backward "
                f"pass that took no time it would be {show(possible, 'x')}"
            )
    return [*lines, PASSED] if lines else []


def worst_difference(result: Result) -> str:
    """A sentence on the gradients of all points."""
    ending = ": largest gradient difference from torch.nn, relative"
    differences = [value for point in result.points for key, value in point.facts.items() if key.endswith(ending)]
    return f"Largest relative difference of any gradient from torch.nn's, float32: {max(differences, default=0.0):.1g}."


def along(result: Result, axis: str) -> list[Point]:
    """The points along T or B, at the other one's value that most share; B falls, as the fraction of a device rises."""
    fixed = "B" if axis == "T" else "T"
    values = [point.at[fixed] for point in result.points]
    shared = max(values, key=lambda value: (values.count(value), value))
    points = [point for point in result.points if point.at[fixed] == shared]
    points.sort(key=lambda point: int(point.at[axis]), reverse=axis == "B")
    return points if len(points) > 1 else []


def draw_speedups(axes: Any, points: list[Point], places: list[float], table: str) -> None:
    """Panels b and e: speedup of the backward pass, and of the whole step beside it; the paper's hollow."""
    index = 0
    rows = [(place, row) for place, point in zip(places, points, strict=True) if (row := published(table, point))]
    for colour, marker, phase in zip(charts.COLOURS, "os", ("backward", "step"), strict=False):
        theirs = [row[phase].value for _, row in rows]
        text = f"the paper's ({TABLES_OF}): {'whole step' if phase == 'step' else phase}"
        axes.plot([x for x, _ in rows], theirs, marker, markerfacecolor="none", color=colour, label=text)
    for name in scans(points[0]):
        for phase in ("backward", "step"):
            text = f"{label(name)}: {'whole step' if phase == 'step' else phase}"
            values = [ratio(point, name, phase) for point in points]
            charts.points_with_spread(axes, places, values, text, index, line=True)
            index += 1
    charts.even_line(axes, "torch.nn")
    axes.set_ylabel("speedup over torch.nn (x)")


def draw_breakdown(axes: Any, points: list[Point], names: list[str], table: str) -> None:
    """Panels c and f, and Figure 9: phases of a step as parts of torch.nn's step, torch.nn's bar beside ours.

    A hollow circle is the paper's whole step.
    """
    for number, point in enumerate(points):
        row = published(table, point)
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
