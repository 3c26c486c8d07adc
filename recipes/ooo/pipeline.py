"""`ooo_pipeline_targets`: steps of a pipeline by schedule, on real ranks whose layers sleep, beside their simulation.

Compute is emulated, so that more ranks than cores can run. Messages, threads and the runtime that orders tasks are
those of `PipelineStep`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

from retime.foundations.measure import Spread, speedup, spread
from retime.mechanisms.pipeline import Costs, Planner
from retime.recipes.core import charts
from retime.recipes.core.claims import Comparison, Target, paper
from retime.recipes.core.recipe import CaseRecipe, Measured, Tick
from retime.recipes.core.results import Point, Result, Row, titled
from retime.recipes.emulated import (
    ClusterUnavailable,
    Network,
    emulated_network,
    loopback,
    parse_rate,
    run_ranks,
    unavailable,
)
from retime.recipes.ooo.cases import of_case
from retime.recipes.ooo.claims import claim, target
from retime.recipes.ooo.pipeline_worker import schedule_of, serve
from retime.recipes.ooo.settings import PipelineSettings

STEP = "step"
GPIPE, ZBV = "gpipe", "zbv"
OURS = "ooo2"
PAPERS_RANKS = 4


class PipelineTargets(CaseRecipe[PipelineSettings]):
    """A point a case."""

    quantity = STEP
    on_cpu = "runs ranks that sleep"

    def blocks(self, settings: PipelineSettings) -> int | None:
        cases = [of_case(settings, name) for name in settings.cases]
        return sum((case.rounds + case.warmup_rounds) * len(case.schedules) for case in cases)

    def references(self, point: Point) -> dict[str, str]:
        return {f"speed over {peer}": peer for peer in (GPIPE, ZBV) if point.has(peer, STEP)}

    def measure(self, settings: PipelineSettings, at: dict[str, Any], tick: Tick) -> Measured:
        case = of_case(settings, at["case"])
        request = {**asdict(case), "do": "sleeping"}
        with _network(case) as network:
            answers = run_ranks(network, serve, request, timeout_s=case.timeout_s, progress=tick)
        hop_ms = max(one["hop_ms"] for one in answers)
        beside_ms = median(one["beside_ms"] for one in answers)
        simulated = {name: round(simulated_ms(case, name, hop_ms, beside_ms), 3) for name in case.schedules}
        facts = {
            "ranks": case.ranks,
            "simulated ms": simulated,
            "message ms": round(hop_ms, 4),
            "a task beside its layers ms": round(beside_ms, 4),
            "stages": answers[0]["stages"],
            "task ms": {schedule: _largest([one["tasks"][schedule] for one in answers]) for schedule in simulated},
            "layers alive": {schedule: max(one["alive"][schedule] for one in answers) for schedule in simulated},
        }
        return Measured(slowest_steps(answers, case.schedules), facts)

    def compare(self, result: Result) -> list[Comparison]:
        lines = []
        for point in result.points:
            where = f"{point.at['case']}, emulated compute"
            known = point.variants(STEP)
            for ranks, ours, peer, least, what in paper("ooo").targets["pipelines"]:
                if ranks == point.facts["ranks"] and ours in known and peer in known:
                    ratio = speedup(point.values(peer, STEP), point.values(ours, STEP))
                    planned = point.facts["simulated ms"][peer] / point.facts["simulated ms"][ours]
                    kept = point.facts["layers alive"]
                    note = f"{where}; simulated {planned:.3f} x; layers alive {kept[ours]:g} and {kept[peer]:g}"
                    if ranks == PAPERS_RANKS and peer == GPIPE:
                        lines.append(Comparison(claim("pipeline"), ratio, note))
                    lines.append(Comparison(Target(what, "x", least), ratio, note))
            if OURS in known and "ooo1" in known:
                kept = point.facts["layers alive"]
                share, said = spread([kept[OURS] / kept["ooo1"]]), f"{kept[OURS]:g} and {kept['ooo1']:g}"
                lines.append(Comparison(target("kept"), share, f"{where}; {said}; section 5.2.1"))
            lines.append(worst_error(point))
        return lines

    def notes(self, result: Result) -> list[str]:
        lines = [
            "Layers sleep for F, O and W, each as long as the others: compute is emulated, messages (gloo) and the "
            "runtime are real. Simulated are the same tasks at the unit's length, with the measured message, "
            "and with what a task took beside its layer in another pipeline (one layer a rank, ZB-H1). "
            "`ooo@32`: at most 32 layers' activations of a micro-batch alive on a rank; `ooo` is the best of `ooo1` "
            "(fast-forwarding alone), `ooo2` (with modulo allocation) and `ooo_v` (two stages a rank, in a V) on paper."
        ]
        for point in result.points:
            errors = ", ".join(
                f"{schedule} {point.facts['simulated ms'][schedule]:.0f} ms "
                f"({error_percent(point, schedule).median:+.1f} %)"
                for schedule in point.variants(STEP)
            )
            lines.append(
                f"- {point.at['case']}, a message takes {point.facts['message ms']:.2f} ms, a task "
                f"{point.facts['a task beside its layers ms']:.2f} ms beside its layers: simulated, and how "
                f"far the measured step is from it: {errors}"
            )
        return lines

    def draw(self, result: Result, path: Path) -> None:
        count = len(result.points)
        drawing, panels = charts.panels(titled(result), count, width=max(7.5, 4.8 * count), height=4.8)
        for axes, point in zip(panels, result.points, strict=True):
            took = steps_of(point)
            charts.bars(axes, took, [0 if schedule.startswith("ooo") else 5 for schedule in took], rotation=30)
            above = {"xytext": (0, 7), "textcoords": "offset points", "ha": "center", "fontsize": 8}
            for index, step in enumerate(took.values()):
                axes.annotate(f"{step.median:.0f}", (index, step.high), **above)
            simulated = [point.facts["simulated ms"][schedule] for schedule in took]
            axes.plot(range(len(took)), simulated, "D", color="black", markerfacecolor="none", markersize=7)
            axes.set_ylabel("step (ms)")
            axes.margins(y=0.12)
            axes.set_title(point.at["case"], fontsize=9)
        keys = [
            charts.colour_key("measured, gradient fast-forwarding", charts.COLOURS[0]),
            charts.colour_key("measured, others", charts.COLOURS[5]),
            charts.marker_key("simulated", "D", "black", filled=False),
        ]
        drawing.legend(handles=keys, fontsize=8, loc="outside lower center", ncols=3, frameon=False)
        charts.save(drawing, path)


def slowest_steps(answers: list[dict[str, Any]], variants: Iterable[str]) -> list[Row]:
    """The slowest rank's steps, by variant."""
    rounds = {name: zip(*(one["ms"][name] for one in answers), strict=True) for name in variants}
    return [Row(name, STEP, "ms", [round(max(ms), 3) for ms in by_rank]) for name, by_rank in rounds.items()]


