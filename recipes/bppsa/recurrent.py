"""BPPSA's recurrent recipes: a network with torch.nn's backward pass and with ours, timed; and our own targets.

A variant is "baseline", torch.nn's own module (cuDNN's on a GPU), "moved", the same from weights moved by rounding, or
the name of a solver, with which `convert` changes the same module. Forward values are the same bits on CPU; only the
backward pass through time differs.

`bppsa_targets` (:class:`Targets`) has what this project wants the scan over time to reach, each case with its numbers:
a recurrent layer alone, with a gradient at every step's output. Cases of kind `speed` time one shape; a case of kind
`grid` times `solver="auto"` against torch.nn over shapes, where it should never lose.
"""

import copy
import itertools
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from retime.foundations.measure import Spread, speedup, spread
from retime.mechanisms.scan import Solver, choose_solver
from retime.modules import convert
from retime.recipes.bppsa.settings import RecurrentSettings
from retime.recipes.bppsa.training import Batch
from retime.recipes.core import charts, results
from retime.recipes.core.build import build_batches, build_model, loss_of
from retime.recipes.core.claims import Comparison, Target, paper
from retime.recipes.core.measure import PhaseClock, interleave, middle_step
from retime.recipes.core.recipe import CaseRecipe, Measured, Recipe, Tick
from retime.recipes.core.results import Point, Result, Row, phase_rows, titled
from retime.recipes.fusion.variants import PHASES, VARIANTS, BareLoop
from retime.recipes.models.recurrent import CELLS

BASELINE, OURS, MOVED = "baseline", "auto", "moved"
SHIFT = 1e-7
"""By which part the control changes its weights before training: about one rounding of float32."""
TIMES = (*PHASES, "step")
LABELS = {
    BASELINE: "torch.nn",
    MOVED: f"torch.nn, weights changed by {SHIFT:g}",
    "auto": "auto: a scan or one loop",
    "sequential": "one loop (sequential)",
    "torch's own": "torch's own",
    "chunk": "scan, chunk",
    "blelloch": "scan, Blelloch (the paper's)",
}
RAN = "auto ran"
"""Fact of a point: the solver that `auto` took there."""


class TrainingLoop(BareLoop):
    """A variant's own copy of a network and its optimizer, in a bare loop whose phases are timed."""

    def __init__(self, variant: str, model: nn.Module, optimizer: dict[str, Any], batch: Batch) -> None:
        model = copy.deepcopy(model)
        if variant == MOVED:
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(1 + SHIFT)
        elif variant != BASELINE:
            convert(model, solver=variant)
        super().__init__(VARIANTS["baseline"], model, batch, optimizer)

    def gradients(self, batch: Batch) -> list[Tensor]:
        loss = loss_of(self.model(batch[0]), batch[1])
        return list(torch.autograd.grad(loss, list(self.model.parameters())))


class Recurrent(Recipe[RecurrentSettings]):
    """A recipe whose points are step times of the variants."""

    def turns(self, settings: RecurrentSettings) -> int | None:
        return len(settings.variants)

    def time(
        self, settings: RecurrentSettings, tick: Tick, data: dict[str, Any], batch_size: int, steps: int
    ) -> Measured:
        """Milliseconds of each phase and of the whole step, a value a round, for every variant."""
        device = torch.device(settings.hardware.device)
        (batch,) = build_batches(data, batch_size, 1, device)
        model = network(settings, batch[0], device)
        loops = {name: TrainingLoop(name, model, settings.optimizer, batch) for name in settings.variants}
        facts: dict[str, Any] = {"data": data["_target_"].rsplit(".", 1)[-1], "time steps": batch[0].shape[1]}
        for name, difference in gradient_differences(loops, batch).items():
            facts[f"{name}: largest gradient difference from torch.nn, relative"] = difference
        if OURS in loops:
            facts[RAN] = solver_taken(model.recurrent, batch[0].transpose(0, 1))
        blocks = {name: partial(loop.block, steps) for name, loop in loops.items()}
        times = interleave(blocks, settings.rounds, settings.warmup_rounds, tick)
        return Measured(phase_rows(times, TIMES), facts)

    def references(self, point: Point) -> dict[str, str]:
        return {"speed over torch.nn": BASELINE}


def network(settings: RecurrentSettings, inputs: Tensor, device: torch.device) -> nn.Module:
    """The network for sequences like `inputs`, with weights that depend on the seed alone."""
    return build_model({**settings.model, "input_size": inputs.shape[-1]}, device, settings.seed)


def gradient_differences(loops: dict[str, TrainingLoop], batch: Batch) -> dict[str, float]:
    """Per variant: the largest difference from torch.nn's gradients, relative to the largest of each parameter's."""
    expected = loops[BASELINE].gradients(batch)
    tiny = torch.finfo(expected[0].dtype).tiny

    def apart(loop: TrainingLoop) -> float:
        pairs = zip(loop.gradients(batch), expected, strict=True)
        return max(float((mine - plain).abs().max() / plain.abs().max().clamp(min=tiny)) for mine, plain in pairs)

    return {name: float(f"{apart(loop):.2g}") for name, loop in loops.items() if name != BASELINE}


