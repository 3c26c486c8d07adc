"""Collects what a simulated round did, and makes the result of it."""

from __future__ import annotations

from retime.schedules.modnn.device import Device
from retime.schedules.modnn.result import COMPUTE, TRANSFER, OffloadSchedule, Stall
from retime.schedules.modnn.sized import SizedAlgorithm, SizedGraph
from retime.schedules.timeline import Span


class RunLog:
    """Written by a simulator while it runs."""

    def __init__(self, sized: SizedGraph, budget_bytes: int) -> None:
        self.sized = sized
        self.budget_bytes = budget_bytes
        self._compute_ms = 0.0
        self._spans: list[Span] = []
        self._stalls: list[Stall] = []
        self._algorithms: dict[str, str] = {}
        self._defragmentations: list[str] = []

    def stalled(self, task: int, waited_ms: float) -> None:
        """A task started so much after the stream of tasks was free."""
        if waited_ms > 0:
            self._stalls.append(Stall(self.sized.tasks[task].name, waited_ms))

    def defragmented(self, task: int) -> None:
        """Everything left the device before this task."""
        self._defragmentations.append(self.sized.tasks[task].name)

    def ran(self, task: int, start_ms: float, end_ms: float, algorithm: SizedAlgorithm) -> None:
        """A task ran."""
        described = self.sized.tasks[task]
        self._compute_ms += algorithm.ms
        self._spans.append(Span(described.name, COMPUTE, start_ms, end_ms - start_ms, described.phase.value))
        if len(self.sized.algorithms[task]) > 1:
            self._algorithms[described.name] = algorithm.name

    def result(self, device: Device, finish_ms: float) -> OffloadSchedule:
        """The schedule, once all tasks have run."""
        copies = sorted(device.copies, key=lambda copy: copy.start_ms)
        spans = [
            Span(copy.block, TRANSFER, copy.start_ms, copy.end_ms - copy.start_ms, copy.direction.value)
            for copy in copies
        ]
        resident = self.sized.resident_bytes
        return OffloadSchedule(
            samples=self.sized.samples,
            budget_bytes=self.budget_bytes,
            finish_ms=finish_ms,
            start_ms={span.name: span.start_ms for span in self._spans},
            compute_ms=self._compute_ms,
            stalls=tuple(self._stalls),
            algorithms=self._algorithms,
            copies=tuple(copies),
            placements=tuple(sorted(device.placements, key=lambda placement: placement.start_ms)),
            defragmentations=tuple(self._defragmentations),
            resident_bytes=resident,
            peak_bytes=resident + device.pool.high_water_bytes,
            live_peak_bytes=resident + device.pool.peak_bytes,
            spans=(*self._spans, *spans),
        )
