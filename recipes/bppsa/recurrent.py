"""The common part of BPPSA's recurrent recipes: the same network with torch.nn's backward pass and with ours, timed.

A variant is "baseline", torch.nn's own module (cuDNN's on a GPU), "moved", the same from weights moved by rounding, or
the name of a solver, with which `convert` changes the same module. Forward values are the same bits on CPU; only the
backward pass through time differs.
"""

import copy
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from retime.foundations.measure import Spread, speedup, spread
from retime.mechanisms.scan import choose_solver
from retime.modules import convert
from retime.recipes.bppsa.settings import RecurrentSettings
from retime.recipes.core import results
from retime.recipes.core.build import build_batches, build_model, build_optimizer, loss_of
from retime.recipes.core.measure import PhaseClock, interleave, middle_step
from retime.recipes.core.recipe import Measured, Recipe, Tick
from retime.recipes.core.results import Point, Result, phase_rows

BASELINE, OURS, MOVED = "baseline", "auto", "moved"
SHIFT = 1e-7
"""By which part the control changes its weights before training: about one rounding of float32."""
PHASES = ("forward", "backward", "optimizer")
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
Batch = tuple[Tensor, Tensor]


class TrainingLoop:
    """A variant's own copy of a network and its optimizer, in a bare loop whose phases are timed."""

    def __init__(self, variant: str, model: nn.Module, optimizer: dict[str, Any], device: torch.device) -> None:
        self.model = copy.deepcopy(model)
        if variant == MOVED:
            with torch.no_grad():
                for parameter in self.model.parameters():
                    parameter.mul_(1 + SHIFT)
        elif variant != BASELINE:
            convert(self.model, solver=variant)
        self._optimizer = build_optimizer(optimizer, self.model.parameters(), {})
        self._clock = PhaseClock(device)

    def step(self, batch: Batch) -> Tensor:
        """One training step; its loss, detached."""
        self._clock.start()
        loss = loss_of(self.model(batch[0]), batch[1])
        self._clock.mark()
        loss.backward()  # type: ignore[no-untyped-call]
        self._clock.mark()
        self._optimizer.step()
        self._optimizer.zero_grad()
        self._clock.mark()
        return loss.detach()

    def block(self, batch: Batch, steps: int) -> list[float]:
        """Times in ms of the typical one of `steps` steps after one that is not counted: phases, then the whole."""
        for _ in range(steps + 1):
            self.step(batch)
        return middle_step(self._clock.steps_ms()[1:])

    def times_ms(self) -> list[list[float]]:
        """The phases of each step since the last call."""
        return self._clock.steps_ms()

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
        loops = {name: TrainingLoop(name, model, settings.optimizer, device) for name in settings.variants}
        facts: dict[str, Any] = {"data": data["_target_"].rsplit(".", 1)[-1], "time steps": batch[0].shape[1]}
        for name, difference in gradient_differences(loops, batch).items():
            facts[f"{name}: largest gradient difference from torch.nn, relative"] = difference
        if OURS in loops:
            facts[RAN] = solver_taken(model, batch)
        blocks = {name: partial(loop.block, batch, steps) for name, loop in loops.items()}
        times = interleave(blocks, settings.rounds, settings.warmup_rounds, tick)
        return Measured(phase_rows(times, TIMES), facts)

    def references(self, point: Point) -> dict[str, str]:
        return {"speed over torch.nn": BASELINE}


def network(settings: RecurrentSettings, inputs: Tensor, device: torch.device) -> nn.Module:
    """The network for sequences like `inputs`, with weights that depend on the seed alone."""
    return build_model({**settings.model, "input_size": inputs.shape[-1]}, device, settings.seed)


def gradient_differences(loops: dict[str, TrainingLoop], batch: Batch) -> dict[str, float]:
    """Per variant: the largest difference from torch.nn's gradients, relative to the largest of each parameter's."""
    if BASELINE not in loops:
        return {}
    expected = loops[BASELINE].gradients(batch)
    found = {}
    for name, loop in loops.items():
        if name != BASELINE:
            pairs = zip(loop.gradients(batch), expected, strict=True)
            tiny = torch.finfo(expected[0].dtype).tiny
            found[name] = max(
                float((mine - plain).abs().max() / plain.abs().max().clamp(min=tiny)) for mine, plain in pairs
            )
    return {name: float(f"{value:.2g}") for name, value in found.items()}


def steps_for(settings: RecurrentSettings, sequence_length: int) -> int:
    """Steps of a block: `settings.steps` at 1000 time steps, up to 20 times as many at fewer, at least one at more."""
    return max(1, min(20 * settings.steps, round(settings.steps * 1000 / sequence_length)))


def ratio(point: Point, variant: str, phase: str) -> Spread | None:
    """How many times faster a variant's phase is than torch.nn's; None if one was not measured."""
    return results.ratio(point, BASELINE, variant, phase)


def scans(point: Point) -> list[str]:
    """The variants other than torch.nn's, in the order they were measured."""
    return [name for name in point.variants("step") if name not in (BASELINE, MOVED)]


def label(variant: str, point: Point | None = None) -> str:
    """What a variant is called; `auto` by the solver that ran, at a point that says which."""
    ran = point.facts.get(RAN) if point is not None and variant == OURS else None
    return f"auto: {label(ran)}" if ran else LABELS.get(variant, f"scan, {variant}")


def solver_taken(network: nn.Module, batch: Batch) -> str:
    """The solver that "auto" takes for a network's recurrent layer on a batch of sequences ``[B, T, features]``."""
    layer: Any = network.recurrent
    inputs = batch[0].transpose(0, 1)
    state = inputs.new_empty(1, inputs.shape[1], layer.hidden_size)
    solver = choose_solver(OURS, layer.mode, inputs, state)
    return "torch's own" if solver is None else str(solver)


def best_scan(point: Point, phase: str = "step") -> str | None:
    """The variant with the fastest phase."""
    return min(scans(point), key=lambda name: spread(point.values(name, phase)).median, default=None)


def bound(point: Point) -> Spread | None:
    """How many times faster a step would be if the backward pass took no time; a scan leaves the forward pass alone."""
    if not point.has(BASELINE, "step"):
        return None
    rest = [a - b for a, b in zip(point.values(BASELINE, "step"), point.values(BASELINE, "backward"), strict=True)]
    return speedup(point.values(BASELINE, "step"), rest)


def worst_difference(result: Result) -> str:
    """A sentence on the gradients of all points."""
    ending = ": largest gradient difference from torch.nn, relative"
    found = [value for point in result.points for key, value in point.facts.items() if key.endswith(ending)]
    return f"Largest relative difference of any gradient from torch.nn's, float32: {max(found, default=0.0):.1g}."