def ratio(point: Point, variant: str, phase: str) -> Spread | None:
    """Speed of a variant's phase over torch.nn's; None if one was not measured."""
    return results.ratio(point, BASELINE, variant, phase)


def scans(point: Point) -> list[str]:
    """The variants other than torch.nn's, in the order they were measured."""
    return [name for name in point.variants("step") if name not in (BASELINE, MOVED)]


def label(variant: str, point: Point | None = None) -> str:
    """Name of a variant; `auto` by the solver that ran, at a point that says which."""
    ran = point.facts.get(RAN) if point is not None and variant == OURS else None
    return f"auto: {label(ran)}" if ran else LABELS.get(variant, f"scan, {variant}")


def solver_taken(layer: Any, inputs: Tensor) -> str:
    """The solver that "auto" takes for a recurrent layer on sequences ``[T, B, features]``."""
    state = inputs.new_empty(1, inputs.shape[1], layer.hidden_size)
    return str(choose_solver(OURS, layer.mode, inputs, state) or "torch's own")


PLAIN_MS, SCAN_MS, RATIO = "torch.nn", "scan, auto", "speed"
BLOCK_MS = 30.0
"""A block of the grid repeats short steps, up to 50, for about so long."""


class LayerLoop:
    """Forward and backward pass of a recurrent layer, timed; no optimizer, no loss."""

    def __init__(self, variant: str | Solver, layer: Any, length: int, batch_size: int, clock: PhaseClock) -> None:
        self._layer = copy.deepcopy(layer)
        if variant != BASELINE:
            convert(self._layer, solver=variant)
        device, random = layer.weight_hh_l0.device, torch.Generator().manual_seed(0)
        sizes = (batch_size, length) if layer.batch_first else (length, batch_size)
        self._inputs = torch.randn(*sizes, layer.input_size, generator=random).to(device)
        self._gradient = torch.randn(*sizes, layer.hidden_size, generator=random).to(device)
        self._clock = clock

    def step(self) -> None:
        self._layer.zero_grad()
        self._clock.start()
        outputs = self._layer(self._inputs)[0]
        self._clock.mark()
        outputs.backward(self._gradient)
        self._clock.mark()

    def block(self, steps: int) -> list[float]:
        """Times in ms of the typical one of `steps` steps: forward, backward, both.

        Several steps follow one that is not counted; a single one is long enough to go without.
        """
        uncounted = int(steps > 1)
        for _ in range(uncounted + steps):
            self.step()
        return middle_step(self._clock.steps_ms()[uncounted:])


