"""What the dry run cannot know, measured on a few real steps: times, bandwidths, and memory that is in no tensor."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch

from retime.mechanisms.memory.batchnorm import batch_statistics_layers
from retime.mechanisms.memory.costs import StepCosts
from retime.mechanisms.memory.heap import trim_heap
from retime.mechanisms.memory.host import HostNone, HostTier
from retime.mechanisms.memory.offload import NoHooksError
from retime.mechanisms.memory.pool import MemoryPool, within
from retime.mechanisms.memory.profile import Size, StepProfile
from retime.mechanisms.memory.replay import EVERYTHING, DryRun, TrainingStep
from retime.mechanisms.memory.trace import Operation
from retime.mechanisms.memory_probe import MemoryProbe, forget_peak, status_bytes
from retime.schedules.memory import OffloadPlan, Phase

# A process's resident size is counted in batches of pages on each core; less than this may be none at all.
_NOISE_BYTES = 64 * 1024
# A copy of so many bytes is timed, or of a share of what the budget leaves: two tensors, and what is under way.
_PROBE_BYTES, _SMALLEST_PROBE_BYTES, _PROBE_SHARE = 16 * 2**20, 2**18, 8
_REPEATS = 2
# Python takes memory from the system in arenas of this size, and a step may need one more.
_ARENA_BYTES, _SPARE_SHARE = 2**20, 32


class ScratchMeter:
    """The most that each kind of operation allocates beyond the storages it returns.

    Args:
        device: whose allocator is asked.
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
            torch.cuda.reset_peak_memory_stats(self._cuda)
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


