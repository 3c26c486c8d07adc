"""Figures 17 to 19 of moDNN, simulated: four devices against one, on one bus.

Gradients are summed by a device at the end, or by the host meanwhile (section 6).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from retime.foundations.measure import spread
from retime.recipes.core import charts
from retime.recipes.core.claims import Claim, Comparison
from retime.recipes.core.recipe import Measured, Tick
from retime.recipes.core.results import Point, Result, Row
from retime.recipes.modnn.floor import GB
from retime.recipes.modnn.settings import MemorySettings, claim
from retime.recipes.modnn.simulated import ALL_THERE_IS, BATCH, IDEAL, SimulatedK40, ideal_time_ms
from retime.schedules.budget import BlockKind, BudgetError, Phase, TaskGraph
from retime.schedules.modnn import (
    COMPUTE,
    BatchPlan,
    Direction,
    OffloadSchedule,
    Techniques,
    offload_schedule,
    plan_batch,
)


@dataclass(frozen=True)
class Gradient:
    """The weight gradients that one task completes: when they are there, and when their weights are used last."""

    ready_ms: float  # from the start of the round
    free_ms: float  # the weights may be overwritten from then on (W of a layer: after its BP1)
    bytes: int  # of one device


@dataclass(frozen=True)
class Host:
    """Host that sums gradients: `bus_bytes_per_ms` in each direction for all devices together, and the processor."""

    devices: int
    bus_bytes_per_ms: float
    sum_bytes_per_ms: float


def gradients(graph: TaskGraph, schedule: OffloadSchedule) -> list[Gradient]:
    """The weight gradients of a round, by the time at which they are complete."""
    ends = {span.name: span.start_ms + span.duration_ms for span in schedule.spans if span.lane == COMPUTE}
    ready: dict[str, float] = {}
    layers: dict[str, str] = {}
    used: dict[str, float] = {}
    for task in graph.tasks:
        if task.phase is Phase.UPDATE:
            continue
        for name in task.writes:
            if graph.blocks[name].kind is BlockKind.WEIGHT_GRADIENT:
                ready[name], layers[name] = ends[task.name], task.layer
        for name in task.reads:
            if graph.blocks[name].kind is BlockKind.WEIGHT:
                used[task.layer] = ends[task.name]
    gradients = [
        Gradient(at_ms, max(at_ms, used.get(layers[name], at_ms)), graph.blocks[name].size_bytes(schedule.samples))
        for name, at_ms in ready.items()
    ]
    return sorted(gradients, key=lambda gradient: gradient.ready_ms)


def overlapped_ms(gradients: list[Gradient], schedule: OffloadSchedule, host: Host) -> float:
    """Milliseconds from the start of the last round until the last weights are back on all devices (Figure 8).

    A gradient leaves all devices over the bus as soon as it is there and the bus free, the host sums it and updates the
    weights, which go back when no task needs the old ones. Copies of the schedule itself go first.
    """
    out, back = (
        sorted((copy.start_ms, copy.end_ms) for copy in schedule.copies if copy.direction is direction)
        for direction in (Direction.OFFLOAD, Direction.PREFETCH)
    )
    arrived_ms = summed_ms = finished_ms = 0.0
    for gradient in gradients:
        bus_ms = host.devices * gradient.bytes / host.bus_bytes_per_ms
        arrived_ms = _transferred_ms(out, max(arrived_ms, gradient.ready_ms), bus_ms)
        # the host reads a gradient of every device and the weights, and writes the weights
        summed_ms = max(summed_ms, arrived_ms) + (host.devices + 2) * gradient.bytes / host.sum_bytes_per_ms
        finished_ms = _transferred_ms(back, max(finished_ms, summed_ms, gradient.free_ms), bus_ms)
    return max(backward_ms(schedule), finished_ms)


def _overlapped_batch_ms(graph: TaskGraph, plan: BatchPlan, host: Host) -> float:
    last_ms = overlapped_ms(gradients(graph, plan.last), plan.last, host)
    return (plan.rounds - 1) * plan.round.finish_ms + last_ms


def _transferred_ms(copies: list[tuple[float, float]], now_ms: float, left_ms: float) -> float:
    """End of a transfer on the bus beside these copies; what it cannot do before a copy it goes on with after."""
    for start_ms, end_ms in copies:
        if end_ms <= now_ms:
            continue
        if start_ms - now_ms >= left_ms:
            break
        left_ms -= max(0.0, start_ms - now_ms)
        now_ms = end_ms
    return now_ms + left_ms


def naive_ms(gradients: list[Gradient], host: Host, device_bytes_per_ms: float) -> float:
    """Time after a step when one device sums: all gradients to it, the sum, all weights back (section 7.5)."""
    total = sum(gradient.bytes for gradient in gradients)
    others = host.devices - 1
    adding = 3 * others * total / device_bytes_per_ms  # two reads and a write
    return 2 * others * total / host.bus_bytes_per_ms + adding


def backward_ms(schedule: OffloadSchedule) -> float:
    """End of the last task before the updates."""
    return max(
        span.start_ms + span.duration_ms
        for span in schedule.spans
        if span.lane == COMPUTE and span.category != Phase.UPDATE.value
    )


FOUR_IDEAL, NAIVE, ONE = "ideal, naive", "moDNN, naive", "moDNN on one device with all memory"
MORE_DEVICES = "speed of each of {} devices over each of {}, 1 core"
ALL_CORES = 20
"""Of the paper's host; `cores_speedup` is theirs together."""