class Targets(CaseRecipe[RecurrentSettings], Recurrent):
    """The speed rows of the project's table, a case each."""

    def points(self, settings: RecurrentSettings) -> list[dict[str, Any]]:
        here = settings.hardware.name
        return [{"case": name} for name, case in settings.cases.items() if case.get("hardware", here) == here]

    def blocks(self, settings: RecurrentSettings) -> int | None:
        return None

    def measure(self, settings: RecurrentSettings, at: dict[str, Any], tick: Tick) -> Measured:
        case = dict(settings.cases[at["case"]])
        case.pop("hardware", None)
        kind = case.pop("kind", "speed")
        if kind == "grid":
            return self._grid(settings, tick, **case)
        if kind != "speed":
            raise ValueError(f"cases.{at['case']}.kind={kind!r} is unknown: choose speed or grid")
        return self._speed(settings, tick, **case)

    def _speed(
        self, settings: RecurrentSettings, tick: Tick, cell: str, length: int, batch_size: int, hidden_size: int = 20
    ) -> Measured:
        device = torch.device(settings.hardware.device)
        start = layer(cell, hidden_size, settings.seed, device)
        loops = {name: LayerLoop(name, start, length, batch_size, PhaseClock(device)) for name in settings.variants}
        blocks = {name: partial(loop.block, settings.steps) for name, loop in loops.items()}
        times = interleave(blocks, settings.rounds, settings.warmup_rounds, tick)
        rows = phase_rows(times, ("forward", "backward", "step"))
        return Measured(rows, {"shape": f"{cell}, T={length}, B={batch_size}, H={hidden_size}"})

    def _grid(
        self,
        settings: RecurrentSettings,
        tick: Tick,
        cell: str,
        lengths: list[int],
        batch_sizes: list[int],
        hidden_sizes: list[int],
        most_states: int,
    ) -> Measured:
        """Whole steps of torch.nn and of `auto` at every shape with at most `most_states` = T B H numbers of state."""
        device = torch.device(settings.hardware.device)
        rows: list[Row] = []
        left_out, chosen = [], {}
        for length, batch_size, hidden_size in itertools.product(lengths, batch_sizes, hidden_sizes):
            place = f"T={length} B={batch_size} H={hidden_size}"
            if length * batch_size * hidden_size > most_states:
                left_out.append(place)
                continue
            start = layer(cell, hidden_size, settings.seed, device)
            loops = {name: LayerLoop(name, start, length, batch_size, PhaseClock(device)) for name in (BASELINE, OURS)}
            loops[BASELINE].block(1)
            steps = max(1, min(50, round(BLOCK_MS / loops[BASELINE].block(1)[-1])))
            blocks = {name: partial(loop.block, steps) for name, loop in loops.items()}
            kept = interleave(blocks, settings.rounds, settings.warmup_rounds)
            plain, ours = ([block[-1] for block in kept[name]] for name in (BASELINE, OURS))
            rows.append(Row(place, PLAIN_MS, "ms", [round(value, 5) for value in plain]))
            rows.append(Row(place, SCAN_MS, "ms", [round(value, 5) for value in ours]))
            rows.append(Row(place, RATIO, "x", [round(value, 5) for value in speedup(plain, ours).rounds]))
            chosen[place] = solver_taken(start, torch.empty(length, batch_size, hidden_size, device=device))
            tick(place)
        return Measured(rows, {"auto chose": chosen, "left out, more states than most_states": left_out})

    def references(self, point: Point) -> dict[str, str]:
        return {} if speeds_of(point) else super().references(point)

    def compare(self, result: Result) -> list[Comparison]:
        lines = []
        for point in result.points:
            if speeds := speeds_of(point):
                what = f"{point.at['case']}: auto over torch.nn, whole step, at the worst shape"
                lines.append(Comparison(Target(what, "x", wanted("grid")), speeds[0].spread, speeds[0].variant))
                continue
            for phase, least in wanted("layers").get(point.at["case"], {}).items():
                text = "whole step" if phase == "step" else phase
                target = Target(f"{point.facts['shape']}: {text} over torch.nn's", "x", least)
                lines.append(Comparison(target, ratio(point, OURS, phase), label(OURS)))
        return lines

    def notes(self, result: Result) -> list[str]:
        lines = []
        for point in result.points:
            speeds, least = [row.spread.median for row in speeds_of(point)], wanted("grid")
            if speeds:
                lost = sum(speed < least for speed in speeds)
                lines.append(
                    f"- {point.at['case']}: {len(speeds)} shapes, {lost} below {least} x, median "
                    f"{spread(speeds).median:.2f} x, best {max(speeds):.1f} x"
                )
        return lines

    def draw(self, result: Result, path: Path) -> None:
        speeds = [point for point in result.points if not speeds_of(point)]
        grids = [point for point in result.points if speeds_of(point)]
        drawing, (cases, shapes) = charts.panels(titled(result), 2, width=13)
        for index, phase in enumerate(("backward", "step")):
            places = [place + 0.25 * (index - 0.5) for place in range(len(speeds))]
            text = "whole step" if phase == "step" else phase
            charts.points_with_spread(cases, places, [ratio(point, OURS, phase) for point in speeds], text, index)
            for where, point in zip(places, speeds, strict=True):
                if (least := wanted("layers").get(point.at["case"], {}).get(phase)) is not None:
                    cases.hlines(least, where - 0.1, where + 0.1, color=charts.COLOURS[index], linewidth=3, alpha=0.5)
        cases.plot([], [], color=charts.GREY, linewidth=3, alpha=0.6, label="wanted at least")
        cases.set_xticks(range(len(speeds)), [p.facts["shape"] for p in speeds], fontsize=7, rotation=20, ha="right")
        cases.set_ylabel("speedup over torch.nn (x)")
        for index, point in enumerate(grids):
            values = [row.spread for row in speeds_of(point)]
            charts.points_with_spread(shapes, list(range(len(values))), values, str(point.at["case"]), index)
        shapes.axhline(wanted("grid"), color=charts.GREY, linewidth=2.5, alpha=0.6, label="wanted at least")
        shapes.set_xlabel("shapes (T, B, H) of the grid, by speed")
        shapes.set_ylabel('whole step with solver="auto" over torch.nn (x)')
        for axes in (cases, shapes):
            axes.set_yscale("log")
            charts.plain_numbers(axes.yaxis)
            charts.even_line(axes, "torch.nn")
            axes.legend(fontsize=8)
        charts.save(drawing, path)


def wanted(name: str) -> Any:
    """Target of the scan over time: the least speeds over torch.nn, of layers or at every shape of a grid."""
    return paper("bppsa").targets[name]


def layer(cell: str, hidden_size: int, seed: int, device: torch.device) -> nn.RNNBase:
    """A recurrent layer with as many inputs as hidden units."""
    torch.manual_seed(seed)
    module: nn.RNNBase = CELLS[cell](hidden_size, hidden_size)
    return module.to(device)


def speeds_of(point: Point) -> list[Row]:
    """Speedups of `auto` at each shape of a grid, the least first; none at other points."""
    return sorted((row for row in point.rows if row.quantity == RATIO), key=lambda row: row.spread.median)