def calibrate(
    step: TrainingStep,
    host: HostTier,
    *,
    sub_batches: tuple[int, int] | None = None,
    plain: StepProfile | None = None,
    budget_bytes: int = 2**62,
) -> StepCosts:
    """Run the step with two sub-batch sizes, and time copies to the host.

    Args:
        step: what to run. Its state, and the random generators, stay as they are.
        host: the tier that is timed.
        sub_batches: numbers of samples, the smaller one first; by default an eighth and a quarter of the batch, or as
            many as fit into the budget, and at least two samples with batch statistics. While memory is measured, all
            that can be is offloaded: nothing where the step refuses saved-tensor hooks.
        plain: a dry run of the whole batch. With it the model's own parameters are read, unless the step writes into
            them; without it copies are.
        budget_bytes: what the step may need, with parameters and the batch.

    Raises:
        ValueError: two equal sizes, or more samples than the batch has.
    """
    if sub_batches and not 0 < sub_batches[0] < sub_batches[1] <= step.samples:
        raise ValueError(f"{sub_batches=}: give two sizes within the batch of {step.samples}, smaller first")
    # A BatchNorm after pooling refuses one sample.
    least = min(step.samples, 2 if batch_statistics_layers(step.module) else 1)
    low, high, fits = (*sub_batches, True) if sub_batches else _sizes_within(step.samples, least, plain, budget_bytes)
    parameter = next(step.module.parameters())
    in_place = plain is not None and not plain.trace.writes_parameters

    def runs_to(tier: HostTier) -> list[DryRun]:
        # There is no step before, and no other rank.
        parts = [
            replace(step.of_size(size), optimizers=(), gradients="freed", buckets="", reduction_bytes=0)
            for size in (low, high)
        ]
        return [DryRun(part, real=True, host=tier, in_place=in_place) for part in parts]

    with within(step.given(), budget_bytes) as pool:
        room = budget_bytes - pool.bytes_elsewhere(step.given()) if pool.installed else 0
        runs = runs_to(host)
        try:
            found = [_scratch(run, parameter.device, pool, room) for run in runs]
        except NoHooksError:
            runs = runs_to(HostNone())
            found = [_scratch(run, parameter.device, pool, room) for run in runs]
        scratch, rest, saved = zip(*found, strict=True)
        times = [_best_ms(partial(run.untraced, None if fits else _all_of(run.step.samples))) for run in runs]
        resident = 0 if plain is None else plain.resident_bytes
        nbytes = min(_PROBE_BYTES, max(_SMALLEST_PROBE_BYTES, (budget_bytes - resident) // _PROBE_SHARE))
        bandwidth = _bandwidth(host, parameter.device, nbytes)
        if fits:
            copying_ms = _best_ms(partial(runs[1].untraced, _all_of(high))) - times[1]
            bandwidth = bandwidth.no_faster_than(copying_ms, saved[1])
    holes = _line(min(rest), rest[1], low, high)
    sample_ms = max(0.0, (times[1] - times[0]) / max(1, high - low))
    return StepCosts(
        fixed_ms=max(0.0, times[0] - low * sample_ms),
        sample_ms=sample_ms,
        out_bytes_per_ms=bandwidth.out,
        in_bytes_per_ms=bandwidth.back,
        hidden=bandwidth.hidden,
        operations=_sizes(scratch[0], scratch[1], low, high),
        scratch_bytes=holes.fixed,
        scratch_sample_bytes=holes.sample,
        few_samples=high - 1 if rest[0] > rest[1] else 0,
        few_bytes=rest[0],
        spare_bytes=_spare_bytes(plain) if parameter.device.type == "cpu" else 0,
    )


def _sizes_within(samples: int, least: int, plain: StepProfile | None, budget_bytes: int) -> tuple[int, int, bool]:
    """Two sizes, equal only for the smallest batches, and whether the plain step of the larger one fits."""
    high, fits = max(2 * least, samples // 4), True
    if plain is not None:
        each = max(1, (plain.peak_bytes - plain.resident_bytes) // samples)
        room = (budget_bytes - plain.resident_bytes) // each
        high, fits = min(high, max(least + 1, room)), room > least
    high = min(high, samples)
    return max(least, min(high // 2, high - 1)), high, fits


def _spare_bytes(plain: StepProfile | None) -> int:
    """An arena, but no more than a small share of a small step."""
    return _ARENA_BYTES if plain is None else max(1, min(_ARENA_BYTES, plain.peak_bytes // _SPARE_SHARE))


def _all_of(samples: int) -> OffloadPlan:
    return OffloadPlan(samples, EVERYTHING, 0, len(EVERYTHING))


def _scratch(
    run: DryRun, device: torch.device, pool: MemoryPool, room: int
) -> tuple[dict[tuple[Phase, str, str], int], int, int]:
    """What operations allocate for themselves, what a step needs beyond that and its tensors, and what it saves."""
    plan = _all_of(run.step.samples)
    run.untraced(plan)  # libraries keep what they allocate when they are first used
    meter = ScratchMeter(device, pool)
    profile = run.run(plan, compare=False, meter=meter)
    sizes = {kind: Size(nbytes) for kind, nbytes in meter.bytes.items()}
    before = sum(storage.nbytes for storage in profile.trace.storages if storage.born < 0)
    predicted, saved_bytes = profile.peak_with(sizes) - before, profile.saved_bytes
    del profile
    pool.limit(0)  # what is kept is no need
    rest = min(
        _grown_by(run, plan, device) - predicted for _ in range(_REPEATS)
    )  # the first one fills gaps in the heap
    pool.limit(room)
    return meter.bytes, max(0, rest), saved_bytes


def _grown_by(run: DryRun, plan: OffloadPlan, device: torch.device) -> int:
    """The most that the process, or the device's allocator, has during a step beyond what it had before."""
    gc.collect()
    trim_heap()
    probe = MemoryProbe(device)
    base = torch.cuda.memory_allocated(device) if device.type == "cuda" else status_bytes("VmRSS")
    run.untraced(plan, probe)
    return probe.peaks()["batch"] - base


def _sizes(
    low: dict[tuple[Phase, str, str], int], high: dict[tuple[Phase, str, str], int], small: int, large: int
) -> dict[tuple[Phase, str, str], Size]:
    return {
        kind: _line(low.get(kind, high.get(kind, 0)), high.get(kind, low.get(kind, 0)), small, large)
        for kind in low.keys() | high.keys()
    }


def _line(first: int, last: int, small: int, large: int) -> Size:
    """Through two measurements; what does not grow counts with the larger one."""
    slope = max(0.0, (last - first) / max(1, large - small))
    return Size(max(float(first), float(last)) - slope * large, slope)


def _best_ms(work: Callable[[], object]) -> float:
    """The shortest of a few: whatever else the machine does only makes them longer."""
    times = []
    for _ in range(_REPEATS):
        begin = time.perf_counter()
        work()
        times.append((time.perf_counter() - begin) * 1e3)
    return min(times)


@dataclass(frozen=True)
class _Bandwidth:
    """Bytes a millisecond out and back, and the share of a copy's time in which computation goes on."""

    out: float
    back: float
    hidden: float

    def no_faster_than(self, copying_ms: float, nbytes: int) -> _Bandwidth:
        """What a step showed that moved so many bytes out and back; a buffer that is copied alone stays in a cache."""
        alone_ms = nbytes / self.out + nbytes / self.back
        slower = max(1.0, copying_ms / alone_ms) if alone_ms else 1.0
        return _Bandwidth(self.out / slower, self.back / slower, self.hidden)


def _bandwidth(host: HostTier, device: torch.device, nbytes: int) -> _Bandwidth:
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

    def both() -> int:
        copies = [host.store(source) for _ in range(4)]
        until = time.perf_counter() + 4 * out_ms / 1e3
        rounds = 0
        while time.perf_counter() < until:
            compute()
            rounds += 1
        for copy in copies:
            copy.settle()
            copy.free()
        return rounds

    begin = time.perf_counter()
    rounds = both()
    total_ms = (time.perf_counter() - begin) * 1e3
    kept.free()
    done_ms = rounds * alone_ms
    hidden = min(1.0, max(0.0, (done_ms + 4 * out_ms - total_ms) / (4 * out_ms)))
    return _Bandwidth(nbytes / max(out_ms, 1e-6), nbytes / max(back_ms, 1e-6), hidden)
