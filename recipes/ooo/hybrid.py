"""Section 6 of out-of-order backprop on paper: reverse first-k inside pipelines that are data parallel.

Each GPU of a pipeline adds up its layers' weight gradients with the same GPU of other pipelines, over a link of its
own; a layer's next forward pass waits for that. Steps are in
steady state, the third of three; units are those of a layer's forward pass for a micro-batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from retime.recipes.core import charts
from retime.recipes.core.recipe import CaseRecipe, Measured, Tick
from retime.recipes.core.results import Result, Row, titled
from retime.recipes.ooo.pipeline_scaling import STEP, case_of
from retime.recipes.ooo.settings import PaperPipelineSettings
from retime.schedules import Schedule, Task
from retime.schedules.pipeline import (
    Placement,
    StageCosts,
    block,
    gpipe,
    modulo,
    ooo_pipe2,
    simulate_pipeline,
    synchronised,
)

PLAIN, FIRST_K, FORWARDED, BOTH = "GPipe", "GPipe with reverse first-k", "OOO-Pipe2", "OOO-Pipe2 with reverse first-k"
_STEPS = 3


@dataclass(frozen=True)
class Hybrid:
    """Pipelines side by side.

    Args:
        layers: that are alike.
        ranks: GPUs of a pipeline.
        micro_batches: of a step.
        ratio: of a message inside of a pipeline to a layer's forward pass.
        synchronisation: the same of adding up a layer's weight gradients with the other pipelines.
    """

    layers: int
    ranks: int
    micro_batches: int
    ratio: float
    synchronisation: float

    @property
    def plans(self) -> dict[str, tuple[Schedule, Placement]]:
        """By name without reverse first-k, its order of one step and its placement."""
        blocks = block(self.layers, self.ranks)
        forwarded = ooo_pipe2(self.layers, self.ranks, self.micro_batches, hops=self.ratio)
        return {
            PLAIN: (gpipe(blocks, self.micro_batches), blocks),
            FORWARDED: (forwarded, modulo(self.layers, self.ranks)),
        }

    def units(self, order: Schedule, placement: Placement, k: int) -> float:
        """A step in steady state, with the weight gradients of the first k layers last and in reverse order."""
        once = synchronised(order, placement, k=k)
        lengths = [self._length(_repeated(once, steps), placement) for steps in (_STEPS - 1, _STEPS)]
        return lengths[1] - lengths[0]

    def _length(self, order: Schedule, placement: Placement) -> float:
        return simulate_pipeline(
            order,
            placement,
            StageCosts.uniform(self.layers),
            hops=self.ratio,
            synchronisation_ms=lambda task: self.synchronisation,
        ).makespan_ms


class Hybrids(CaseRecipe[PaperPipelineSettings]):
    """A point a case; every k is tried."""

    simulated = True

    def blocks(self, settings: PaperPipelineSettings) -> int | None:
        return 2

    def measure(self, settings: PaperPipelineSettings, at: dict[str, Any], tick: Tick) -> Measured:
        case = case_of(settings, at["case"], Hybrid)
        rows: list[Row] = []
        facts: dict[str, Any] = {}
        for (name, plan), reversed_name in zip(case.plans.items(), (FIRST_K, BOTH), strict=True):
            by_k = [round(case.units(*plan, k), 4) for k in range(case.layers + 1)]
            rows += [Row(name, STEP, "units", [by_k[0]]), Row(reversed_name, STEP, "units", [min(by_k)])]
            facts[_by_k(name)] = by_k
            facts[f"{reversed_name}: the least k that is best"] = by_k.index(min(by_k))
            tick(name)
        return Measured(rows, facts)

    def references(self, point: Any) -> dict[str, str]:
        return {"speed over GPipe": PLAIN}

    def notes(self, result: Result) -> list[str]:
        return [
            "Simulated: F, O and W of a layer take a unit each, messages and sums what the case says of it. A layer's "
            "gradients are added up when the last micro-batch's is there, in the order in which that is, and overlap "
            "with what follows, the next step's forward pass included.",
        ]

    def draw(self, result: Result, path: Path) -> None:
        drawing, panels = charts.panels(titled(result), len(result.points), width=10.7, height=4.4, sharey=True)
        for axes, point in zip(panels, result.points, strict=True):
            for index, name in enumerate((PLAIN, FORWARDED)):
                by_k = point.facts[_by_k(name)]
                axes.plot(range(len(by_k)), by_k, "o-", color=charts.COLOURS[index], label=name, markersize=3)
            axes.set_title(point.at["case"], fontsize=10)
            charts.whole_ticks(axes, "k of reverse first-k")
        panels[0].set_ylabel("step in steady state (units)")
        panels[0].set_ylim(bottom=0)
        charts.legend_below(drawing, panels[0], 2)
        charts.save(drawing, path)


def _repeated(order: Schedule, steps: int) -> Schedule:
    """So many steps, one behind the other."""
    return Schedule.from_lanes(
        {
            lane.name: [
                Task(task.kind, task.layer, task.micro_batch, step) for step in range(steps) for task in lane.tasks
            ]
            for lane in order.lanes
        }
    )


def _by_k(name: str) -> str:
    return f"{name}: units by k"
