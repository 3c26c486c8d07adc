"""Pipelines on real ranks: layers that sleep, beside their simulation, and transformers against torch's own schedules.

`ooo_pipeline_targets` and `ooo_fig11_links` (messages over links that are shaped) emulate compute, so that more ranks
than cores can run; messages, threads and the runtime that orders tasks are those of `PipelineStep`. In
`ooo_pipeline_compute` ranks compute, and in `ooo_pipeline_memory` their tensors are counted.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

from retime.foundations.measure import Spread, spread
from retime.mechanisms.pipeline import Costs, Planner
from retime.recipes import emulated
from retime.recipes.core import charts
from retime.recipes.core.claims import Comparison, Target, paper
from retime.recipes.core.recipe import CaseRecipe, Measured, Recipe, Tick
from retime.recipes.core.results import Point, Result, Row, best_of, percent_more, ratio, titled
from retime.recipes.emulated import Network, emulated_network, loopback, parse_rate, run_ranks
from retime.recipes.ooo.claims import claim, pipelines, target
from retime.recipes.ooo.pipeline_scaling import GPIPE, OURS, PAPERS1, PAPERS2
from retime.recipes.ooo.pipeline_scaling import ONE as ONE_GPU
from retime.recipes.ooo.pipeline_worker import ONE, schedule_of, serve
from retime.recipes.ooo.settings import PipelineSettings, of_case

STEP, PEAK = "step", "peak of tensors"
ZBV, TORCH_GPIPE = "zbv", "torch GPipe"
PAPERS_RANKS = 4


class StepsOnRanks(Recipe[PipelineSettings]):
    """A point a case or network: steps of pipelines on ranks of this machine, which take turns."""

    quantity, axis = STEP, "step (ms)"

    def variants(self, case: PipelineSettings) -> list[str]:
        """Variants that take turns."""
        return case.schedules

    def needs(self, settings: PipelineSettings) -> str:
        return "root" if any(of_case(settings, name).rate for name in settings.cases) else super().needs(settings)

    def blocks(self, settings: PipelineSettings) -> int | None:
        cases = [of_case(settings, name) for name in settings.cases]
        return sum((case.rounds + case.warmup_rounds) * len(self.variants(case)) for case in cases)

    def drawn(self, result: Result, width: float, rotation: float, *keys: Any) -> tuple[Any, list[Any]]:
        """A chart a point with its steps as bars, and what their colours mean; the figure and the charts."""
        count = len(result.points)
        drawing, panels = charts.panels(titled(result), count, width=max(7.5, width * count), height=4.8)
        for axes, point in zip(panels, result.points, strict=True):
            took = {name: point.spread(name, self.quantity) for name in point.variants(self.quantity)}
            charts.bars(axes, took, [_colour(name) for name in took], rotation)
            axes.set_ylabel(self.axis)
        drawing.legend(handles=keys, fontsize=8, loc="outside lower center", ncols=3, frameon=False)
        return drawing, panels


class PipelineTargets(CaseRecipe[PipelineSettings], StepsOnRanks):
    """A point a case."""

    on_cpu = "runs ranks that sleep"

    def references(self, point: Point) -> dict[str, str]:
        return {f"speed over {peer}": peer for peer in (GPIPE, ZBV) if point.has(peer, STEP)}

    def measure(self, settings: PipelineSettings, at: dict[str, Any], tick: Tick) -> Measured:
        case = of_case(settings, at["case"])
        request = {**asdict(case), "do": "sleeping"}
        links: AbstractContextManager[Network]
        if case.rate is None:
            links = nullcontext(loopback(case.ranks))
        elif reason := emulated.unavailable():
            raise emulated.ClusterUnavailable(
                f"rate={case.rate} shapes links: {reason}. Leave out the cases that have a rate"
            )
        else:
            links = emulated_network(case.ranks, parse_rate(case.rate))
        with links as network:
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
            variants = point.variants(STEP)
            kept, simulated = point.facts["layers alive"], point.facts["simulated ms"]
            for ranks, ours, peer, least, what in paper("ooo").targets["pipelines"]:
                over = ratio(point, peer, ours)
                if ranks == point.facts["ranks"] and over is not None:
                    planned = f"simulated {simulated[peer] / simulated[ours]:.3f} x"
                    note = f"{where}; {planned}; layers alive {kept[ours]:g} and {kept[peer]:g}"
                    if ranks == PAPERS_RANKS and peer == GPIPE:
                        lines.append(Comparison(claim("pipeline"), over, note))
                    lines.append(Comparison(Target(what, "x", least), over, note))
            if OURS in variants and "ooo1" in variants:
                share, remark = spread([kept[OURS] / kept["ooo1"]]), f"{kept[OURS]:g} and {kept['ooo1']:g}"
                lines.append(Comparison(target("kept"), share, f"{where}; {remark}; section 5.2.1"))
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
            simulated = point.facts["simulated ms"]
            errors = ", ".join(
                f"{schedule} {simulated[schedule]:.0f} ms ({error_percent(point, schedule).median:+.1f} %)"
                for schedule in point.variants(STEP)
            )
            lines.append(
                f"- {point.at['case']}, a message takes {point.facts['message ms']:.2f} ms, a task "
                f"{point.facts['a task beside its layers ms']:.2f} ms beside its layers: simulated, and how "
                f"far the measured step is from it: {errors}"
            )
        return lines

    def draw(self, result: Result, path: Path) -> None:
        ours = charts.colour_key("measured, gradient fast-forwarding", charts.COLOURS[0])
        others = charts.colour_key("measured, others", charts.COLOURS[5])
        on_paper = charts.marker_key("simulated", "D", "black", filled=False)
        drawing, panels = self.drawn(result, 4.8, 30, ours, others, on_paper)
        for axes, point in zip(panels, result.points, strict=True):
            took = {name: point.spread(name, STEP) for name in point.variants(STEP)}
            above = {"xytext": (0, 7), "textcoords": "offset points", "ha": "center", "fontsize": 8}
            for index, step in enumerate(took.values()):
                axes.annotate(f"{step.median:.0f}", (index, step.high), **above)
            simulated = [point.facts["simulated ms"][schedule] for schedule in took]
            axes.plot(range(len(took)), simulated, "D", color="black", markerfacecolor="none", markersize=7)
            axes.margins(y=0.12)
            axes.set_title(point.at["case"], fontsize=9)
        charts.save(drawing, path)


def slowest_steps(answers: list[dict[str, Any]], variants: Iterable[str]) -> list[Row]:
    """The slowest rank's steps, by variant."""
    rounds = {name: zip(*(one["ms"][name] for one in answers), strict=True) for name in variants}
    return [Row(name, STEP, "ms", [round(max(ms), 3) for ms in by_rank]) for name, by_rank in rounds.items()]


