"""What a step needs beside its tensors, measured on a few samples: operations' own memory, heaps, allocators' holes."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from retime.foundations.cpu_pool import MemoryPool, trim_heap
from retime.foundations.measure import MemoryProbe, forget_peak, status_bytes
from retime.mechanisms.memory_budget.dry_run import DryRun, Operation, Size, StepProfile, TrainingStep, everything
from retime.mechanisms.memory_budget.host import HostNone, HostTier
from retime.mechanisms.memory_budget.offload import NoHooksError
from retime.schedules.budget import OffloadPlan, Phase

# A process's resident size is counted in batches of pages on each core; less than this may be none at all.
_NOISE_BYTES = 64 * 1024
_REPEATS = 2
# Python takes memory from the system in arenas of this size, and a step may need one more.
_ARENA_BYTES, _SPARE_SHARE = 2**20, 32
# Where it is not measured, so much of what a step needs is taken for an allocator's rounding and holes.
_HOLES_SHARE = 32


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
    """What a step with so many samples at once needs beside its tensors, and what it saves.

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
        sizes: numbers of samples.
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
    """What operations allocate for themselves at any size, from two."""
    first, last = low.operations, high.operations
    return {
        kind: line(first.get(kind, last.get(kind, 0)), last.get(kind, first.get(kind, 0)), small, large)
        for kind in first.keys() | last.keys()
    }


def rest_between(low: Scratch, high: Scratch, small: int, large: int) -> Size:
    """What the process has beyond tensors and operations at any size, from two; noise does not grow with the batch."""
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
        _grown_by(run, plan, device) - predicted for _ in range(_REPEATS)
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
