"""Pipelines of transformers on paper: Figures 11 and 13 by network and number of GPUs, and section 6, data parallel.

In section 6 reverse first-k runs inside pipelines that are data parallel: each GPU of a pipeline adds up its layers'
weight gradients with the same GPU of other pipelines, over a link of its own; a layer's next forward pass waits for
that. Those steps are in steady state, the third of three. Units are those of a layer's forward pass for a micro-batch.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from statistics import fmean
from typing import Any, TypeVar

from retime.foundations.measure import spread
from retime.mechanisms.pipeline import Costs, PipelineError, Planner
from retime.recipes.core import charts
from retime.recipes.core.claims import Comparison
from retime.recipes.core.recipe import CaseRecipe, Measured, Tick
from retime.recipes.core.results import Point, Result, Row, ratio, titled
from retime.recipes.ooo.claims import claim, pipelines
from retime.recipes.ooo.settings import PaperPipelineSettings
from retime.schedules import Schedule, Task, pipeline

T = TypeVar("T")
STEP, SPEED = "step", "speed over one GPU"
ONE, MODEL_PARALLEL, FINE = "one GPU", "cross-layer model parallel", " at each layer"
GPIPE, PAPERS1, PAPERS2, OURS = "gpipe", "ooo1_flush", "ooo2_flush", "ooo2"
DAPPLE, PIPEDREAM, MEGATRON, MEGATRON_FORWARDED = "1f1b", "pipedream", "interleaved", "interleaved_fast_forwarded"
NAMES = {
    MODEL_PARALLEL: "cross-layer model parallelism",
    GPIPE: "GPipe",
    DAPPLE: "1F1B (DAPPLE)",
    PIPEDREAM: "PipeDream (weight stashing)",
    MEGATRON: "interleaved 1F1B (Megatron 2)",
    MEGATRON_FORWARDED: "Megatron 2 with fast-forwarding",
    "zb_h1": "ZB-H1",
    "zbv": "ZBV",
    "interleaved_zero_bubble": "interleaved zero bubble",
    PAPERS1: "OOO-Pipe1",
    PAPERS2: "OOO-Pipe2",
    PAPERS2 + FINE: "OOO-Pipe2, modulo allocation of each layer",
    "ooo1": "OOO-Pipe1, backward at once",
    OURS: "OOO-Pipe2, backward at once",
    "ooo": "best allocation, backward at once",
}
"""Schedules as the papers call them."""
_ASIDE = (ONE, MODEL_PARALLEL, PIPEDREAM, MEGATRON_FORWARDED)  # trains otherwise, or has the paper's technique


@dataclass(frozen=True)
class Case:
    """A pipeline on a cluster."""

    layers: int  # that are alike, such as a BERT's encoders
    ranks: int  # GPUs
    micro_batches: int  # of a step
    ratio: float  # of a message between two GPUs of a node to a layer's forward pass
    between: float = 0.0  # the same between nodes
    per_node: int = 1024  # GPUs in a node

    @property
    def hops(self) -> list[list[float]]:
        """By ranks, in units."""
        ranks = range(self.ranks)
        return [
            [self.ratio if a // self.per_node == b // self.per_node else self.between for b in ranks] for a in ranks
        ]

    def units(self, schedule: str, group: int | None = None) -> float:
        """A step's length.

        Raises:
            PipelineError: the schedule cannot have such a pipeline.
        """
        if schedule == PIPEDREAM:
            return self.stashing.step_ms
        costs = Costs((1.0,) * self.layers, (1,) * self.layers, self.hops)
        planned = MEGATRON if schedule == MEGATRON_FORWARDED else schedule
        plan = Planner(planned, self.ranks, costs, group="auto" if group is None else group).plan(self.micro_batches)
        if schedule == MEGATRON_FORWARDED:
            return self._forwarded_units(plan.rank_of, plan.stage_of)
        if plan.makespan_ms is None:
            raise PipelineError(f"schedules: {schedule!r} is torch's own, which is not simulated: leave it out")
        return plan.makespan_ms

    @cached_property
    def stashing(self) -> pipeline.WeightStashing:
        """PipeDream in steady state."""
        costs, blocks = pipeline.StageCosts.uniform(self.layers), pipeline.block(self.layers, self.ranks)
        return pipeline.weight_stashing(blocks, self.micro_batches, costs, hops=self.hops)

    def _forwarded_units(self, rank_of: tuple[int, ...], stage_of: tuple[int, ...]) -> float:
        """A step of Megatron 2 with its own placement and order, and weight gradients in its gaps."""
        placement = pipeline.Placement(rank_of)
        sizes = tuple(float(stage_of.count(stage)) for stage in range(placement.stages))
        costs, batches = pipeline.StageCosts(sizes, sizes, sizes), self.micro_batches
        order = pipeline.fast_forwarded(
            pipeline.interleaved(placement, batches, first_output_gradient=True),
            placement,
            batches,
            costs=costs,
            hops=self.hops,
            first_output_gradient=True,
        )
        return pipeline.simulate_pipeline(order, placement, costs, hops=self.hops).makespan_ms


class PipelineScaling(CaseRecipe[PaperPipelineSettings]):
    """A point a case, or one a case and number of micro-batches."""

    axes: tuple[str, ...] = ("micro_batch_counts",)
    simulated = True

    def points(self, settings: PaperPipelineSettings) -> list[dict[str, Any]]:
        cases, counts = super().points(settings), settings.micro_batch_counts
        return [{**at, "micro_batches": count} for at in cases for count in counts] if counts else cases

    def measure(self, settings: PaperPipelineSettings, at: dict[str, Any], tick: Tick) -> Measured:
        case = case_of(settings, at["case"], Case)
        case = replace(case, micro_batches=at.get("micro_batches", case.micro_batches))
        whole = 3.0 * case.layers * case.micro_batches
        hops = 2 * sum(case.hops[rank][rank + 1] for rank in range(case.ranks - 1))
        # without micro-batches one GPU computes at a time
        took, impossible = {ONE: whole, MODEL_PARALLEL: whole + hops * case.micro_batches}, {}
        for name in settings.schedules:
            schedule, at_each = name.removesuffix(FINE), 1 if name.endswith(FINE) else None
            try:
                took[name] = case.units(schedule, at_each)
            except PipelineError as error:
                impossible[name] = str(error)
            tick(name)
        facts: dict[str, Any] = {"layers": case.layers, "GPUs": case.ranks, "micro-batches": case.micro_batches}
        if PIPEDREAM in took:
            facts["PipeDream's versions of the weights, by GPU"] = list(case.stashing.versions)
        return Measured(rows_of(took), facts | {"not possible": impossible})

    def references(self, point: Point) -> dict[str, str]:
        return {"speed over gpipe": GPIPE} if point.has(GPIPE, STEP) else {}

    def compare(self, result: Result) -> list[Comparison]:
        lines = []
        points = {point.at["case"]: point for point in result.points}
        for (case, name, peer), published in pipelines(result.where).items():
            over = ratio(points[case], peer, name) if case in points else None
            if over is not None:
                ours = ratio(points[case], peer, OURS)
                note = f"{case}: {name} over {peer}" + (f"; {OURS} {ours.median:.2f}" if ours else "")
                lines.append(Comparison(published, over, note))
        return lines + (_of_several_points(points) if result.where == "Figure 13, simulated" else [])

    def notes(self, result: Result) -> list[str]:
        lines = [
            "Units: F, O and W of a layer take one each; a message takes its share of one (section 8.4.1: 0.05 over "
            "NVLink, 0.16 over PCIe, 1.8 over 10 Gb Ethernet, hence 0.72 over 25 Gb). Embedding and head are left "
            "out, and GPUs without a layer too. The paper does not give its numbers of micro-batches. *_flush is the "
            "paper's form, all forward passes first; the others are the best of several cuts into stages."
        ]
        for point in result.points:
            peers = [name for name in point.variants(STEP) if name not in _ASIDE and not name.startswith("ooo")]
            best = point.fastest(peers, STEP)
            if over := ratio(point, best, OURS):
                lines.append(f"- {point.at['case']}: {OURS} over the best of the others, {best}: {over.median:.3f}")
        return lines

    def draw(self, result: Result, path: Path) -> None:
        if any("micro_batches" in point.at for point in result.points):
            _draw_over_micro_batches(result, path)
            return
        names = list(dict.fromkeys(name for point in result.points for name in point.variants(SPEED)))
        names = [name for name in names if name != ONE]
        drawing, (axes,) = charts.panels(titled(result, "hollow: the paper"), 1, width=10.7, height=5.6)
        bar = 0.8 / max(1, len(names))
        for index, name in enumerate(names):
            places = [number for number, point in enumerate(result.points) if point.has(name, SPEED)]
            heights = [result.points[number].values(name, SPEED)[0] for number in places]
            axes.bar(
                [number + (index - (len(names) - 1) / 2) * bar for number in places],
                heights,
                width=bar,
                color=charts.COLOURS[index % len(charts.COLOURS)],
                hatch="" if index < len(charts.COLOURS) else "///",
                label=NAMES.get(name, name),
            )
        for (case, name, peer), published in pipelines(result.where).items():
            for number, point in enumerate(result.points):
                if point.at["case"] == case and name in names and point.has(peer, SPEED):
                    place = number + (names.index(name) - (len(names) - 1) / 2) * bar
                    speed = published.value * point.values(peer, SPEED)[0]
                    axes.plot(place, speed, "o", color="black", fillstyle="none")
        labels = [point.at["case"].replace(", ", ",\n") for point in result.points]
        axes.set_xticks(range(len(labels)), labels, fontsize=7)
        axes.set_ylabel("speed over one GPU")
        axes.grid(axis="x", visible=False)
        drawing.legend(fontsize=8, loc="outside lower center", ncols=3, frameon=False)
        charts.save(drawing, path)


def case_of(settings: PaperPipelineSettings, name: str, kind: type[T]) -> T:
    """The case of a name.

    Raises:
        ValueError: a key that a case does not have, or one that is missing.
    """
    try:
        return kind(**settings.cases[name])
    except TypeError as error:
        fields = inspect.signature(kind).parameters
        raise ValueError(f"cases.{name}: {error}; a case has {', '.join(fields)}") from error


def rows_of(took: dict[str, float]) -> list[Row]:
    """Steps in units, and the speed over one GPU, by schedule."""
    steps = [Row(name, STEP, "units", [round(units, 4)]) for name, units in took.items()]
    return steps + [Row(name, SPEED, "x", [round(took[ONE] / units, 4)]) for name, units in took.items()]


def _of_several_points(points: dict[str, Point]) -> list[Comparison]:
    """Figure 13's numbers that are formed of several points: strong scaling and averages."""

    def ratios(peer: str, name: str, *cases: str) -> list[float]:
        speedups = [ratio(points[case], peer, name) for case in cases if case in points]
        return [over.median for over in speedups if over is not None]

    lines = []
    for network in ("BERT-24", "BERT-48"):
        few, many = (points.get(f"{network}, {gpus}") for gpus in (8, 32))
        if few and many and few.has(PAPERS2, SPEED) and many.has(PAPERS2, SPEED):
            gain = many.values(PAPERS2, SPEED)[0] / few.values(PAPERS2, SPEED)[0]
            lines.append(Comparison(claim("figure-13-strong"), spread([gain]), f"{network}: 32 GPUs over 8"))
    if over_pipedream := ratios(PIPEDREAM, PAPERS2, "BERT-12, 8", "BERT-24, 16", "BERT-48, 32"):
        lines.append(Comparison(claim("pipedream"), spread([fmean(over_pipedream)]), "weak scaling"))
    if forwarded := ratios(MEGATRON, MEGATRON_FORWARDED, "BERT-48, 8", "BERT-48, 16", "BERT-48, 24"):
        gains = [100 * (over - 1) for over in forwarded]
        note = f"BERT-48 on 8, 16 and 24 GPUs; {max(gains):.1f} % at most"
        lines.append(Comparison(claim("megatron-forwarding"), spread([fmean(gains)]), note))
    return lines


