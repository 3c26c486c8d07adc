"""A step's memory: `fusion_memory` its peak, `fusion_gradient_place` what the place of gradients decides.

Peak memory (:class:`PeakMemory`) against the number of parameters, a fresh process for each number. On a CPU it is the
growth of the process's peak resident size (the kernel's VmHWM, reset between phases) over the same process before the
model existed; on CUDA the allocator's peak. So that freed memory leaves the resident size at once, the C library is
told to give tensors pages of their own.

How much a fused update can gain on a CPU (:class:`GradientPlace`): backward fusion saves the gradients' way through
memory, as each is updated from while it lies in the cache. How much that is depends on where the next gradient is
written. The same linear layers run by hand, without autograd, so that the place can be chosen: the arithmetic is the
same in all variants.
"""

from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from retime.foundations.torch_private.nn_and_optim import fused_adamw
from retime.foundations.workers import answer_once
from retime.recipes.core import charts
from retime.recipes.core.build import build_batches, build_model
from retime.recipes.core.claims import amount, show
from retime.recipes.core.measure import MALLOC, PhaseClock, interleave, middle_step
from retime.recipes.core.recipe import Measured, Recipe, Tick
from retime.recipes.core.results import Point, Result, Row, titled
from retime.recipes.fusion.figures import label
from retime.recipes.fusion.settings import FusionSettings
from retime.recipes.fusion.variants import VARIANTS, BareLoop, choose_variants, serve

MIB = 2**20
FIRST, LATER, GRADIENTS = "peak of the first step", "peak of later steps", "gradients alive"
_ADAMW: dict[str, Any] = {"lr": 1e-3, "beta1": 0.9, "beta2": 0.999, "weight_decay": 0.01, "eps": 1e-8}
_ADAMW |= {"amsgrad": False, "maximize": False}


class PeakMemory(Recipe[FusionSettings]):
    """`fusion_memory`: one point for each entry of `sizes`, the model's depth."""

    over = (("depth", "sizes"),)
    quantity = LATER

    def blocks(self, settings: FusionSettings) -> int | None:
        return len(choose_variants(settings.variants)) * settings.rounds

    def measure(self, settings: FusionSettings, at: dict[str, Any], tick: Tick) -> Measured:
        measured: dict[tuple[str, str], list[float]] = {}
        facts: dict[str, Any] = {}
        models = {"model": {**settings.model, "depth": at["depth"]}, "small_model": {**settings.model, "depth": 1}}
        for _ in range(settings.rounds):
            for name in settings.variants:
                request = {**asdict(settings), **models, "variant": name, "device": settings.hardware.device}
                reply = answer_once(serve, request, environment=MALLOC)
                for quantity, key in ((FIRST, "first_bytes"), (LATER, "later_bytes"), (GRADIENTS, "gradient_bytes")):
                    measured.setdefault((name, quantity), []).append(reply[key] / MIB)
                facts = {"parameters": reply["parameters"], "measured by": reply["source"]}
                tick(name)
        return Measured([Row(name, quantity, "MiB", values) for (name, quantity), values in measured.items()], facts)

    def notes(self, result: Result) -> list[str]:
        biggest = max(result.points, key=lambda point: int(point.facts["parameters"]))
        weights = 4 * biggest.facts["parameters"] / MIB
        sizes = {name: amount(biggest.median(name, LATER) / weights, "x") for name in biggest.variants(LATER)}
        return [
            "Bytes above the same process before it built the model; a fresh process for each value.",
            *(f"- {label(name)}: {size} the bytes of the weights at the largest model" for name, size in sizes.items()),
        ]

    def draw(self, result: Result, path: Path) -> None:
        points = sorted(result.points, key=lambda point: int(point.facts["parameters"]))
        drawing, panels = charts.panels(titled(result), 2, sharey=True)
        for axes, quantity in zip(panels, (LATER, FIRST), strict=True):
            for index, name in enumerate(points[0].variants(quantity)):
                measured = [point for point in points if point.has(name, quantity)]
                shift = 0.3 * (index - 1.5)  # millions: two and two variants take the same, and all are to be seen
                places = [point.facts["parameters"] / 1e6 + shift for point in measured]
                values = [point.spread(name, quantity) for point in measured]
                charts.points_with_spread(axes, places, values, label(name), index, line=True)
            noted = f"{quantity}; forward fusion has updated nothing yet" if quantity == FIRST else quantity
            axes.set_title(noted, fontsize=10)
            axes.set_xlabel("parameters (millions)")
            axes.set_ylim(bottom=0)
        panels[0].set_ylabel("memory above the process without a model (MiB)")
        panels[0].legend(fontsize=8)
        charts.save(drawing, path)


AFTER, OWN, ROTATING, SAME = "after the backward pass", "at once, a place each", "at once, 3 places", "at once, 1 place"
PLACES = {AFTER: (False, None), OWN: (True, None), ROTATING: (True, 3), SAME: (True, 1)}
"""By variant: whether a layer is updated as soon as its gradient is there, and over how many buffers gradients go."""


