"""Gradients of several devices on one bus: summed by a device at the end, or by the host meanwhile (moDNN, section 6).

Legend: M devices, G bytes of all gradients.
"""

from __future__ import annotations

from dataclasses import dataclass

from retime.schedules.budget import BlockKind, Phase, TaskGraph
from retime.schedules.modnn import COMPUTE, Direction, OffloadSchedule


@dataclass(frozen=True)
class Gradient:
    """The weight gradients that one task completes: when they are there, and when their weights are used last.

    Args:
        ready_ms: from the start of the round.
        free_ms: the weights may be overwritten from then on (W of a layer: after its BP1).
        bytes: of one device.
    """

    ready_ms: float
    free_ms: float
    bytes: int


@dataclass(frozen=True)
class Host:
    """What sums gradients: `bus_bytes_per_ms` in each direction for all devices together, and the processor."""

    devices: int
    bus_bytes_per_ms: float
    sum_bytes_per_ms: float


def gradients(graph: TaskGraph, schedule: OffloadSchedule) -> list[Gradient]:
    """The weight gradients of a round, by the time at which they are complete."""
    ends = {span.name: span.start_ms + span.duration_ms for span in schedule.spans if span.lane == COMPUTE}
    steps = [task for task in graph.tasks if task.phase is not Phase.UPDATE]
    ready: dict[str, float] = {}
    used: dict[str, float] = {}
    made_by: dict[str, set[str]] = {}
    for task in steps:
        for name in task.writes:
            if graph.blocks[name].kind is BlockKind.WEIGHT_GRADIENT:
                ready[name] = ends[task.name]
                made_by.setdefault(task.layer, set()).add(name)
        for name in task.reads:
            if graph.blocks[name].kind is BlockKind.WEIGHT:
                used[task.layer] = ends[task.name]
    free = {name: used.get(layer, ready[name]) for layer, names in made_by.items() for name in names}
    found = [
        Gradient(ready[name], max(ready[name], free[name]), graph.blocks[name].size_bytes(schedule.samples))
        for name in ready
    ]
    return sorted(found, key=lambda gradient: gradient.ready_ms)


def overlapped_ms(found: list[Gradient], schedule: OffloadSchedule, host: Host) -> float:
    """When the last weights are back on all devices, from the start of the last round (Figure 8).

    A gradient leaves all devices over the bus as soon as it is there and the bus free, the host sums it and updates the
    weights, which go back when no task needs the old ones. Copies of the schedule itself go first.
    """
    out = _Lane(schedule, Direction.OFFLOAD)
    back = _Lane(schedule, Direction.PREFETCH)
    summed_ms = finished_ms = 0.0
    for gradient in found:
        bus_ms = host.devices * gradient.bytes / host.bus_bytes_per_ms
        arrived_ms = out.after(gradient.ready_ms, bus_ms)
        summed_ms = max(summed_ms, arrived_ms) + summing_ms(gradient.bytes, host)
        finished_ms = max(finished_ms, back.after(max(summed_ms, gradient.free_ms), bus_ms))
    return max(backward_ms(schedule), finished_ms)


def naive_ms(found: list[Gradient], host: Host, device_bytes_per_ms: float) -> float:
    """What comes after a step when one device sums: all gradients to it, the sum, all weights back (section 7.5)."""
    total = sum(gradient.bytes for gradient in found)
    others = host.devices - 1
    adding = 3 * others * total / device_bytes_per_ms  # two reads and a write
    return 2 * others * total / host.bus_bytes_per_ms + adding


def summing_ms(nbytes: int, host: Host) -> float:
    """The host reads a gradient of every device and the weights, and writes the weights."""
    return (host.devices + 2) * nbytes / host.sum_bytes_per_ms


def backward_ms(schedule: OffloadSchedule) -> float:
    """When the last task before the updates ends."""
    return max(
        span.start_ms + span.duration_ms
        for span in schedule.spans
        if span.lane == COMPUTE and span.category != Phase.UPDATE.value
    )


class _Lane:
    """One direction of the bus, with the schedule's own copies in it."""

    def __init__(self, schedule: OffloadSchedule, direction: Direction) -> None:
        self._busy = sorted((copy.start_ms, copy.end_ms) for copy in schedule.copies if copy.direction is direction)
        self._free_ms = 0.0

    def after(self, ready_ms: float, duration_ms: float) -> float:
        """When a transfer ends that may start at `ready_ms`; what it cannot do before a copy it goes on with after."""
        now_ms, left_ms = max(self._free_ms, ready_ms), duration_ms
        for start_ms, end_ms in self._busy:
            if end_ms <= now_ms:
                continue
            if start_ms - now_ms >= left_ms:
                break
            left_ms -= max(0.0, start_ms - now_ms)
            now_ms = end_ms
        self._free_ms = now_ms + left_ms
        return self._free_ms
