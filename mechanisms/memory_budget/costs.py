"""What a training step costs on this machine, as a plan's chooser needs it: measured by ``calibrate``."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import torch

from retime.foundations.cpu_pool import MemoryPool, trim_heap, within
from retime.foundations.measure import MemoryProbe, forget_peak, status_bytes
from retime.foundations.parts import batch_statistics_layers
from retime.mechanisms.memory_budget.dry_run import DryRun, Operation, Size, StepProfile, TrainingStep, everything
from retime.mechanisms.memory_budget.offload import HostNone, HostTier, NoHooksError
from retime.schedules.budget import BlockKind, OffloadPlan, Phase
from retime.schedules.errors import ScheduleError

# What a step needs beside its tensors, measured on a few samples: operations' own memory, heaps, allocators' holes.

# A process's resident size is counted in batches of pages on each core; less than this may be none at all.
_NOISE_BYTES = 64 * 1024
_SCRATCH_RUNS = 2
# Python takes memory from the system in arenas of this size, and a step may need one more.
_ARENA_BYTES, _SPARE_SHARE = 2**20, 32
# Where it is not measured, so much of what a step needs is taken for an allocator's rounding and holes.
_HOLES_SHARE = 32


class ScratchMeter:
    """The most that each kind of operation allocates beyond the storages it returns.

    Args:
        pool: a CPU's, where it is installed: it counts oneDNN's scratch too. Else the process's resident size counts.

    Attributes:
        bytes: by phase, layer and name.
    """

    def __init__(self, device: torch.device, pool: MemoryPool) -> None:
        self.bytes: dict[tuple[Phase, str, str], int] = {}
        self._cuda = device if device.type == "cuda" else None
        self._pool = pool if pool.installed else None
        self._before = 0

    def before(self) -> None:
        if self._cuda is not None:
            forget_peak(self._cuda)
            self._before = torch.cuda.memory_allocated(self._cuda)
        elif self._pool is not None:
            self._pool.reset_peaks()
            self._before = self._pool.counts().live
        else:
            forget_peak()
            self._before = status_bytes("VmRSS")

    def after(self, operation: Operation, new_bytes: int) -> None:
        extra = self._peak() - self._before - new_bytes
        if extra < _NOISE_BYTES:
            return
        self.bytes[operation.kind] = max(self.bytes.get(operation.kind, 0), extra)

    def _peak(self) -> int:
        if self._cuda is not None:
            return torch.cuda.max_memory_allocated(self._cuda)
        return self._pool.counts().peak_live if self._pool is not None else status_bytes("VmHWM")


@dataclass(frozen=True)
class Scratch:
    """Memory that a step with so many samples at once needs beside its tensors, and what it saves.

    Attributes:
        operations: the most that each kind of operation allocates for itself.
        rest: what the process, or the device's allocator, has beyond that: heaps that grow, ranges that do not fit.
        saved_bytes: of the storages that it saves, which were all offloaded.
    """

    operations: dict[tuple[Phase, str, str], int]
    rest: int
    saved_bytes: int


def measured(
    step: TrainingStep, sizes: Sequence[int], host: HostTier, plain: StepProfile | None, pool: MemoryPool, room: int
) -> tuple[list[DryRun], list[Scratch]]:
    """Real runs of the first samples, so many at once, and what they need; all that can be is offloaded.

    Args:
        step: its state, and the random generators, stay as they are.
        host: where storages go; none where the step refuses saved-tensor hooks.
        plain: a dry run of the whole batch. With it the model's own parameters are read, unless the step writes into
            them; without it copies are.
        pool: whose limit is ``room``, and while memory is measured 0: what is kept is no need.
    """
    in_place = plain is not None and not plain.trace.writes_parameters
    # There is no step before, and no other rank.
    parts = [
        replace(step.of_size(size), optimizers=(), gradients="freed", buckets="", reduction_bytes=0) for size in sizes
    ]
    device = next(step.module.parameters()).device
    try:
        runs = [DryRun(part, real=True, host=host, in_place=in_place) for part in parts]
        return runs, [_measured(run, device, pool, room) for run in runs]
    except NoHooksError:
        runs = [DryRun(part, real=True, host=HostNone(), in_place=in_place) for part in parts]
        return runs, [_measured(run, device, pool, room) for run in runs]


def operations_between(low: Scratch, high: Scratch, small: int, large: int) -> dict[tuple[Phase, str, str], Size]:
    """Bytes that operations allocate for themselves at any size, from two."""
    first, last = low.operations, high.operations
    return {
        kind: line(first.get(kind, last.get(kind, 0)), last.get(kind, first.get(kind, 0)), small, large)
        for kind in first.keys() | last.keys()
    }


def rest_between(low: Scratch, high: Scratch, small: int, large: int) -> Size:
    """Bytes of the process beyond tensors and operations at any size, from two; noise does not grow with the batch."""
    if abs(high.rest - low.rest) < _NOISE_BYTES:
        return Size(float(max(low.rest, high.rest)))
    return line(min(low.rest, high.rest), high.rest, small, large)


def _measured(run: DryRun, device: torch.device, pool: MemoryPool, room: int) -> Scratch:
    plan = everything(run.step.samples)
    run.untraced(plan)  # libraries keep what they allocate when they are first used
    meter = ScratchMeter(device, pool)
    counted = torch.are_deterministic_algorithms_enabled()  # then nothing that differs from run to run may choose
    late = counted and not pool.installed and device.type != "cuda"  # the kernel's counts would
    profile = run.run(plan, compare=False, meter=None if late else meter)
    sizes = {kind: Size(nbytes) for kind, nbytes in meter.bytes.items()}
    before = sum(storage.nbytes for storage in profile.trace.storages if storage.born < 0)
    predicted, saved_bytes = profile.peak_with(sizes) - before, profile.saved_bytes
    del profile
    if counted:
        return Scratch(meter.bytes, max(0, predicted) // _HOLES_SHARE, saved_bytes)
    pool.limit(0)
    rest = min(
        _grown_by(run, plan, device) - predicted for _ in range(_SCRATCH_RUNS)
    )  # the first one fills gaps in the heap
    pool.limit(room)
    return Scratch(meter.bytes, max(0, rest), saved_bytes)


def _grown_by(run: DryRun, plan: OffloadPlan, device: torch.device) -> int:
    """The most that the process, or the device's allocator, has during a step beyond what it had before."""
    gc.collect()
    trim_heap()
    probe = MemoryProbe(device)
    base = torch.cuda.memory_allocated(device) if device.type == "cuda" else status_bytes("VmRSS")
    run.untraced(plan, probe)
    return probe.peaks()["batch"] - base


