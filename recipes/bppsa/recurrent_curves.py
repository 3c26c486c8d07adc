"""Loss against wall-clock time with both backward passes: Figure 7 (RNN on bitstreams), Figure 13 (GRU on IRMAS)."""

import copy
import itertools
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset, default_collate

from retime.recipes.bppsa import claims
from retime.recipes.bppsa.recurrent import (
    BASELINE,
    MOVED,
    OURS,
    RAN,
    TIMES,
    Batch,
    Recurrent,
    TrainingLoop,
    label,
    network,
    ratio,
    scans,
    solver_taken,
)
from retime.recipes.bppsa.settings import RecurrentSettings
from retime.recipes.core import charts
from retime.recipes.core.build import build
from retime.recipes.core.claims import Claim, Comparison, amount
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
        return {"step": claims.claim("figure-7-overall"), "backward": claims.claim("figure-7-backward")}

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
        return claims.of_epochs("Table 6", f"GRU, {point.at['features']}, B=16")


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