def overlapped(cores: int) -> str:
    """The variant whose gradients the host sums meanwhile on so many cores."""
    return f"moDNN, overlapped, {cores} core{'s' if cores > 1 else ''}"


class FourDevices(SimulatedK40):
    """A point a network and a budget of each device, in GB."""

    axes = ("budgets",)

    def points(self, settings: MemorySettings) -> list[dict[str, Any]]:
        unknown = [cores for cores in settings.cores if cores not in (1, ALL_CORES)]
        if unknown:
            raise ValueError(
                f"cores has {unknown[0]}: the paper tells the speed of 1 and of all {ALL_CORES}, choose these"
            )
        return [{"network": name, "budget_gb": float(gb)} for name in settings.cases for gb in settings.budgets]

    def references(self, point: Point) -> dict[str, str]:
        return {"speed over ideal on one": IDEAL, "speed over moDNN on one": ONE}

    def measure(self, settings: MemorySettings, at: dict[str, Any], tick: Tick) -> Measured:
        graph, batch = self.graph(settings, at["network"]), settings.cases[at["network"]]["batch_size"]
        share, bus = batch // settings.devices, settings.transfer_bytes_per_s / 1e3
        memory = settings.memory_bytes_per_s * settings.memory_efficiency / 1e3
        budget = int(at["budget_gb"] * GB)
        whole = offload_schedule(graph, share, ALL_THERE_IS, bus, Techniques("fastest"))
        rates = {1: settings.sum_bytes_per_s / 1e3, ALL_CORES: settings.cores_speedup * settings.sum_bytes_per_s / 1e3}
        hosts = {cores: Host(settings.devices, bus, rates[cores]) for cores in settings.cores}
        naive = naive_ms(gradients(graph, whole), hosts[settings.cores[0]], memory)
        rows = [
            Row(IDEAL, BATCH, "ms", [ideal_time_ms(graph, batch, bus)]),
            Row(FOUR_IDEAL, BATCH, "ms", [whole.finish_ms + naive]),
        ]
        facts: dict[str, Any] = {"batch size": batch, "gradients summed naively ms": round(naive, 2)}
        try:
            # offloads of all devices share the bus
            plan = plan_batch(graph, share, budget, bus / settings.devices)
            alone = plan_batch(graph, batch, budget * settings.devices, bus)
        except BudgetError as refusal:
            facts["does not fit"] = str(refusal)
            return Measured(rows, facts)
        rows.append(Row(ONE, BATCH, "ms", [alone.batch_ms]))
        rows.append(Row(NAIVE, BATCH, "ms", [plan.batch_ms + naive]))
        hidden_ms = (plan.rounds - 1) * plan.round.finish_ms + backward_ms(plan.last)
        for cores, host in hosts.items():
            rows.append(Row(overlapped(cores), BATCH, "ms", [_overlapped_batch_ms(graph, plan, host)]))
            facts[f"not hidden with {cores} cores ms"] = round(rows[-1].values[0] - hidden_ms, 2)
        twice = 2 * settings.devices
        on_twice = plan_batch(graph, batch // twice, budget, bus / twice)
        plain_ms, twice_ms = (
            _overlapped_batch_ms(graph, each, Host(devices, bus, rates[1]))
            for each, devices in ((plan, settings.devices), (on_twice, twice))
        )
        facts[MORE_DEVICES.format(twice, settings.devices)] = round(plain_ms / (2 * twice_ms), 4)
        return Measured(rows, {**facts, "sub-batches of": plan.sub_batch, "sub-batches on one": alone.sub_batch})

    def compare(self, result: Result) -> list[Comparison]:
        def line(published: Claim, budget_gb: float, reference: str, variant: str) -> Comparison:
            points = [p for p in result.points if p.at["budget_gb"] == budget_gb and p.has(variant, BATCH)]
            if not points:
                return Comparison(published)
            speeds = [p.values(reference, BATCH)[0] / p.values(variant, BATCH)[0] for p in points]
            remark = f"simulated, {len(points)} networks, {min(speeds):.2f} to {max(speeds):.2f}"
            return Comparison(published, spread([fmean(speeds)]), remark)

        return [
            line(claim("figure-17-ideal"), 12, IDEAL, FOUR_IDEAL),
            line(claim("figure-17-modnn"), 12, IDEAL, overlapped(1)),
            line(claim("figure-18-6-gb"), 6, IDEAL, overlapped(1)),
            line(claim("figure-18-6-gb-naive"), 6, IDEAL, NAIVE),
            line(claim("figure-18-3-gb"), 3, IDEAL, overlapped(1)),
            line(claim("figure-18-3-gb-naive"), 3, IDEAL, NAIVE),
            line(claim("figure-18-3-gb-cores"), 3, IDEAL, overlapped(ALL_CORES)),
            line(claim("figure-19"), 3, ONE, overlapped(1)),
            line(claim("figure-19-cores"), 3, ONE, overlapped(ALL_CORES)),
        ]

    def notes(self, result: Result) -> list[str]:
        given = result.points[0].settings
        compared = self.compare(result)
        away = [100 * (line.measured.median / line.against.value - 1) for line in compared if line.measured is not None]
        distance = f"{min(away, default=0):+.0f} to {max(away, default=0):+.0f} %"
        lines = [
            *super().notes(result),
            f"{given['devices']} devices share one bus of {given['transfer_bytes_per_s'] / 1e9:g} GB/s in each "
            "direction. Naive: all gradients go to one device after the step, are added there, and the weights go "
            "back. Overlapped: each gradient of the last sub-batch leaves as soon as it is there, the host sums and "
            f"updates with {given['sum_bytes_per_s'] / 1e9:g} GB/s of memory traffic a core (assumed), and the weights "
            f"go back; all cores together are {given['cores_speedup']:g} times as fast (section 7.5: 2 to 3 times).",
            *([f"Speeds are {distance} away from the paper's, averages of networks each."] if away else []),
            "What is not simulated: the paper's machine has two processors with a bus each and traffic between them, "
            "which it does not describe; its kernels lose more at a quarter of the batch than a roofline does; and the "
            "launches of copies (2 M a layer) cost nothing here. Large gradients, as of VGG and FCN, cost the naive "
            "way most; with small budgets the last sub-batch is shorter, and less of the sums is hidden behind it.",
        ]
        lines += [
            f"- {point.at['network']}, {point.at['budget_gb']:g} GB: {point.facts['does not fit']}"
            for point in result.points
            if "does not fit" in point.facts
        ]
        return lines

    def draw(self, result: Result, path: Path) -> None:
        budgets = sorted({point.at["budget_gb"] for point in result.points}, reverse=True)
        drawing, panels = charts.panels(result.title, max(1, len(budgets)), width=15.0, height=5.0, sharey=True)
        for axes, budget in zip(panels, budgets, strict=False):
            own = [point for point in result.points if point.at["budget_gb"] == budget]
            names = [name for name in dict.fromkeys(row.variant for p in own for row in p.rows) if name != IDEAL]
            for index, name in enumerate(names):
                measured = [(place, p) for place, p in enumerate(own) if p.has(name, BATCH)]
                speeds = [p.values(IDEAL, BATCH)[0] / p.values(name, BATCH)[0] for _, p in measured]
                shift = (index - (len(names) - 1) / 2) * 0.8 / len(names)
                places = [place + shift for place, _ in measured]
                axes.bar(places, speeds, width=0.8 / len(names), color=charts.COLOURS[index], label=name)
            axes.set_xticks(range(len(own)), [p.at["network"] for p in own], rotation=20)
            axes.set_title(f"{budget:g} GB on each device", fontsize=10)
            charts.even_line(axes, "ideal on one device")
        panels[0].set_ylabel("speed over the ideal case on one device")
        panels[0].set_ylim(0, panels[0].get_ylim()[1] * 1.35)
        panels[0].legend(fontsize=8, loc="upper left", ncols=2)
        charts.save(drawing, path)