def steps_of(point: Point) -> dict[str, Spread]:
    """A point's steps by variant."""
    return {name: spread(point.values(name, STEP)) for name in point.variants(STEP)}


@contextlib.contextmanager
def _network(case: PipelineSettings) -> Iterator[Network]:
    if case.rate is None:
        yield loopback(case.ranks)
        return
    reason = unavailable()
    if reason:
        raise ClusterUnavailable(f"rate={case.rate} shapes links: {reason}. Leave out the cases that have a rate")
    with emulated_network(case.ranks, parse_rate(case.rate)) as network:
        yield network


def simulated_ms(case: PipelineSettings, variant: str, hop_ms: float, beside_ms: float = 0.0) -> float:
    """A step's length on paper, with layers of the unit's length and tasks that take ``beside_ms`` more."""
    schedule, alive = schedule_of(variant)
    costs = Costs((case.unit_ms,) * case.layers, (1,) * case.layers, hop_ms, beside_ms)
    length = (
        Planner(schedule, case.ranks, costs, group=case.layers_per_stage, cap=alive)
        .plan(case.micro_batches)
        .makespan_ms
    )
    if length is None:
        raise ValueError(f"schedules: {variant!r} is torch's own, which is not simulated: leave it out")
    return length


def error_percent(point: Point, schedule: str) -> Spread:
    """How much longer a step takes than its simulation."""
    simulated = point.facts["simulated ms"][schedule]
    return spread([100 * (value / simulated - 1) for value in point.values(schedule, STEP)])


def worst_error(point: Point) -> Comparison:
    """The schedule whose step is farthest from its simulation."""
    worst = max(point.variants(STEP), key=lambda schedule: abs(error_percent(point, schedule).median))
    apart = spread([abs(value) for value in error_percent(point, worst).rounds])
    return Comparison(target("simulated"), apart, f"{point.at['case']}, emulated compute: {worst}")


def _largest(by_rank: list[dict[str, float]]) -> dict[str, float]:
    """By kind, over ranks."""
    kinds = sorted({kind for one in by_rank for kind in one})
    return {kind: round(max(one.get(kind, 0.0) for one in by_rank), 3) for kind in kinds}
