"""Data-parallel steps on paper: computations in order on one lane, gradient buckets on links that they share.

:func:`retime.schedules.simulate` runs lanes in a fixed order. Here the order on the network depends on what is ready
(priorities), two process groups share one link, and computations may slow down while the network is busy.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from retime.schedules.errors import check_count
from retime.schedules.network import Transfer
from retime.schedules.reverse_first_k import reverse_first_k
from retime.schedules.schedule import Kind, Task
from retime.schedules.timeline import Span

_NOTHING_MS = 1e-9  # sums of floats that should be equal differ by less


@dataclass(frozen=True)
class LayerCost:
    """Cost of one layer on one device.

    Args:
        forward_ms: F; with updates that run just before it, these too.
        output_gradient_ms: O; of layer 1 it is left out, as training does not need it.
        weight_gradient_ms: W.
        size_bytes: of the weight gradient; 0 for a layer without parameters.

    Raises:
        ValueError: when a number is negative or not finite.
    """

    forward_ms: float
    output_gradient_ms: float
    weight_gradient_ms: float
    size_bytes: int

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(f"{name}={value}: give a finite number, 0 or more")

    @property
    def compute_ms(self) -> float:
        return self.forward_ms + self.output_gradient_ms + self.weight_gradient_ms


@dataclass(frozen=True)
class Bucket:
    """Weight gradients that travel together, once the last of them is made.

    Args:
        layers: whose.
        queue: the process group; a queue sends one message at a time, and queues that send share the link evenly.
    """

    layers: tuple[int, ...]
    queue: str = "network"


@dataclass(frozen=True)
class Communication:
    """Rules by which the buckets get onto the link.

    Args:
        buckets: every layer with parameters in exactly one.
        transfer: the time that so many bytes take, such as :meth:`Cluster.all_reduce`.
        order: ``"fifo"`` sends in the order in which buckets fill; ``"priority"`` sends first what the next forward
            pass needs first, and goes over to a more urgent bucket at the next ``partition_bytes``.
        partition_bytes: the largest message; ``None`` for whole buckets.
        cross_iteration: the next ``F_i`` waits for layer i's bucket only; otherwise ``F_1`` waits for all.
        interference: share of the computation's speed that is lost while something is on the link (on hosts whose
            processors also move the data), 0 to below 1.
    """

    buckets: Sequence[Bucket]
    transfer: Callable[[float], Transfer]
    order: Literal["fifo", "priority"] = "fifo"
    partition_bytes: int | None = None
    cross_iteration: bool = True
    interference: float = 0.0


@dataclass(frozen=True)
class DataParallelTimeline:
    """Result of :func:`simulate_data_parallel`.

    Args:
        step_ms: of a step in steady state: from the end of one forward pass to the end of the next one.
        compute_ms: the part in which the device computes.
        idle_ms: the rest: what communication adds to the step.
        busy_ms: the time in which something is on the link.
        spans: one box a task or message; times from the start of the first step's forward pass.
    """

    step_ms: float
    compute_ms: float
    idle_ms: float
    busy_ms: float
    spans: tuple[Span, ...] = field(repr=False)


def layer_buckets(costs: Sequence[LayerCost]) -> list[Bucket]:
    """One bucket a layer that has parameters."""
    return [Bucket((layer,)) for layer, cost in enumerate(costs, 1) if cost.size_bytes]


def size_buckets(
    costs: Sequence[LayerCost], bucket_bytes: int, *, first_bytes: int | None = None, k: int = 0
) -> list[Bucket]:
    """Buckets as DistributedDataParallel fills them: from the last layer on, each closed once it holds enough bytes.

    Args:
        costs: of the layers, in forward order.
        bucket_bytes: ``bucket_cap_mb`` in bytes.
        first_bytes: the same for the first bucket of a queue; ``bucket_bytes`` when left out.
        k: the first k layers get buckets, and a queue, of their own, filled from layer 1 on.

    Raises:
        ValueError: when a number is out of its range.
    """
    check_count(bucket_bytes=bucket_bytes)
    check_count(0, k=k)
    if first_bytes is not None:
        check_count(1, ", or None for bucket_bytes", first_bytes=first_bytes)
    if k > len(costs):
        raise ValueError(f"k={k}: give 0 (nothing deferred) to {len(costs)}, the number of layers")
    deferred = list(range(1, k + 1)) if k > 1 else []
    rest = range(len(costs), len(deferred), -1)
    return [
        bucket
        for queue, layers in (("network", rest), ("first k", deferred))
        for bucket in _filled(costs, layers, queue, bucket_bytes, bucket_bytes if first_bytes is None else first_bytes)
    ]


def simulate_data_parallel(
    costs: Sequence[LayerCost], communication: Communication, *, k: int = 0, steps: int = 2
) -> DataParallelTimeline:
    """Run data-parallel steps in reverse-first-k order and take the time of the last one.

    Every message of a step ends before the next step's last forward, so a step starts its backward pass with an idle
    link and steps are alike from the second on.

    Args:
        costs: of the layers, in forward order.
        communication: buckets, link and order.
        k: how many layers defer their weight gradients.
        steps: at least 2.

    Raises:
        ValueError: when a number is out of its range, or the buckets do not hold every layer with parameters once.
    """
    check_count(2, "; the first has nothing to wait for", steps=steps)
    _check(costs, communication)
    return _Run(costs, communication, k, steps).timeline()


@dataclass(eq=False)
class _Message:
    """A partition of a bucket on its way."""

    name: str
    bucket: Bucket
    step: int
    latency_ms: float
    busy_ms: float
    started_ms: float = 0.0


class _Run:
    def __init__(self, costs: Sequence[LayerCost], communication: Communication, k: int, steps: int) -> None:
        self._costs = costs
        self._how = communication
        without = {layer for layer, cost in enumerate(costs, 1) if not cost.size_bytes and not cost.weight_gradient_ms}
        schedule = reverse_first_k(len(costs), k, steps=steps, without_weights=without)
        self._tasks = [task for task in schedule if task.kind is not Kind.S]
        self._layers, self._steps = len(costs), steps
        self._bucket_of = {layer: bucket for bucket in communication.buckets for layer in bucket.layers}
        # per step: weight gradients that a bucket still lacks, and bytes of it that have not arrived
        self._lacking = {(b, s): len(b.layers) for b in communication.buckets for s in range(steps)}
        self._underway = {(b, s): 1 for b in communication.buckets for s in range(steps)}
        self._waiting: dict[str, list[_Message]] = {bucket.queue: [] for bucket in communication.buckets}
        self._sending: dict[str, _Message | None] = dict.fromkeys(self._waiting)
        self._now_ms = self._link_busy_ms = self._started_ms = 0.0
        self._position = 0
        self._left_ms: float | None = None  # of the computation that runs
        self._ends: dict[Task, float] = {}
        self._link_busy_at: dict[Task, float] = {}
        self._spans: list[Span] = []
        while self._position < len(self._tasks) or any((*self._sending.values(), *self._waiting.values())):
            self._start()
            self._advance()

    def timeline(self) -> DataParallelTimeline:
        last = Task(Kind.F, self._layers, step=self._steps - 1)
        before = Task(Kind.F, self._layers, step=self._steps - 2)
        step_ms = self._ends[last] - self._ends[before]
        idle_ms = step_ms - sum(
            span.duration_ms
            for span in self._spans
            if span.lane == "compute" and self._ends[before] - _NOTHING_MS <= span.start_ms < self._ends[last]
        )
        return DataParallelTimeline(
            step_ms=step_ms,
            compute_ms=step_ms - max(0.0, idle_ms),
            idle_ms=max(0.0, idle_ms),
            busy_ms=self._link_busy_at[last] - self._link_busy_at[before],
            spans=tuple(self._spans),
        )

    def _start(self) -> None:
        """Start what can start now; computations and messages that take no time end at once."""
        for queue, waiting in self._waiting.items():
            if self._sending[queue] is None and waiting:
                message = min(waiting, key=self._urgency) if self._how.order == "priority" else waiting[0]
                waiting.remove(message)
                message.started_ms = self._now_ms
                self._sending[queue] = message
        if self._left_ms is None and self._position < len(self._tasks):
            task = self._tasks[self._position]
            if self._may_run(task):
                self._left_ms, self._started_ms = self._cost_ms(task), self._now_ms

    def _urgency(self, message: _Message) -> tuple[int, int]:
        return message.step, min(message.bucket.layers)

    def _may_run(self, task: Task) -> bool:
        if task.kind is not Kind.F or task.step == 0:
            return True
        if self._how.cross_iteration:
            bucket = self._bucket_of.get(task.layer)
            return bucket is None or not self._underway[bucket, task.step - 1]
        return not any(self._underway[bucket, task.step - 1] for bucket in self._how.buckets)

    def _cost_ms(self, task: Task) -> float:
        cost = self._costs[task.layer - 1]
        return {Kind.F: cost.forward_ms, Kind.O: cost.output_gradient_ms, Kind.W: cost.weight_gradient_ms}[task.kind]

    def _advance(self) -> None:
        """Go to the next moment at which something ends."""
        sending = [message for message in self._sending.values() if message]
        on_link = [message for message in sending if message.latency_ms <= _NOTHING_MS]
        speed = 1.0 - self._how.interference if on_link else 1.0
        ends = [message.latency_ms for message in sending if message.latency_ms > _NOTHING_MS]
        ends += [message.busy_ms * len(on_link) for message in on_link]
        if self._left_ms is not None:
            ends.append(self._left_ms / speed)
        passed_ms = min(ends)
        self._now_ms += passed_ms
        if on_link:
            self._link_busy_ms += passed_ms
        for message in sending:
            if message in on_link:
                message.busy_ms -= passed_ms / len(on_link)
            else:
                message.latency_ms -= passed_ms
        for message in sending:
            if message.latency_ms <= _NOTHING_MS and message.busy_ms <= _NOTHING_MS:
                self._arrived(message)
                self._sending[message.bucket.queue] = None
        if self._left_ms is not None:
            self._left_ms -= passed_ms * speed
            if self._left_ms <= _NOTHING_MS:
                self._computed(self._tasks[self._position])

    def _computed(self, task: Task) -> None:
        self._left_ms = None
        self._position += 1
        self._ends[task] = self._now_ms
        self._link_busy_at[task] = self._link_busy_ms
        self._note(str(task), "compute", self._started_ms, task.kind.words)
        bucket = self._bucket_of.get(task.layer)
        if task.kind is Kind.W and bucket:
            self._lacking[bucket, task.step] -= 1
            if not self._lacking[bucket, task.step]:
                self._send(bucket, task.step)

    def _send(self, bucket: Bucket, step: int) -> None:
        size_bytes = sum(self._costs[layer - 1].size_bytes for layer in bucket.layers)
        parts = math.ceil(size_bytes / (self._how.partition_bytes or size_bytes))
        name = "+".join(f"S{layer}{chr(39) * step}" for layer in bucket.layers)
        self._underway[bucket, step] = parts
        for _ in range(parts):
            part = self._how.transfer(size_bytes / parts)
            self._waiting[bucket.queue].append(_Message(name, bucket, step, part.latency_ms, part.busy_ms))

    def _arrived(self, message: _Message) -> None:
        self._underway[message.bucket, message.step] -= 1
        self._note(message.name, message.bucket.queue, message.started_ms, Kind.S.words)

    def _note(self, name: str, lane: str, start_ms: float, category: str) -> None:
        self._spans.append(Span(name, lane, start_ms, self._now_ms - start_ms, category))


def _filled(
    costs: Sequence[LayerCost], layers: Sequence[int], queue: str, bucket_bytes: int, first_bytes: int
) -> list[Bucket]:
    buckets: list[Bucket] = []
    bucket: list[int] = []
    held_bytes = 0
    for layer in layers:
        if not costs[layer - 1].size_bytes:
            continue
        bucket.append(layer)
        held_bytes += costs[layer - 1].size_bytes
        if held_bytes >= (bucket_bytes if buckets else first_bytes):
            buckets.append(Bucket(tuple(bucket), queue))
            bucket, held_bytes = [], 0
    return [*buckets, Bucket(tuple(bucket), queue)] if bucket else buckets


def _check(costs: Sequence[LayerCost], communication: Communication) -> None:
    if not 0 <= communication.interference < 1:
        raise ValueError(f"interference={communication.interference}: give 0 or more, below 1")
    if communication.partition_bytes is not None:
        check_count(1, ", or None for whole buckets", partition_bytes=communication.partition_bytes)
    if communication.order not in ("fifo", "priority"):
        raise ValueError(f"order={communication.order!r}: give 'fifo' or 'priority'")
    sent = sorted(layer for bucket in communication.buckets for layer in bucket.layers)
    wanted = [layer for layer, cost in enumerate(costs, 1) if cost.size_bytes]
    if sent != wanted or not all(bucket.layers for bucket in communication.buckets):
        raise ValueError(
            f"the buckets hold the layers {sent}, those with parameters are {wanted}: put each into one, and none empty"
        )