def line(first: int, last: int, small: int, large: int) -> Size:
    """Through two measurements; what does not grow counts with the larger one."""
    return Size.through(min(small, large - 1), first, large, last) if last > first else Size(float(first))


def spare_bytes(plain: StepProfile | None) -> int:
    """An arena, but no more than a small share of a small step."""
    return _ARENA_BYTES if plain is None else max(1, min(_ARENA_BYTES, plain.peak_bytes // _SPARE_SHARE))


# Times of a step by what it computes on: the same in every run, where clocks are not to choose.

_OPERATION_MS = 0.005
"""Time of an operation that computes on nothing."""
_BYTES_PER_MS = 1e7
"""That operations read and write."""
_DISK, _BUS = 1e6, 1e7
"""Bytes a millisecond from a CPU to its disk, and from a device to the host's memory."""


def counted_ms(plain: StepProfile | None) -> tuple[float, float]:
    """The fixed part of a sub-batch's time, and the part of each sample, from a dry run of the whole batch.

    What parameters have in it is read by every sub-batch, all else by the samples.
    """
    if plain is None:
        return 1.0, 1.0
    fixed = shared = 0
    trace, count = plain.trace, 0
    for operation in trace.operations:
        if operation.phase is Phase.UPDATE:
            continue
        count += 1
        for index in {*operation.reads, *operation.writes}:
            storage = trace.storages[index]
            if storage.kind in (BlockKind.WEIGHT, BlockKind.WEIGHT_GRADIENT):
                fixed += storage.nbytes
            else:
                shared += storage.nbytes
    return count * _OPERATION_MS + fixed / _BYTES_PER_MS, shared / _BYTES_PER_MS / plain.samples


@dataclass(frozen=True)
class StepCosts:
    """Times of a step's parts, the host tier's bandwidth, and what operations allocate for themselves.

    The defaults say only that more sub-batches and more bytes take longer; they are no measurement.

    Args:
        fixed_ms, sample_ms: forward and backward pass of one sub-batch: a fixed part, and a part for each sample.
        update_ms: the optimizers.
        out_bytes_per_ms, in_bytes_per_ms: to the host and back.
        hidden: the share of a copy's time that computation goes on beside it, 0 to 1.
        operations: what operations allocate for themselves while they run, by phase, layer and name.
        scratch_bytes: needed beyond all that: an allocator's rounding and holes.
        scratch_sample_bytes: of that for each sample of a sub-batch.
        few_samples, few_bytes: sub-batches of so many samples and fewer need so much instead: tensors that are small
            lie in the C library's heap, which grows by more than they need.
        spare_bytes: what a plan leaves free in its budget and is not expected to need.

    Raises:
        ScheduleError: a number is out of range.
    """

    fixed_ms: float = 1.0
    sample_ms: float = 1.0
    update_ms: float = 0.0
    out_bytes_per_ms: float = 1e6
    in_bytes_per_ms: float = 1e6
    hidden: float = 0.0
    operations: Mapping[tuple[Phase, str, str], Size] = field(default_factory=dict)
    scratch_bytes: float = 0.0
    scratch_sample_bytes: float = 0.0
    few_samples: int = 0
    few_bytes: float = 0.0
    spare_bytes: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.hidden <= 1:
            raise ScheduleError(f"hidden={self.hidden} is a share: give a number from 0 to 1")
        if self.out_bytes_per_ms <= 0 or self.in_bytes_per_ms <= 0:
            raise ScheduleError("bandwidths must be positive: give bytes a millisecond")

    def scratch(self, sub_batch: int) -> int:
        """Bytes beyond what tensors hold, with so many samples at once."""
        if sub_batch <= self.few_samples:
            return round(self.few_bytes)
        return max(0, round(self.scratch_bytes + self.scratch_sample_bytes * sub_batch))

    def step_ms(self, samples: int, sub_batch: int, out_bytes: int, in_bytes: int, *, ahead: bool = True) -> float:
        """Predicted time of a step.

        Args:
            out_bytes, in_bytes: copied in one sub-batch.
            ahead: copies run beside the computation; otherwise each is waited for.
        """
        count = -(-samples // sub_batch)
        computing = count * self.fixed_ms + samples * self.sample_ms
        copying = count * (out_bytes / self.out_bytes_per_ms + in_bytes / self.in_bytes_per_ms)
        hidden = min(copying * self.hidden, computing) if ahead else 0.0
        return computing + copying - hidden + self.update_ms


# What the dry run cannot know, measured on a few real steps: times, bandwidths, and memory that is in no tensor.

# A copy of so many bytes is timed, or of a share of what the budget leaves: two tensors, and what is under way.
_PROBE_BYTES, _SMALLEST_PROBE_BYTES, _PROBE_SHARE = 16 * 2**20, 2**18, 8
_REPEATS = 2


def calibrate(
    step: TrainingStep,
    host: HostTier,
    *,
    plain: StepProfile | None = None,
    budget_bytes: int = 2**62,
    timed: bool = True,
) -> StepCosts:
    """Run the step with two sub-batch sizes, and time copies to the host.

    They are an eighth and a quarter of the batch, or as many samples as fit into the budget, and at least two with
    batch statistics. While memory is measured, all that can be is offloaded: nothing where the step refuses
    saved-tensor hooks.

    Args:
        step: what to run. Its state, and the random generators, stay as they are.
        host: the tier that is timed.
        plain: a dry run of the whole batch. With it the model's own parameters are read, unless the step writes into
            them; without it copies are.
        budget_bytes: what the step may need, with parameters and the batch.
        timed: False asks no clock: times follow from bytes and operations, so that every run finds the same.
    """
    low, high, fits = _sizes_within(step, plain, budget_bytes)
    device = next(step.module.parameters()).device
    spare = spare_bytes(plain) if device.type == "cpu" else 0
    with within(step.given(), budget_bytes) as pool:
        room = budget_bytes - pool.bytes_elsewhere(step.given()) if pool.installed else 0
        runs, (first, last) = measured(step, (low, high), host, plain, pool, room)
        operations = operations_between(first, last, low, high)
        if not timed:
            fixed_ms, sample_ms = counted_ms(plain)
            copies = _DISK if device.type == "cpu" else _BUS
            return StepCosts(
                fixed_ms=fixed_ms,
                sample_ms=sample_ms,
                out_bytes_per_ms=copies,
                in_bytes_per_ms=copies,
                operations=operations,
                scratch_bytes=last.rest,
                spare_bytes=spare,
            )
        times = [_best_ms(partial(run.untraced, None if fits else everything(run.step.samples))) for run in runs]
        resident = 0 if plain is None else plain.resident_bytes
        nbytes = min(_PROBE_BYTES, max(_SMALLEST_PROBE_BYTES, (budget_bytes - resident) // _PROBE_SHARE))
        out, back, hidden = _bandwidth(host, device, nbytes)
        if fits:  # a buffer that is copied alone stays in a cache, so a step's copies may be slower
            copying_ms = _best_ms(partial(runs[1].untraced, everything(high))) - times[1]
            alone_ms = last.saved_bytes / out + last.saved_bytes / back
            slower = max(1.0, copying_ms / alone_ms) if alone_ms else 1.0
            out, back = out / slower, back / slower
    holes = rest_between(first, last, low, high)
    ms = Size.through(low, times[0], high, max(times))
    return StepCosts(
        fixed_ms=max(0.0, ms.fixed),
        sample_ms=ms.sample,
        out_bytes_per_ms=out,
        in_bytes_per_ms=back,
        hidden=hidden,
        operations=operations,
        scratch_bytes=holes.fixed,
        scratch_sample_bytes=holes.sample,
        few_samples=high - 1 if first.rest > last.rest else 0,
        few_bytes=first.rest,
        spare_bytes=spare,
    )


def fewest_samples(step: TrainingStep) -> int:
    """With how many samples at least the step runs: a BatchNorm after pooling refuses one."""
    return min(step.samples, 2 if batch_statistics_layers(step.module) else 1)


def _sizes_within(step: TrainingStep, plain: StepProfile | None, budget_bytes: int) -> tuple[int, int, bool]:
    """An eighth and a quarter of the batch, or what fits; and whether the plain step of the larger one does.

    They are equal only for the smallest batches.
    """
    samples, least = step.samples, fewest_samples(step)
    high, fits = max(2 * least, samples // 4), True
    if plain is not None:
        each = max(1, (plain.peak_bytes - plain.resident_bytes) // samples)
        room = (budget_bytes - plain.resident_bytes) // each
        high, fits = min(high, max(least + 1, room)), room > least
    high = min(high, samples)
    return max(least, min(high // 2, high - 1)), high, fits


def _best_ms(work: Callable[[], object]) -> float:
    """The shortest of a few: whatever else the machine does only makes them longer."""
    times = []
    for _ in range(_REPEATS):
        begin = time.perf_counter()
        work()
        times.append((time.perf_counter() - begin) * 1e3)
    return min(times)


def _bandwidth(host: HostTier, device: torch.device, nbytes: int) -> tuple[float, float, float]:
    """Bytes a millisecond out and back, and the share of a copy's time in which computation goes on."""
    source = torch.ones(nbytes, dtype=torch.uint8, device=device).untyped_storage()
    target = torch.empty(nbytes, dtype=torch.uint8, device=device).untyped_storage()

    def finish() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    def out() -> None:
        copy = host.store(source)
        copy.settle()
        finish()
        copy.free()

    kept = host.store(source)
    kept.settle()

    def back() -> None:
        kept.load(target).wait()
        finish()

    out_ms, back_ms = _best_ms(out), _best_ms(back)
    square = torch.rand(256, 256, device=device)

    def compute() -> None:
        for _ in range(20):
            torch.mm(square, square)
        finish()

    alone_ms = _best_ms(compute)

    begin, rounds = time.perf_counter(), 0
    copies = [host.store(source) for _ in range(4)]
    until = time.perf_counter() + 4 * out_ms / 1e3
    while time.perf_counter() < until:
        compute()
        rounds += 1
    for copy in copies:
        copy.settle()
        copy.free()
    total_ms = (time.perf_counter() - begin) * 1e3
    kept.free()
    done_ms = rounds * alone_ms
    hidden = min(1.0, max(0.0, (done_ms + 4 * out_ms - total_ms) / (4 * out_ms)))
    return nbytes / max(out_ms, 1e-6), nbytes / max(back_ms, 1e-6), hidden


# What the floor's plan needs beside its tensors, measured on samples that no budget has a part in choosing.

_HEAP_BYTES, _SHARE = 2**19, 16
_VARIES_BYTES = 2**18
"""What a process grows by beside tensors differs by as much from run to run."""


def least_costs(step: TrainingStep, host: HostTier, sub_batch: int, plain: StepProfile | None = None) -> StepCosts:
    """Costs of a step with the fewest samples at once, of memory alone: the same each time they are asked for.

    What operations allocate for themselves is counted by the pool, or by a device's allocator, and does not change.
    What a process grows by beyond that does, by some pages: on a CPU an allowance stands for it, of up to 1.5 MiB,
    that is doubled until it is, but for 256 KiB, as much as was measured.

    Args:
        step: what to run. Its state, and the random generators, stay as they are.
        sub_batch: the fewest samples; where that is the batch, a quarter and an eighth of it are measured.
        plain: see :func:`~retime.mechanisms.memory_budget.costs.measured`.

    Returns:
        ``scratch_bytes`` to add to the least plan, and ``spare_bytes`` to add to the plain step.
    """
    low, high = sub_batch, sub_batch
    if sub_batch == step.samples:
        low, high, _ = _sizes_within(step, None, 0)
    with within(step.given(), 0) as pool:
        _, profiles = measured(step, sorted({low, high}), host, plain, pool, 0)
    first, last = profiles[0], profiles[-1]
    operations = operations_between(first, last, low, high)
    rest = rest_between(first, last, low, high).at(sub_batch)
    if next(step.module.parameters()).device.type != "cpu":
        return StepCosts(operations=operations, scratch_bytes=rest, spare_bytes=rest)
    spare = spare_bytes(plain)
    scratch = allowance = spare + (_HEAP_BYTES if plain is None else min(_HEAP_BYTES, plain.peak_bytes // _SHARE))
    while scratch < rest - _VARIES_BYTES:
        scratch *= 2
    return StepCosts(operations=operations, scratch_bytes=scratch, spare_bytes=spare + scratch - allowance)
