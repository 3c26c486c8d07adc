"""Figures 10 to 14 of moDNN, simulated on its K40: time of a batch and bytes moved, against vDNN, vDNN+ and ideal.

Task graphs are exact, times are a roofline of the K40's data sheet (:func:`k40_graph`), not a measurement.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from math import prod
from pathlib import Path
from statistics import fmean
from typing import Any, ClassVar

from torch import nn

from retime.foundations.measure import spread
from retime.recipes.core import charts
from retime.recipes.core.claims import Claim, Comparison, amount
from retime.recipes.core.recipe import Measured, Tick
from retime.recipes.core.results import Point, Result, Row
from retime.recipes.modnn.floor import GB, bars, cross
from retime.recipes.modnn.networks import (
    Network,
    in_place,
    network_of,
    operation_of,
    separate_gradients,
    weight_gradients_pass,
)
from retime.recipes.modnn.settings import MemorySettings, NetworkRecipe, claim
from retime.schedules import modnn
from retime.schedules.budget import Algorithm, BudgetError, GraphTask, TaskGraph
from retime.schedules.modnn import BatchPlan, Techniques, lower_bound, offload_schedule, plan_batch

_BYTES = 4  # of a number
_PRODUCTS = ("mm", "addmm", "bmm", "linear")
_MS = 1e3


def k40_graph(network: Network, settings: MemorySettings) -> TaskGraph:
    """The network's task graph as the paper counts layers, with times and workspaces.

    A task takes its arithmetic or its memory traffic, whichever is longer, and a launch. Where a sample has fewer
    outputs than the GPU holds threads, it takes as long as with that many: small sub-batches do not fill it. A
    convolution has two algorithms: implicit GEMM, and the fastest one, which needs workspace.
    """
    graph = separate_gradients(in_place(network.graph()))
    operations = _operations(graph, dict(network.step(1).module.named_modules()))
    return TaskGraph(
        graph.blocks,
        tuple(
            replace(task, algorithms=_algorithms(graph, task, operations[task.name], settings)) for task in graph.tasks
        ),
    )


def _operations(graph: TaskGraph, layers: dict[str, nn.Module]) -> dict[str, float]:
    """By task: floating-point operations for one sample."""
    counts: dict[str, float] = {}
    of_layer: dict[str, float] = {}
    for task in graph.tasks:
        layer, kind = layers.get(task.layer), operation_of(task)
        operations = 0.0
        if kind == "convolution" and isinstance(layer, nn.Conv2d | nn.ConvTranspose2d):
            transposed = isinstance(layer, nn.ConvTranspose2d)
            each = (layer.out_channels if transposed else layer.in_channels) / layer.groups * prod(layer.kernel_size)
            operations = of_layer[task.layer] = 2 * each * _numbers(graph, task.reads if transposed else task.writes)
        elif kind == "convolution_backward":
            operations = of_layer.get(task.layer, 0.0)
        elif kind in _PRODUCTS and isinstance(layer, nn.Linear):
            operations = 2.0 * layer.in_features * layer.out_features
        counts[task.name] = operations
    return counts


def _numbers(graph: TaskGraph, names: tuple[str, ...]) -> float:
    """Numbers in the blocks that grow with the batch, for one sample."""
    return sum(graph.blocks[name].sample_bytes for name in names) / _BYTES


def _algorithms(
    graph: TaskGraph, task: GraphTask, operations: float, settings: MemorySettings
) -> tuple[Algorithm, ...]:
    names = dict.fromkeys((*task.reads, *task.writes))
    fixed_bytes = sum(graph.blocks[name].fixed_bytes for name in names)
    sample_bytes = sum(graph.blocks[name].sample_bytes for name in names)
    if fixed_bytes + sample_bytes < 1024:  # a step count, say
        return (Algorithm(),)
    bandwidth = settings.memory_bytes_per_s * settings.memory_efficiency
    traffic_ms, fixed_ms = sample_bytes / bandwidth * _MS, fixed_bytes / bandwidth * _MS
    outputs = _numbers(graph, task.writes)
    # A weight gradient has as many outputs whatever the batch.
    idle = settings.threads / outputs if outputs else 0.0

    def algorithm(name: str, speedup: float, workspace: float) -> Algorithm:
        arithmetic_ms = operations / (settings.operations_per_s * settings.efficiency * speedup) * _MS
        sample_ms = max(arithmetic_ms, traffic_ms)
        return Algorithm(
            name, settings.launch_ms + fixed_ms + idle * sample_ms, sample_ms, sample_workspace_bytes=workspace
        )

    if "convolution" in operation_of(task):
        return (
            algorithm("implicit gemm", 1.0, 0.0),
            algorithm("fastest", settings.fast_speedup, settings.workspace_share * sample_bytes),
        )
    # matrix products have no choice, and run as fast as the fastest convolution
    return (algorithm("default", settings.fast_speedup, 0.0),)


ALL_THERE_IS = 1 << 62
"""Bytes of a device that is large enough."""
BATCH, SLOWER, MOVED, MEMORY = "batch", "time over ideal", "moved", "memory of the ideal"
SUB_BATCH, NEEDED = "sub-batch", "needed at least"
IDEAL, MODNN, PAPERS_RULES = "ideal", "moDNN", "moDNN, the paper's rules alone"
FASTEST = "moDNN, the paper's rules with the fastest algorithms"
VDNN_ALL, VDNN_CONV = "vDNN, all layers", "vDNN, convolutions"
VDNN_LEAST = "vDNN, all layers, no workspaces"
VDNN_PLUS_ALL, VDNN_PLUS_CONV = "vDNN+, all layers", "vDNN+, convolutions"
_ROOM = (1.0, 1.1, 1.25, 1.5, 2.0)
"""Budgets of whole batches, over the least that they can have."""
BY_GAIN = f"Eq. 10 over always the fastest algorithm, whole batch in {', '.join(map(str, _ROOM))} times the least"
SUB_BATCHES, OFFLOADING, ALGORITHMS = "sub-batches alone", "offloading alone", "algorithms alone"
TOGETHER, VDNN_AT_LEAST = "all techniques (Eq. 7)", "vDNN at least (Eq. 6, whole batch)"
_PANELS_A_ROW = 3


class SimulatedK40(NetworkRecipe):
    """Base of these figures: graphs, plans, and a result that says that it is simulated."""

    quantity = BATCH
    simulated = True

    def __init__(self) -> None:
        self._graphs: dict[str, TaskGraph] = {}

    def references(self, point: Point) -> dict[str, str]:
        return {"speed over ideal": IDEAL}

    def graph(self, settings: MemorySettings, name: str) -> TaskGraph:
        if name not in self._graphs:
            network = network_of(name, settings.cases[name], settings.optimizer, settings.seed)
            self._graphs[name] = k40_graph(network, settings)
        return self._graphs[name]

    def plans(
        self, settings: MemorySettings, name: str, budget_bytes: int, ways: dict[str, Callable[..., BatchPlan]]
    ) -> Measured:
        """Rows and facts of one network inside one budget, by each of the ways that fit."""
        graph, batch = self.graph(settings, name), settings.cases[name]["batch_size"]
        bandwidth = settings.transfer_bytes_per_s / 1e3
        ideal_ms = ideal_time_ms(graph, batch, bandwidth)
        rows = [Row(IDEAL, BATCH, "ms", [round(ideal_ms, 3)])]
        facts: dict[str, Any] = {
            "batch size": batch,
            "ideal memory GB": round(modnn.ideal_peak_bytes(graph, batch) / GB, 2),
            "sub-batches of": {},
            "does not fit": {},
        }
        for way, plan_with in ways.items():
            try:
                plan = plan_with(graph, batch, budget_bytes, bandwidth)
            except BudgetError as refusal:
                facts["does not fit"][way] = f"needs {refusal.floor_bytes / GB:.1f} GB"
                rows.append(Row(way, NEEDED, "GB", [round(refusal.floor_bytes / GB, 3)]))
                continue
            facts["sub-batches of"][way] = plan.sub_batch
            rows += [
                Row(way, BATCH, "ms", [round(plan.batch_ms, 3)]),
                Row(way, SLOWER, "x", [round(plan.batch_ms / ideal_ms, 4)]),
                Row(way, MOVED, "GB", [round(plan.moved_bytes() / GB, 3)]),
                Row(way, SUB_BATCH, "samples", [plan.sub_batch]),
            ]
        return Measured(rows, facts)

    def notes(self, result: Result) -> list[str]:
        given = result.points[0].settings
        return [
            f"Simulated, nothing was measured. A K40 by its data sheet: {given['operations_per_s'] / 1e12:g} TFLOP/s "
            f"in single precision, {given['memory_bytes_per_s'] / 1e9:g} GB/s; assumed: implicit GEMM reaches "
            f"{100 * given['efficiency']:g} % of the arithmetic, everything {100 * given['memory_efficiency']:g} % of "
            f"the bandwidth, transfers {given['transfer_bytes_per_s'] / 1e9:g} GB/s over PCIe 3.0 x16, a launch "
            f"{given['launch_ms']:g} ms, and a kernel with fewer outputs than {given['threads']} threads takes as "
            "long as with that many.",
            f"Taken from section 7.3: the fastest convolution algorithm is {given['fast_speedup']:g} times as fast as "
            f"implicit GEMM; its workspace is assumed as {given['workspace_share']:g} of its input and output.",
            "Task graphs are torch's, exact in bytes, with batch normalisation, activations and dropout in place and a "
            "task for each gradient of a convolution, as the paper counts; sub-batches of the ideal case: none.",
            "Plans are those of `retime.schedules.modnn.plan_batch`: the paper's rules (Eq. 8, Algorithm 1) and a "
            "search over sub-batch sizes. Strategies plan for a real step by what they measure, and try plans out.",
        ]


def ideal_time_ms(graph: TaskGraph, batch: int, bandwidth: float) -> float:
    """Nothing leaves a device that is large enough, and every algorithm is the fastest."""
    return offload_schedule(graph, batch, ALL_THERE_IS, bandwidth, Techniques("fastest")).finish_ms


_OURS: dict[str, Callable[..., BatchPlan]] = {MODNN: plan_batch, PAPERS_RULES: partial(plan_batch, search=False)}
"""The paper's rules (Eq. 8, Algorithm 1 with Eq. 9 and 10) with a search over sub-batch sizes by simulated time, and
without."""
_ALWAYS_FASTEST = replace(Techniques.paper(), algorithms="fastest")


class OneBudget(SimulatedK40):
    """Figures 10 and 11: time of a batch and bytes moved in 12 GB."""

    _ways: ClassVar[dict[str, Callable[..., BatchPlan]]] = {
        **_OURS,
        VDNN_ALL: modnn.plan_vdnn,
        VDNN_CONV: partial(modnn.plan_vdnn, layers="conv"),
        VDNN_LEAST: partial(modnn.plan_vdnn, algorithms="baseline"),
    }

    def measure(self, settings: MemorySettings, at: dict[str, Any], tick: Tick) -> Measured:
        return self.plans(settings, at["network"], int(settings.budget_gb * GB), dict(self._ways))

    def compare(self, result: Result) -> list[Comparison]:
        lines = []
        for published, names in (
            (claim("figure-10-modnn"), (MODNN, PAPERS_RULES)),
            (claim("figure-10-vdnn"), (VDNN_ALL, VDNN_CONV, VDNN_LEAST)),
        ):
            for name in names:
                added = [100 * (value - 1) for value in _values(result, name, SLOWER)]
                if added:
                    remark = f"simulated, {name}: average of {len(added)} that fit"
                    lines.append(Comparison(published, spread([fmean(added)]), remark))
        for name in (VDNN_ALL, VDNN_CONV):
            both = [p for p in result.points if p.has(name, MOVED) and p.has(MODNN, MOVED)]
            moving = [p for p in both if p.values(MODNN, MOVED)[0]]
            total = sum(p.values(MODNN, MOVED)[0] for p in both)
            remark = f"simulated, {name}, sums over networks; {len(both) - len(moving)} of {len(both)} move nothing"
            ratio = sum(p.values(name, MOVED)[0] for p in both) / total if total else None
            lines.append(Comparison(claim("figure-11"), None if ratio is None else spread([ratio]), remark))
        return lines

    def notes(self, result: Result) -> list[str]:
        return [
            *super().notes(result),
            "vDNN has no sub-batches: where a task, its workspace and what is prefetched find no piece of memory that "
            "is large enough, it does not fit. Without any workspace it fits more networks, at implicit GEMM's pace.",
            "Transfers of the batch itself are no part of the bytes moved: every way to train has them.",
            *(
                f"- {point.at['network']}: ideal {point.facts['ideal memory GB']} GB; sub-batches of "
                + ", ".join(f"{size} ({way})" for way, size in point.facts["sub-batches of"].items())
                + "".join(f"; {way} does not fit, {why}" for way, why in point.facts["does not fit"].items())
                for point in result.points
            ),
        ]

    def draw(self, result: Result, path: Path) -> None:
        drawing, panels = charts.panels(result.title, 2, width=14.0, height=5.0)
        names = tuple(self._ways)
        for axes, quantity, label, form in (
            (panels[0], SLOWER, "time of a batch over ideal (Figure 10)", ".2f"),
            (panels[1], MOVED, "GB moved a batch (Figure 11)", ".3g"),
        ):
            bars(axes, result.points, names, quantity, form)
            axes.set_ylabel(label)
        panels[0].set_ylim(0, panels[0].get_ylim()[1] * 1.35)
        charts.even_line(panels[0], "ideal")
        panels[0].legend(handles=_entries(panels[0], result.points, names), fontsize=8, loc="upper left", ncols=2)
        charts.save(drawing, path)


class ManyBudgets(SimulatedK40):
    """Figure 12: time of a batch over budgets; `budgets` are in GB."""

    axes = ("budgets",)
    _ways: ClassVar[dict[str, Callable[..., BatchPlan]]] = {
        **_OURS,
        VDNN_PLUS_ALL: partial(modnn.plan_vdnn, sub_batching=True),
        VDNN_PLUS_CONV: partial(modnn.plan_vdnn, layers="conv", sub_batching=True),
    }

    def points(self, settings: MemorySettings) -> list[dict[str, Any]]:
        return [{"network": name, "budget_gb": float(gb)} for name in settings.cases for gb in settings.budgets]

    def measure(self, settings: MemorySettings, at: dict[str, Any], tick: Tick) -> Measured:
        fastest = partial(plan_batch, search=False, techniques=_ALWAYS_FASTEST)
        measured = self.plans(settings, at["network"], int(at["budget_gb"] * GB), {**self._ways, FASTEST: fastest})
        measured.facts["lower bound GB"] = round(lower_bound(self.graph(settings, at["network"])).bytes / GB, 3)
        return measured

    def compare(self, result: Result) -> list[Comparison]:
        lines = []
        for name in (VDNN_PLUS_ALL, VDNN_PLUS_CONV):
            for ours in (MODNN, PAPERS_RULES):
                both = [p for p in result.points if p.has(name, BATCH) and p.has(ours, BATCH)]
                if both:
                    ratios = [p.values(name, BATCH)[0] / p.values(ours, BATCH)[0] for p in both]
                    remark = f"simulated, {ours} over {name}; {len(both)} points, {amount(min(ratios), 'x')} at least"
                    lines.append(Comparison(claim("figure-12-all"), spread([fmean(ratios)]), remark))
        return lines

    def draw(self, result: Result, path: Path) -> None:
        networks = list(dict.fromkeys(point.at["network"] for point in result.points))
        rows = max(1, -(-len(networks) // _PANELS_A_ROW))
        drawing, panels = charts.panels(result.title, max(1, len(networks)), height=0.8 + 3.6 * rows, rows=rows)
        for axes, network in zip(panels, networks, strict=False):
            own = sorted((p for p in result.points if p.at["network"] == network), key=lambda p: p.at["budget_gb"])
            for index, name in enumerate(self._ways):
                measured = [p for p in own if p.has(name, SLOWER)]
                places = [p.at["budget_gb"] for p in measured]
                values = [p.spread(name, SLOWER) for p in measured]
                charts.points_with_spread(axes, places, values, name, index, line=True)
                for budget in (p.at["budget_gb"] for p in own if not p.has(name, SLOWER)):
                    cross(axes, budget, index, points_beside=6 * (index - 1.5))  # those of other ways are there too
            axes.set_title(f"{network} ({own[0].facts['batch size']}), ideal {own[0].facts['ideal memory GB']:g} GB")
            axes.title.set_fontsize(9)
            axes.axvline(own[0].facts["lower bound GB"], color=charts.GREY, linestyle=":", label="lower bound")
            axes.set_xscale("log")
            axes.set_xticks([1, 2, 4, 8, 12], ["1", "2", "4", "8", "12"])
            axes.set_xlabel("budget (GB)")
        for axes in panels[:: -(-len(panels) // rows)]:
            axes.set_ylabel("time of a batch over ideal")
        entries = _entries(panels[0], result.points, tuple(self._ways))
        drawing.legend(handles=entries, fontsize=9, loc="outside lower center", ncols=3)
        charts.save(drawing, path)


class Alone(SimulatedK40):
    """Figures 13 and 14: each technique alone, where it needs the least memory."""

    def measure(self, settings: MemorySettings, at: dict[str, Any], tick: Tick) -> Measured:
        graph, batch = self.graph(settings, at["network"]), settings.cases[at["network"]]["batch_size"]
        bandwidth = settings.transfer_bytes_per_s / 1e3
        counted = weight_gradients_pass(graph)  # as in Figure 9
        ideal_bytes, ideal_ms = modnn.all_blocks_bytes(counted, batch), ideal_time_ms(graph, batch, bandwidth)
        least_workspace = TaskGraph(
            counted.blocks, tuple(replace(task, algorithms=task.algorithms[:1]) for task in counted.tasks)
        )
        facts: dict[str, Any] = {"batch size": batch, "ideal memory GB": round(ideal_bytes / GB, 3)}

        fastest, baseline = Techniques("fastest"), Techniques("baseline")
        one, last = (offload_schedule(graph, 1, ALL_THERE_IS, bandwidth, fastest, update=u) for u in (False, True))
        budget = int(settings.budget_gb * GB)
        needed = lower_bound(graph, batch).bytes
        if needed > budget:
            facts["offloading alone"] = f"needs {needed / GB:.1f} GB, so it was given that"
        whole = partial(plan_batch, graph, batch, bandwidth_bytes_per_ms=bandwidth, sub_batching=False, search=False)
        away = whole(max(budget, needed))
        budgets = [int(room * needed) for room in _ROOM]
        gains = [whole(room, techniques=_ALWAYS_FASTEST).batch_ms / whole(room).batch_ms for room in budgets]
        facts[BY_GAIN] = [round(gain, 4) for gain in gains]
        least = offload_schedule(graph, batch, ALL_THERE_IS, bandwidth, baseline)
        results = {
            SUB_BATCHES: (modnn.all_blocks_bytes(counted, 1), (batch - 1) * one.finish_ms + last.finish_ms),
            OFFLOADING: (needed, away.batch_ms),
            ALGORITHMS: (modnn.all_blocks_bytes(least_workspace, batch), least.finish_ms),
        }
        rows = [Row(IDEAL, BATCH, "ms", [round(ideal_ms, 3)])]
        for name, (nbytes, batch_ms) in results.items():
            rows += [
                Row(name, BATCH, "ms", [round(batch_ms, 3)]),
                Row(name, MEMORY, "%", [round(100 * nbytes / ideal_bytes, 3)]),
                Row(name, SLOWER, "x", [round(batch_ms / ideal_ms, 4)]),
            ]
        for name, samples in ((TOGETHER, 1), (VDNN_AT_LEAST, batch)):
            share = 100 * lower_bound(counted, samples).bytes / ideal_bytes
            rows.append(Row(name, MEMORY, "%", [round(share, 4)]))
        return Measured(rows, facts)

    def compare(self, result: Result) -> list[Comparison]:
        def line(published: Claim, name: str, quantity: str, change: Callable[[float], float]) -> Comparison:
            values = [change(value) for value in _values(result, name, quantity)]
            return Comparison(published, spread([fmean(values)]), "simulated") if values else Comparison(published)

        both = [p for p in result.points if p.has(TOGETHER, MEMORY) and p.has(VDNN_AT_LEAST, MEMORY)]
        less = [p.values(VDNN_AT_LEAST, MEMORY)[0] / p.values(TOGETHER, MEMORY)[0] for p in both]
        note = f"simulated, average of {len(less)}; {min(less, default=0):.1f} to {max(less, default=0):.1f}"
        return [
            line(claim("figure-13-sub-batches"), SUB_BATCHES, MEMORY, lambda percent: 100 / percent),
            line(claim("figure-13-offloading"), OFFLOADING, MEMORY, lambda percent: 100 / percent),
            line(claim("figure-13-algorithms"), ALGORITHMS, MEMORY, lambda percent: 100 - percent),
            line(claim("figure-14-sub-batches"), SUB_BATCHES, SLOWER, lambda ratio: ratio),
            line(claim("figure-14-offloading"), OFFLOADING, SLOWER, lambda ratio: 100 * (ratio - 1)),
            line(claim("figure-14-algorithms"), ALGORITHMS, SLOWER, lambda ratio: ratio),
            *([Comparison(claim("ten-times-vdnn"), spread([fmean(less)]), note)] if less else []),
            *(
                Comparison(claim("equation-10-whole"), spread([end(p.facts[BY_GAIN])]), f"simulated, {p.at['network']}")
                for p in result.points
                for end in (min, max)
            ),
        ]

    def notes(self, result: Result) -> list[str]:
        budget = f"{result.points[0].settings['budget_gb']:g} GB"
        return [
            *super().notes(result),
            "Memory is counted as in Figure 9: the ideal case keeps every block at its own address, and the largest "
            "workspace on top. Where memory is reused, workspaces cost next to nothing: the peak lies at the end of "
            "the forward pass, and the largest workspace is needed where less is alive.",
            "The time of algorithms alone is the ratio given to the simulator, less what is bound by memory traffic. "
            "Sub-batches of one sample lose less here than on the real GPU: a roofline knows launches and idle "
            "threads, not the kernels' own loss with small matrices.",
            f"Offloading alone keeps the batch whole, in {budget} or what its largest task needs, by the paper's "
            "rules.",
            "vDNN without sub-batches needs at least what its largest task takes with the whole batch, beside weights, "
            "and moDNN with all techniques that of one sample. Both are counted as Eq. 7 in Figure 9.",
            *(
                f"- {p.at['network']}: offloading alone {p.facts[OFFLOADING]}"
                for p in result.points
                if OFFLOADING in p.facts
            ),
        ]

    def draw(self, result: Result, path: Path) -> None:
        drawing, panels = charts.panels(result.title, 2, width=14.0, height=5.0)
        names = (SUB_BATCHES, OFFLOADING, ALGORITHMS)
        for axes, quantity, label, form in (
            (panels[0], MEMORY, "least memory, % of the ideal (Figure 13)", ".3g"),
            (panels[1], SLOWER, "time of a batch over ideal (Figure 14)", ".2f"),
        ):
            bars(axes, result.points, names, quantity, form)
            axes.set_ylabel(label)
        panels[0].set_ylim(top=135)
        panels[0].legend(fontsize=8, loc="upper left", ncols=3)
        charts.even_line(panels[1], "ideal")
        charts.save(drawing, path)


def _entries(axes: Any, points: list[Point], names: tuple[str, ...]) -> list[Any]:
    """A legend's entries: what is drawn, and what a cross means if there is one."""
    crossed = any(not point.has(name, BATCH) for point in points for name in names)
    return [*axes.get_legend_handles_labels()[0], *([charts.marker_key("does not fit", "x")] if crossed else [])]


def _values(result: Result, name: str, quantity: str) -> list[float]:
    return [point.values(name, quantity)[0] for point in result.points if point.has(name, quantity)]