def _draw_over_micro_batches(result: Result, path: Path) -> None:
    """Gains of OOO-Pipe2 over each other schedule; a panel a case."""
    cases = list(dict.fromkeys(point.at["case"] for point in result.points))
    peers = [name for name in result.points[0].variants(STEP) if name not in (ONE, MODEL_PARALLEL, PAPERS2)]
    title = titled(result, "dashed: the paper")
    drawing, panels = charts.panels(title, len(cases), height=4.4, width=10.7, sharey=True)
    for axes, case in zip(panels, cases, strict=True):
        points = [point for point in result.points if point.at["case"] == case]
        for colour, peer in zip(charts.COLOURS, peers, strict=False):
            both = [(point.at["micro_batches"], over) for point in points if (over := ratio(point, peer, PAPERS2))]
            places, gains = [place for place, _ in both], [over.median for _, over in both]
            axes.plot(places, gains, "o-", color=colour, label=f"over {NAMES.get(peer, peer)}", markersize=4)
            published = pipelines("Figure 13, simulated").get((case, PAPERS2, peer))
            if published is not None:
                axes.axhline(published.value, color=colour, linestyle="--", linewidth=1)
        axes.axhline(1.0, color=charts.GREY, linewidth=1)
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter("{x:g}")
        axes.set_xlabel("micro-batches")
        axes.set_title(f"{case} GPUs", fontsize=10)
    panels[0].set_ylabel("speed of OOO-Pipe2 (x)")
    charts.legend_below(drawing, panels[0], 4)
    charts.save(drawing, path)


