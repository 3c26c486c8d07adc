"""Peak memory of a training step against the number of parameters, a fresh process for each number.

On a CPU it is the growth of the process's peak resident size (the kernel's VmHWM, reset between phases) over the same
process before the model existed; on CUDA the allocator's peak. So that freed memory leaves the resident size at once,
the C library is told to give tensors pages of their own.
"""

from dataclasses import asdict
from pathlib import Path
from typing import Any

from retime.foundations.measure import spread
from retime.foundations.workers import answer_once
from retime.recipes.core import charts
from retime.recipes.core.claims import amount
from retime.recipes.core.recipe import Measured, Recipe, Tick
from retime.recipes.core.results import Result, Row, titled
from retime.recipes.fusion.memory_worker import serve
from retime.recipes.fusion.settings import FusionSettings
from retime.recipes.fusion.step_times import label
from retime.recipes.fusion.variants import choose_variants

MIB = 2**20
FIRST, LATER, GRADIENTS = "peak of the first step", "peak of later steps", "gradients alive"
# Tensors from this size on are mapped apart and given back when freed (glibc's M_MMAP_THRESHOLD, mallopt(3)).
_MALLOC = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_ARENA_MAX": "1"}


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
                reply = answer_once(serve, request, environment=_MALLOC)
                for quantity, key in ((FIRST, "first_bytes"), (LATER, "later_bytes"), (GRADIENTS, "gradient_bytes")):
                    measured.setdefault((name, quantity), []).append(reply[key] / MIB)
                facts = {"parameters": reply["parameters"], "measured by": reply["source"]}
                tick(name)
        return Measured([Row(name, quantity, "MiB", values) for (name, quantity), values in measured.items()], facts)

    def notes(self, result: Result) -> list[str]:
        lines = ["Bytes above the same process before it built the model; a fresh process for each value."]
        if not result.points:
            return lines
        biggest = max(result.points, key=lambda point: int(point.facts["parameters"]))
        weights = 4 * biggest.facts["parameters"] / MIB
        for name in biggest.variants(LATER):
            peak = spread(biggest.values(name, LATER)).median
            lines.append(
                f"- {label(name)}: {amount(peak / weights, 'x')} the bytes of the weights at the largest model"
            )
        return lines

    def draw(self, result: Result, path: Path) -> None:
        points = sorted(result.points, key=lambda point: int(point.facts["parameters"]))
        drawing, panels = charts.panels(titled(result), 2, sharey=True)
        for axes, quantity in zip(panels, (LATER, FIRST), strict=True):
            for index, name in enumerate(points[0].variants(quantity)):
                known = [point for point in points if point.has(name, quantity)]
                shift = 0.3 * (index - 1.5)  # millions: two and two variants take the same, and all are to be seen
                places = [point.facts["parameters"] / 1e6 + shift for point in known]
                values = [spread(point.values(name, quantity)) for point in known]
                charts.points_with_spread(axes, places, values, label(name), index, line=True)
            noted = f"{quantity}; forward fusion has updated nothing yet" if quantity == FIRST else quantity
            axes.set_title(noted, fontsize=10)
            axes.set_xlabel("parameters (millions)")
            axes.set_ylim(bottom=0)
        panels[0].set_ylabel("memory above the process without a model (MiB)")
        panels[0].legend(fontsize=8)
        charts.save(drawing, path)