def simulated_ms(case: PipelineSettings, variant: str, hop_ms: float, beside_ms: float = 0.0) -> float:
    """A step's length on paper, with layers of the unit's length and tasks that take ``beside_ms`` more."""
    schedule, alive = schedule_of(variant)
    costs = Costs((case.unit_ms,) * case.layers, (1,) * case.layers, hop_ms, beside_ms)
    planner = Planner(schedule, case.ranks, costs, group=case.layers_per_stage, cap=alive)
    length = planner.plan(case.micro_batches).makespan_ms
    if length is None:
        raise ValueError(f"schedules: {variant!r} is torch's own, which is not simulated: leave it out")
    return length


def error_percent(point: Point, schedule: str) -> Spread:
    """Percentage by which a step takes longer than its simulation."""
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


class PipelineLinks(PipelineTargets):
    """A point a network."""

    def compare(self, result: Result) -> list[Comparison]:
        lines = []
        points = {point.at["case"]: point for point in result.points}
        for (case, name, peer), published in pipelines("Figure 11, simulated").items():
            point = points.get(case)
            over = None if point is None or peer == ONE_GPU else ratio(point, peer, name)
            if point is None or over is None:
                continue
            planned = point.facts["simulated ms"][peer] / point.facts["simulated ms"][name]
            ours = point.speedup(peer, OURS, STEP).median
            note = f"{case}, emulated compute: {name} over {peer}; simulated {planned:.2f}; {OURS} {ours:.2f}"
            lines.append(Comparison(published, over, note))
        return [*lines, *map(worst_error, points.values())]


