"""What the dry run cannot know, measured on a few real steps: times, bandwidths, and memory that is in no tensor."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from retime.foundations.cpu_pool import within
from retime.foundations.parts import batch_statistics_layers
from retime.mechanisms.memory_budget.dry_run import Size, StepProfile, TrainingStep, everything
from retime.mechanisms.memory_budget.host import HostTier
from retime.mechanisms.memory_budget.planning.costs import StepCosts
from retime.mechanisms.memory_budget.planning.counted_times import counted_copies, counted_ms
from retime.mechanisms.memory_budget.planning.scratch import measured, operations_between, rest_between, spare_bytes
from retime.schedules.budget import Phase

# A copy of so many bytes is timed, or of a share of what the budget leaves: two tensors, and what is under way.
_PROBE_BYTES, _SMALLEST_PROBE_BYTES, _PROBE_SHARE = 16 * 2**20, 2**18, 8
_REPEATS = 2


def calibrate(
    step: TrainingStep,
    host: HostTier,
    *,
    sub_batches: tuple[int, int] | None = None,
    plain: StepProfile | None = None,
    budget_bytes: int = 2**62,
    timed: bool = True,
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
        timed: False asks no clock: times follow from bytes and operations, so that every run finds the same.

    Raises:
        ValueError: two equal sizes, or more samples than the batch has.
    """
    if sub_batches and not 0 < sub_batches[0] < sub_batches[1] <= step.samples:
        raise ValueError(f"{sub_batches=}: give two sizes within the batch of {step.samples}, smaller first")
    # A BatchNorm after pooling refuses one sample.
    least = min(step.samples, 2 if batch_statistics_layers(step.module) else 1)
    low, high, fits = (*sub_batches, True) if sub_batches else _sizes_within(step.samples, least, plain, budget_bytes)
    parameter = next(step.module.parameters())
    with within(step.given(), budget_bytes) as pool:
        room = budget_bytes - pool.bytes_elsewhere(step.given()) if pool.installed else 0
        runs, (first, last) = measured(step, (low, high), host, plain, pool, room)
        if not timed:
            return _counted(plain, parameter.device, operations_between(first, last, low, high), last.rest)
        times = [_best_ms(partial(run.untraced, None if fits else everything(run.step.samples))) for run in runs]
        resident = 0 if plain is None else plain.resident_bytes
        nbytes = min(_PROBE_BYTES, max(_SMALLEST_PROBE_BYTES, (budget_bytes - resident) // _PROBE_SHARE))
        bandwidth = _bandwidth(host, parameter.device, nbytes)
        if fits:
            copying_ms = _best_ms(partial(runs[1].untraced, everything(high))) - times[1]
            bandwidth = bandwidth.no_faster_than(copying_ms, last.saved_bytes)
    holes = rest_between(first, last, low, high)
    ms = Size.through(low, times[0], high, max(times))
    return StepCosts(
        fixed_ms=max(0.0, ms.fixed),
        sample_ms=ms.sample,
        out_bytes_per_ms=bandwidth.out,
        in_bytes_per_ms=bandwidth.back,
        hidden=bandwidth.hidden,
        operations=operations_between(first, last, low, high),
        scratch_bytes=holes.fixed,
        scratch_sample_bytes=holes.sample,
        few_samples=high - 1 if first.rest > last.rest else 0,
        few_bytes=first.rest,
        spare_bytes=spare_bytes(plain) if parameter.device.type == "cpu" else 0,
    )


def _counted(
    plain: StepProfile | None, device: torch.device, operations: dict[tuple[Phase, str, str], Size], rest: int
) -> StepCosts:
    """Costs that no clock has a part in."""
    fixed_ms, sample_ms = counted_ms(plain)
    copies = counted_copies(device)
    return StepCosts(
        fixed_ms=fixed_ms,
        sample_ms=sample_ms,
        out_bytes_per_ms=copies,
        in_bytes_per_ms=copies,
        operations=operations,
        scratch_bytes=rest,
        spare_bytes=spare_bytes(plain) if device.type == "cpu" else 0,
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
