"""Short `Trainer.fit`s on a rank, all from the same weights on the same batches: what the out-of-order recipes time."""

import copy
import gc
import os
import statistics
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import psutil
import torch
import torch.distributed as dist
from lightning.pytorch import Callback
from lightning.pytorch.strategies import Strategy
from torch import nn

from retime.mechanisms.out_of_order import OutOfOrderReport
from retime.recipes.core.trainer_loop import Batch, Run, Training, step_phases, train
from retime.recipes.ooo.variants import COMMUNICATION, COMPUTE, alone, variant
from retime.strategies import OOODataParallelStrategy

WARMUP_STEPS = 4
"""DDP rebuilds its buckets after the first step, after the second with a static graph; the order changes in the third,
and what it leaves to the next forward pass shows in the fourth."""
BUCKET_BYTES = 25 * 2**20
"""DistributedDataParallel's default bucket_cap_mb."""


class IdleClock(Callback):
    """Milliseconds a step in which this process's cores had nothing to do, kernel and other processes included.

    Only a process pinned to cores of its own learns something from it. The kernel counts in ticks of 10 ms, so it takes
    a few steps.

    Args:
        warm_up: steps that are not counted.
    """

    def __init__(self, warm_up: int) -> None:
        self._warm_up = warm_up
        self._steps = 0
        self._began = self._ended = 0.0

    def on_train_batch_end(self, *_: Any) -> None:
        self._steps += 1
        if self._steps == self._warm_up:
            self._began = _idle_ms()
        elif self._steps > self._warm_up:
            self._ended = _idle_ms()

    @property
    def idle_ms(self) -> float:
        """Of each counted step, all cores together.

        Raises:
            ValueError: no step was counted.
        """
        counted = self._steps - self._warm_up
        if counted < 1:
            raise ValueError(f"{self._steps} steps leave none to count after {self._warm_up} of warm-up: train longer")
        return max(0.0, self._ended - self._began) / counted


def _idle_ms() -> float:
    times = psutil.cpu_times(percpu=True)
    return float(1e3 * sum(times[core].idle + times[core].iowait for core in os.sched_getaffinity(0)))


@dataclass(frozen=True)
class Fit:
    """What one fit left: the training, and what an out-of-order strategy says about itself."""

    training: Training
    k: int | None
    report: OutOfOrderReport | None


class Fits:
    """Fits of any variant of one task. Every rank makes the same calls in the same order."""

    def __init__(
        self, model: nn.Module, batches: list[Batch], optimizer: dict[str, Any], layer_bucket_mb: float = 25.0
    ) -> None:
        self._model = model
        self._batches = batches
        self._optimizer = optimizer
        self._layer_bucket_mb = layer_bucket_mb
        self.tuned_k: int | None = None
        self.weights: dict[str, set[str]] = {}
        """Digests of the final weights that each timed variant ended with."""
        self.idle_ms: dict[str, list[float]] = {}
        """What each timed fit of a variant left idle of this rank's core, a step."""
        self.communication_processor_ms: float | None = None
        """Processor time of this process in the last `communication_ms`: it cannot be hidden behind computation."""

    def fit(self, name: str, steps: int | None = None, epochs: int = 1, callbacks: Iterable[Callback] = ()) -> Fit:
        """Train once; with `steps`, on so many batches, which begin again at their end."""
        made: list[Strategy] = []

        def strategy() -> Strategy:
            made.append(
                alone() if name == COMPUTE else variant(name).strategy(self._layer_bucket_mb, tuned_k=self.tuned_k)
            )
            return made[0]

        batches = self._batches
        if steps is not None:
            batches = [batches[number % len(batches)] for number in range(steps)]
        gc.collect()  # Trainers are reference cycles, whose tensors would pile up and be freed in the middle of a step
        dist.barrier()
        training = train(
            Run(strategy),
            copy.deepcopy(self._model),
            batches,
            self._optimizer,
            devices=1 if name == COMPUTE else dist.get_world_size(),
            epochs=epochs,
            callbacks=callbacks,
        )
        if not isinstance(made[0], OOODataParallelStrategy):
            return Fit(training, None, None)
        report = made[0].report()
        return Fit(training, report.k, report)

    def search(self, steps: int) -> Fit:
        """Let k="auto" find its k; `tuned` variants take it from then on."""
        found = self.fit("ooo_auto", steps)
        self.tuned_k = found.k
        return found

    def step_ms(self, name: str) -> float:
        """One timed block: the median step of one fit, or of repeated all-reduces."""
        if name == COMMUNICATION:
            return self.communication_ms()
        idle = IdleClock(WARMUP_STEPS + 1)
        done = self.fit(name, callbacks=[idle]).training
        self.idle_ms.setdefault(name, []).append(idle.idle_ms)
        if name != COMPUTE:
            self.weights.setdefault(name, set()).add(done.weights)
        return statistics.median(done.step_ms[WARMUP_STEPS:])

    def phases_ms(self, name: str) -> dict[str, float]:
        """Where the steps of one more fit spend their time, as `StepTimeline` sees it: medians over its steps."""
        return step_phases(lambda timeline: self.fit(name, callbacks=[timeline]), WARMUP_STEPS)

    def communication_ms(self, repeats: int = 3) -> float:
        """Milliseconds to all-reduce as many bytes as the gradients have, in DDP's buckets, with nothing beside it."""
        left, buckets = gradient_bytes(self._model), []
        while left > 0:
            buckets.append(torch.zeros(min(left, BUCKET_BYTES) // 4))
            left -= BUCKET_BYTES
        times, busy = [], []
        for _ in range(repeats):
            dist.barrier()
            started, working = time.perf_counter(), time.process_time()
            for work in [dist.all_reduce(bucket, async_op=True) for bucket in buckets]:
                work.wait()
            times.append((time.perf_counter() - started) * 1e3)
            busy.append((time.process_time() - working) * 1e3)
        self.communication_processor_ms = statistics.median(busy)
        return statistics.median(times)


def gradient_bytes(model: nn.Module) -> int:
    """Bytes of all gradients of one step; shared parameters count once."""
    return sum(p.numel() * p.element_size() for p in model.parameters() if p.requires_grad)