class LinearChain:
    """Forward, backward and AdamW of `depth` linear layers of `width`, with weight gradients written where we say."""

    def __init__(self, depth: int, width: int, batch_size: int, at_once: bool, places: int | None, seed: int) -> None:
        random = torch.Generator().manual_seed(seed)
        self._weights = [torch.randn(width, width, generator=random) / width**0.5 for _ in range(depth)]
        self._first = [torch.zeros(width, width) for _ in range(depth)]
        self._second = [torch.zeros(width, width) for _ in range(depth)]
        self._steps = [torch.tensor(0.0) for _ in range(depth)]
        buffers = [torch.zeros(width, width) for _ in range(places or depth)]
        self._gradients = [buffers[layer % len(buffers)] for layer in range(depth)]
        self._inputs = torch.randn(batch_size, width, generator=random)
        self._at_once = at_once
        self._clock = PhaseClock(torch.device("cpu"))

    def step(self) -> None:
        self._clock.start()
        outputs = [self._inputs]
        for weight in self._weights:
            outputs.append(torch.relu(outputs[-1] @ weight.t()))
        gradient = outputs[-1] / outputs[-1].numel()
        for layer in reversed(range(len(self._weights))):
            gradient = gradient * (outputs[layer + 1] > 0)
            torch.mm(gradient.t(), outputs[layer], out=self._gradients[layer])
            gradient = gradient @ self._weights[layer]
            if self._at_once:
                self._update([layer])
        if not self._at_once:
            self._update(range(len(self._weights)))
        self._clock.mark()

    def _update(self, layers: Sequence[int]) -> None:
        def of(series: list[Tensor]) -> list[Tensor]:
            return [series[layer] for layer in layers]

        steps = of(self._steps)
        for step in steps:
            step += 1
        fused_adamw(of(self._weights), of(self._gradients), of(self._first), of(self._second), [], steps, **_ADAMW)

    def block(self, steps: int) -> float:
        """Milliseconds of the typical one of `steps` steps after one that is not counted."""
        for _ in range(steps + 1):
            self.step()
        return middle_step(self._clock.steps_ms()[1:])[-1]


class GradientPlace(Recipe[FusionSettings]):
    """One point a batch size."""

    over = (("batch_size", "batch_sizes"),)
    on_cpu = "asks about a CPU's caches"

    def turns(self, settings: FusionSettings) -> int | None:
        return len(PLACES)

    def references(self, point: Point) -> dict[str, str]:
        return {"speed over updates after the backward pass": AFTER}

    def measure(self, settings: FusionSettings, at: dict[str, Any], tick: Tick) -> Measured:
        depth, width = settings.model["depth"], settings.model["width"]
        chains = {
            name: LinearChain(depth, width, at["batch_size"], *how, seed=settings.seed) for name, how in PLACES.items()
        }
        blocks = {name: partial(chain.block, settings.steps) for name, chain in chains.items()}
        times = interleave(blocks, settings.rounds, settings.warmup_rounds, tick)
        rows = [Row(name, "step", "ms", [round(value, 5) for value in values]) for name, values in times.items()]
        places = places_in_practice(settings, at["batch_size"])
        return Measured(rows, {"weight gradients of a step": depth, "places they had in a real step of ours": places})

    def notes(self, result: Result) -> list[str]:
        lines = []
        for point in result.points:
            size = point.at["batch_size"]
            for name in (SAME, ROTATING, OWN):
                gain = point.speedup(AFTER, name, "step")
                lines.append(f"- batch {size}, updates {name}: {show(gain, 'x')} over updates after the backward pass")
            places = point.facts["places they had in a real step of ours"]
            lines.append(
                f"- batch {size}: torch's allocator gave the {point.facts['weight gradients of a step']} weight "
                f"gradients of a step {places} different places under retime's backward fusion; only with 1 does a "
                "gradient stay in the cache for the next one"
            )
        return lines

    def draw(self, result: Result, path: Path) -> None:
        drawing, axes = charts.figure(titled(result), width=9)
        ways = (OWN, ROTATING, SAME)
        gains = [(f"updated {way}", [point.speedup(AFTER, way, "step") for point in result.points]) for way in ways]
        charts.beside(axes, gains, 0.2)
        charts.even_line(axes, "updated after the backward pass")
        axes.set_xticks(range(len(result.points)), [f"batch {point.at['batch_size']}" for point in result.points])
        axes.set_xlim(-0.6, len(result.points) - 0.4)
        axes.set_ylabel("steps per second against\nupdates after the backward pass (x)")
        charts.legend_beside(axes)
        charts.save(drawing, path)


def places_in_practice(settings: FusionSettings, batch_size: int) -> int:
    """Number of addresses of one step's weight gradients under backward fusion, in a bare loop under autograd."""
    (batch,) = build_batches(settings.data, batch_size, 1, torch.device("cpu"))
    model = build_model(settings.model, torch.device("cpu"), settings.seed)
    seen: set[int] = set()
    for parameter in model.parameters():
        if parameter.ndim > 1:
            parameter.register_hook(lambda gradient: seen.add(gradient.data_ptr()))  # type: ignore[no-untyped-call]
    loop = BareLoop(VARIANTS["retime_backward"], model, batch, settings.optimizer)
    for _ in range(5):
        seen.clear()
        loop.step()
    return len(seen)
