"""What the dry run cannot know, measured on a few real steps: times, bandwidths, and memory that is in no tensor."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from pathlib import Path

import torch

from retime.mechanisms.memory.costs import StepCosts
from retime.mechanisms.memory.heap import trim_heap
from retime.mechanisms.memory.host import HostTier
from retime.mechanisms.memory.profile import Size
from retime.mechanisms.memory.replay import EVERYTHING, DryRun, TrainingStep
from retime.mechanisms.memory.trace import Operation
from retime.mechanisms.memory_probe import MemoryProbe
from retime.schedules.memory import OffloadPlan, Phase

# A process's resident size is counted in batches of pages on each core; less than this may be none at all.
_NOISE_BYTES = 64 * 1024
_PROBE_BYTES = 16 * 2**20
_REPEATS = 3
_CLEAR_REFS = Path("/proc/self/clear_refs")
_STATUS = Path("/proc/self/status")


class ScratchMeter:
    """The most that each kind of operation allocates beyond the storages it returns.

    Attributes:
        bytes: by phase, layer and name.
    """

    def __init__(self, device: torch.device) -> None:
        self.bytes: dict[tuple[Phase, str, str], int] = {}
        self._cuda = device if device.type == "cuda" else None
        self._before = 0

    def before(self) -> None:
        if self._cuda is not None:
            torch.cuda.reset_peak_memory_stats(self._cuda)
            self._before = torch.cuda.memory_allocated(self._cuda)
        else:
            _CLEAR_REFS.write_text("5")
            self._before = _status("VmRSS")

    def after(self, operation: Operation, new_bytes: int) -> None:
        peak = torch.cuda.max_memory_allocated(self._cuda) if self._cuda is not None else _status("VmHWM")
        extra = peak - self._before - new_bytes
        if extra < _NOISE_BYTES:
            return
        self.bytes[operation.kind] = max(self.bytes.get(operation.kind, 0), extra)


def calibrate(step: TrainingStep, host: HostTier, *, sub_batches: tuple[int, int] | None = None) -> StepCosts:
    """Run the step on copies of the model with two sub-batch sizes, and time copies to the host.

    Args:
        step: what to run. Its state, and the random generators, stay as they are.
        host: the tier that is timed.
        sub_batches: numbers of samples, the smaller one first; by default an eighth and a quarter of the batch. All
            that can be is offloaded meanwhile, so that little of the device is needed beside a copy of the parameters.

    Raises:
        ValueError: two equal sizes, or more samples than the batch has.
    """
    low, high = sub_batches or (max(1, step.samples // 8), max(2, step.samples // 4))
    if not 0 < low < high <= step.samples:
        raise ValueError(f"sub_batches={low, high}: give two sizes within the batch of {step.samples}, smaller first")
    parameter = next(step.module.parameters())
    scratch, rest = zip(*(_scratch(step.of_size(size), host, parameter.device) for size in (low, high)), strict=True)
    holes = _line(rest[0], rest[1], low, high)
    times = [_median_ms(_stepper(step.of_size(size))) for size in (low, high)]
    sample_ms = max(0.0, (times[1] - times[0]) / (high - low))
    out, back, hidden = _bandwidth(host, parameter.device)
    return StepCosts(
        fixed_ms=max(0.0, times[0] - low * sample_ms),
        sample_ms=sample_ms,
        out_bytes_per_ms=out,
        in_bytes_per_ms=back,
        hidden=hidden,
        operations=_sizes(scratch[0], scratch[1], low, high),
        scratch_bytes=holes.fixed,
        scratch_sample_bytes=holes.sample,
    )


def _scratch(step: TrainingStep, host: HostTier, device: torch.device) -> tuple[dict[tuple[Phase, str, str], int], int]:
    """What operations allocate for themselves, and what a step needs beyond that and its tensors."""
    run = DryRun(step, real=True, host=host)
    plan = OffloadPlan(step.samples, EVERYTHING, 0, len(EVERYTHING))
    run.run(plan, compare=False)  # libraries keep what they allocate when they are first used
    meter = ScratchMeter(device)
    profile = run.run(plan, compare=False, update=False, meter=meter)
    sizes = {kind: Size(nbytes) for kind, nbytes in meter.bytes.items()}
    before = sum(storage.nbytes for storage in profile.trace.storages if storage.born < 0)
    predicted = profile.peak_with(sizes) - before
    del profile
    gc.collect()
    trim_heap()
    probe = MemoryProbe(device)
    base = torch.cuda.memory_allocated(device) if device.type == "cuda" else _status("VmRSS")
    run.untraced(plan, probe)
    return meter.bytes, max(0, probe.peaks()["batch"] - base - predicted)


def _sizes(
    low: dict[tuple[Phase, str, str], int], high: dict[tuple[Phase, str, str], int], small: int, large: int
) -> dict[tuple[Phase, str, str], Size]:
    return {
        kind: _line(low.get(kind, high.get(kind, 0)), high.get(kind, low.get(kind, 0)), small, large)
        for kind in low.keys() | high.keys()
    }


def _line(first: int, last: int, small: int, large: int) -> Size:
    """Through two measurements; what does not grow counts with the larger one."""
    slope = max(0.0, (last - first) / (large - small))
    return Size(max(float(first), float(last)) - slope * large, slope)


def _stepper(step: TrainingStep) -> Callable[[], None]:
    run = DryRun(step, real=True)
    return run.untraced


def _median_ms(work: Callable[[], None]) -> float:
    work()
    times = []
    for _ in range(_REPEATS):
        begin = time.perf_counter()
        work()
        times.append((time.perf_counter() - begin) * 1e3)
    return sorted(times)[_REPEATS // 2]


def _bandwidth(host: HostTier, device: torch.device) -> tuple[float, float, float]:
    """Bytes a millisecond out and back, and the share of a copy's time in which computation goes on."""
    source = torch.ones(_PROBE_BYTES, dtype=torch.uint8, device=device).untyped_storage()
    target = torch.empty(_PROBE_BYTES, dtype=torch.uint8, device=device).untyped_storage()

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

    out_ms, back_ms = _median_ms(out), _median_ms(back)
    square = torch.rand(256, 256, device=device)

    def compute() -> None:
        for _ in range(20):
            torch.mm(square, square)
        finish()

    alone_ms = _median_ms(compute)

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
    return _PROBE_BYTES / max(out_ms, 1e-6), _PROBE_BYTES / max(back_ms, 1e-6), hidden


def _status(field: str) -> int:
    for line in _STATUS.read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise LookupError(f"{_STATUS} has no {field}")