PLAIN, FIRST_K, FORWARDED, BOTH = "GPipe", "GPipe with reverse first-k", "OOO-Pipe2", "OOO-Pipe2 with reverse first-k"


@dataclass(frozen=True)
class Hybrid:
    """Pipelines side by side."""

    layers: int  # that are alike
    ranks: int  # GPUs of a pipeline
    micro_batches: int  # of a step
    ratio: float  # of a message inside of a pipeline to a layer's forward pass
    synchronisation: float  # the same of adding up a layer's weight gradients with the other pipelines

    @property
    def plans(self) -> dict[str, tuple[Schedule, pipeline.Placement]]:
        """By name without reverse first-k, its order of one step and its placement."""
        blocks = pipeline.block(self.layers, self.ranks)
        forwarded = pipeline.ooo_pipe2(self.layers, self.ranks, self.micro_batches, hops=self.ratio)
        return {
            PLAIN: (pipeline.gpipe(blocks, self.micro_batches), blocks),
            FORWARDED: (forwarded, pipeline.modulo(self.layers, self.ranks)),
        }

    def units(self, order: Schedule, placement: pipeline.Placement, k: int) -> float:
        """A step in steady state, with the weight gradients of the first k layers last and in reverse order."""
        once, costs = pipeline.synchronised(order, placement, k=k), pipeline.StageCosts.uniform(self.layers)
        options: dict[str, Any] = {"hops": self.ratio, "synchronisation_ms": lambda task: self.synchronisation}
        ends = []
        for steps in (2, 3):  # one behind the other
            lanes = {
                lane.name: [Task(a.kind, a.layer, a.micro_batch, step) for step in range(steps) for a in lane.tasks]
                for lane in once.lanes
            }
            run = pipeline.simulate_pipeline(Schedule.from_lanes(lanes), placement, costs, **options)
            ends.append(run.makespan_ms)
        return ends[1] - ends[0]


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
            facts[f"{name}: units by k"] = by_k
            facts[f"{reversed_name}: the least k that is best"] = by_k.index(min(by_k))
            tick(name)
        return Measured(rows, facts)

    def references(self, point: Any) -> dict[str, str]:
        return {"speed over GPipe": PLAIN}

    def notes(self, result: Result) -> list[str]:
        return [
            "Simulated: F, O and W of a layer take a unit each, messages and sums what the case says of it. A layer's "
            "gradients are added up when the last micro-batch's is there, in the order in which that is, and overlap "
            "with what follows, the next step's forward pass included."
        ]

    def draw(self, result: Result, path: Path) -> None:
        drawing, panels = charts.panels(titled(result), len(result.points), width=10.7, height=4.4, sharey=True)
        for axes, point in zip(panels, result.points, strict=True):
            for index, name in enumerate((PLAIN, FORWARDED)):
                by_k = point.facts[f"{name}: units by k"]
                axes.plot(range(len(by_k)), by_k, "o-", color=charts.COLOURS[index], label=name, markersize=3)
            axes.set_title(point.at["case"], fontsize=10)
            charts.whole_ticks(axes, "k of reverse first-k")
        panels[0].set_ylabel("step in steady state (units)")
        panels[0].set_ylim(bottom=0)
        charts.legend_below(drawing, panels[0], 2)
        charts.save(drawing, path)