class RealLayers(StepsOnRanks):
    """A point a model."""

    over = (("network", "cases"),)
    on_cpu = "runs its ranks on this machine's cores"

    def variants(self, case: PipelineSettings) -> list[str]:
        return [*case.schedules, *(f"torch {peer}" for peer in case.peers), ONE]

    def references(self, point: Point) -> dict[str, str]:
        peer = best_of(point, "torch ", STEP)
        return {} if peer is None else {f"speed over {peer}": peer}

    def measure(self, settings: PipelineSettings, at: dict[str, Any], tick: Tick) -> Measured:
        case = of_case(settings, at["network"])
        request = {**asdict(case), "do": "computing", "variants": self.variants(case)}
        answers = run_ranks(loopback(case.ranks), serve, request, timeout_s=case.timeout_s, progress=tick)

        def share(what: str, name: str) -> list[float | None]:
            return [one[what][name] and round(one[what][name], 3) for one in answers]

        ours, results = answers[0]["bubble"], answers[0]["loss and norm"]
        # loss and norm from one device's, relatively
        others = {name: zip(pair, results[ONE], strict=True) for name, pair in results.items() if name != ONE}
        facts = {
            "ranks": case.ranks,
            "apart": {name: max(abs(value / one - 1) for value, one in pairs) for name, pairs in others.items()},
            "stages": answers[0]["stages"],
            "bubble share by rank": {name: share("bubble", name) for name in ours},
            "simulated bubble share by rank": {name: share("simulated bubble", name) for name in ours},
        }
        return Measured(slowest_steps(answers, request["variants"]), facts)

    def compare(self, result: Result) -> list[Comparison]:
        lines = []
        for point in result.points:
            where = f"{point.at['network']}, {point.facts['ranks']} ranks"
            peer = best_of(point, "torch ", STEP)
            for name, peers, note in (("over-best", peer, f"{where}: {peer}"), ("over-gpipe", TORCH_GPIPE, where)):
                if over := ratio(point, peers, OURS):
                    lines.append(Comparison(target(name), over, note))
            if point.facts["apart"]:
                name, apart = max(point.facts["apart"].items(), key=lambda entry: entry[1])
                lines.append(Comparison(target("apart"), spread([apart]), f"{where}: {name}"))
        return lines

    def notes(self, result: Result) -> list[str]:
        return [
            "A step is forward and backward of a batch, without an optimizer; each rank computes on a core of its own. "
            "`torch ...`: torch.distributed.pipelining with stages cut by hand, blocks in equal shares, and so many "
            "stages a rank. Others: this project's runtime on the unmodified model. One device: rank 0 alone."
        ]

    def draw(self, result: Result, path: Path) -> None:
        keys = {"gradient fast-forwarding": 0, "other orders, the same runtime": 5, "torch's own runtime": 1}
        drawn = {_colour(name) for point in result.points for name in point.variants(self.quantity)}
        colours = [
            charts.colour_key(words, charts.COLOURS[number]) for words, number in keys.items() if number in drawn
        ]
        drawing, panels = self.drawn(result, 5.5, 40, *colours)
        for axes, point in zip(panels, result.points, strict=True):
            axes.set_title(f"{point.at['network']}, {point.facts['ranks']} ranks", fontsize=9)
        charts.save(drawing, path)


class PipelineMemory(RealLayers):
    """A point a model: the most bytes of tensors on a rank."""

    quantity, axis = PEAK, "most bytes of tensors on a rank (MiB)"

    def variants(self, case: PipelineSettings) -> list[str]:
        return case.schedules

    def measure(self, settings: PipelineSettings, at: dict[str, Any], tick: Tick) -> Measured:
        case = of_case(settings, at["network"])
        rows, by_rank, stages = [], {}, {}
        for name in case.schedules:
            request = {**asdict(case), "do": "remembering", "schedule": name}
            answers = run_ranks(loopback(case.ranks), serve, request, timeout_s=case.timeout_s, progress=tick)
            peaks = [one["peak_bytes"] for one in answers]
            rows.append(Row(name, PEAK, "MiB", [round(max(ranks) / 2**20, 3) for ranks in zip(*peaks, strict=True)]))
            by_rank[name] = [round(median(values) / 2**20, 3) for values in peaks]
            stages[name] = answers[0]["stages"]
        return Measured(rows, {"ranks": case.ranks, "stages": stages, "MiB by rank": by_rank})

    def compare(self, result: Result) -> list[Comparison]:
        lines = []
        for point in result.points:
            for name, schedule in (("forwarding-memory", PAPERS1), ("modulo-peak", PAPERS2)):
                if more := percent_more(point, schedule, GPIPE, PEAK):
                    lines.append(Comparison(claim(name), more, f"{point.at['network']}: {schedule} over {GPIPE}"))
        return lines

    def notes(self, result: Result) -> list[str]:
        return [
            "Tensors of the rank that has most: parameters, their gradients, Adam's state, activations and messages. "
            "*_flush runs all forward passes first, as GPipe and the paper do. Ranks have equally many layers."
        ]


def _colour(name: str) -> int:
    return 0 if name.startswith("ooo") else 1 if name.startswith("torch ") else 5
