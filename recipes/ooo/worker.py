"""What the ranks of the out-of-order recipes run: one of the functions below, which a request's `do` names.

What they time and compare are short `Trainer.fit`s (:class:`Fits`), all from the same weights on the same batches.
"""

import copy
import gc
import os
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import psutil
import torch
import torch.distributed as dist
from lightning.pytorch import Callback
from torch import nn

from retime.foundations.measure import LayerTimes, MemoryProbe, layer_times, update_ms
from retime.foundations.workers import by_name
from retime.mechanisms.out_of_order import OutOfOrderReport
from retime.recipes.core.build import CPU, build_batches, build_model, build_optimizer
from retime.recipes.core.measure import interleave
from retime.recipes.core.trainer_loop import Batch, Run, Training, step_phases, train
from retime.recipes.emulated.ranks import joined, measure_bandwidth, tell
from retime.recipes.emulated.sleeping import sleeping_copy
from retime.recipes.models import parameter_count
from retime.recipes.ooo.variants import COMMUNICATION, COMPUTE, alone, variant
from retime.schedules.network import rate_text
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
        """Idle milliseconds of each counted step, all cores together.

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
    """Record of one fit: the training, and what an out-of-order strategy says about itself."""

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
        batches = self._batches
        if steps is not None:
            batches = [batches[number % len(batches)] for number in range(steps)]
        gc.collect()  # Trainers are reference cycles, whose tensors would pile up and be freed in the middle of a step
        dist.barrier()
        strategy = alone() if name == COMPUTE else variant(name).strategy(self._layer_bucket_mb, tuned_k=self.tuned_k)
        devices = 1 if name == COMPUTE else dist.get_world_size()
        run, model = Run(lambda: strategy), copy.deepcopy(self._model)
        training = train(run, model, batches, self._optimizer, devices=devices, epochs=epochs, callbacks=callbacks)
        report = strategy.report() if isinstance(strategy, OOODataParallelStrategy) else None
        return Fit(training, None if report is None else report.k, report)

    def search(self, steps: int) -> Fit:
        """Let k="auto" find its k; `tuned` variants take it from then on."""
        fit = self.fit("ooo_auto", steps)
        self.tuned_k = fit.k
        return fit

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
        """Milliseconds of the phases in steps of one more fit, as `StepTimeline` sees them: medians over its steps."""
        return step_phases(lambda timeline: self.fit(name, callbacks=[timeline]), WARMUP_STEPS)

    def communication_ms(self, repeats: int = 3) -> float:
        """Milliseconds to all-reduce as many bytes as the gradients have, in DDP's buckets, with nothing beside it."""
        whole = gradient_bytes(self._model)
        buckets = [torch.zeros(min(BUCKET_BYTES, whole - sent) // 4) for sent in range(0, whole, BUCKET_BYTES)]
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


@joined
def serve(request: dict[str, Any]) -> dict[str, Any]:
    """Measure the links, then do what `do` names."""
    bandwidth = measure_bandwidth()
    if bandwidth.gloo_bits is not None and bandwidth.tcp_bits is not None:
        tell(
            f"links carry {rate_text(bandwidth.gloo_bits)}/s in an all-reduce, {rate_text(bandwidth.tcp_bits)}/s of TCP"
        )
    done: dict[str, Any] = by_name(calibrate, compare, losses, memory, layers)(request)
    return {**done, "bandwidth": asdict(bandwidth)}


def calibrate(request: dict[str, Any]) -> dict[str, Any]:
    """Milliseconds of the computation alone and of the communication alone, before a rate is chosen."""
    fits = _fits(request)
    blocks = {name: partial(fits.step_ms, name) for name in (COMPUTE, COMMUNICATION)}
    times = interleave(blocks, rounds=2, warmup_rounds=0)
    return {"step_ms": times, "gradient_bytes": gradient_bytes(_model(request))}


def compare(request: dict[str, Any]) -> dict[str, Any]:
    """Step times of the variants and both bounds, interleaved; the digests of the weights that each ended with."""
    fits = _fits(request)
    searched = None
    if any(variant(name).k == "tuned" for name in request["variants"]):
        searched = fits.search(request["search_steps"])
        tell(f"k=auto chose {searched.k}")
    bounds = [COMPUTE] + ([COMMUNICATION] if dist.get_world_size() > 1 else [])
    blocks = {name: partial(fits.step_ms, name) for name in [*request["variants"], *bounds]}
    times = interleave(blocks, request["rounds"], request["warmup_rounds"], tell)
    phases = {name: fits.phases_ms(name) for name in request.get("timelines", [])}
    model = _model(request)
    return {
        "phases_ms": phases,
        "idle_ms": {name: values[-request["rounds"] :] for name, values in fits.idle_ms.items()},
        "step_ms": {name: [round(value, 4) for value in values] for name, values in times.items()},
        "weights": {name: sorted(digests) for name, digests in fits.weights.items()},
        "communication_processor_ms": fits.communication_processor_ms,
        "k": fits.tuned_k,
        "search": _search(searched) if searched else None,
        "parameters": parameter_count(model),
        "gradient_bytes": gradient_bytes(model),
    }


def losses(request: dict[str, Any]) -> dict[str, Any]:
    """The loss of every step on this rank, and the final weights, by variant, over `epochs` of the data."""
    fits = _fits(request)
    variants = {}
    for name in request["variants"]:
        done = fits.fit(name, epochs=request["epochs"])
        variants[name] = {"losses": done.training.losses, "weights": done.training.weights, "k": done.k}
        tell(name)
    return {"variants": variants}


def memory(request: dict[str, Any]) -> dict[str, Any]:
    """This rank's peak resident bytes in one variant's fit, above the same process before it had a model.

    The first steps are apart: DDP builds its buckets anew in them, with the old ones still there, and optimizers make
    their states.
    """
    (name,) = request["variants"]
    small = nn.Linear(8, 8)
    batch: list[Batch] = [(torch.randn(4, 8), torch.zeros(4, dtype=torch.int64))]
    for warm_up in ("ddp", "ooo_k0"):
        # loads code, starts threads and opens connections that would count as the model's otherwise
        Fits(small, batch * 4, request["optimizer"]).fit(warm_up)
    peaks = _Peaks()
    size = gradient_bytes(_model(request))
    peaks.next()
    fits = _fits(request, lambda batches: _Announced(batches, peaks.next))
    fits.fit(name)
    before, first, later = peaks.end()
    return {"first_bytes": first - before, "later_bytes": later - before, "gradient_bytes": size}


class _Peaks:
    """The peaks of resident bytes from its making to `next`, from each `next` to the next one, and to the end."""

    def __init__(self) -> None:
        self._bytes: list[int] = []
        self._begin()

    def next(self) -> None:
        self.end()
        self._begin()

    def end(self) -> list[int]:
        self._probe.stop()
        self._bytes.append(self._probe.peaks()["batch"])
        return self._bytes

    def _begin(self) -> None:
        self._probe = MemoryProbe(CPU)
        self._probe.start()


class _Announced(list[Batch]):
    """Batches that call `settled` when the first steps are over."""

    def __init__(self, batches: list[Batch], settled: Callable[[], Any]) -> None:
        super().__init__(batches)
        self._settled = settled

    def __iter__(self) -> Iterator[Batch]:
        for number, batch in enumerate(super().__iter__()):
            if number == WARMUP_STEPS + 1:
                self._settled()
            yield batch


def layers(request: dict[str, Any]) -> dict[str, Any]:
    """Costs of each layer with all ranks at work on their cores, and of the whole update."""
    model = _model(request)
    (batch,) = build_batches(request["data"], request["batch_size"], 1)
    times = layer_times(model, batch[0])
    update = update_ms(copy.deepcopy(model), lambda parameters: build_optimizer(request["optimizer"], parameters, {}))
    return {"layers": [asdict(one) for one in times], "update_ms": update}


def _fits(request: dict[str, Any], wrap: Callable[[list[Batch]], list[Batch]] = list) -> Fits:
    """Fits of the request's model; every rank has a share of its own of the batches."""
    rank, hosts = dist.get_rank(), dist.get_world_size()
    steps = WARMUP_STEPS + 1 + request["steps"]
    if request.get("batches") is not None:
        steps = request["batches"]
    batches = build_batches(request["data"], request["batch_size"], steps * hosts)[rank::hosts]
    return Fits(_model(request), wrap(batches), request["optimizer"], request["layer_bucket_mb"])


def _model(request: dict[str, Any]) -> nn.Module:
    if request.get("sleeping"):
        return sleeping_copy([LayerTimes(**one) for one in request["sleeping"]])
    return build_model(request["model"], CPU, request["seed"])


def _search(fit: Fit) -> dict[str, Any]:
    """Search of k="auto": the k that it tried, each with its step time, and in how many steps."""
    assert fit.report is not None
    path = [[int(k), round(seconds * 1e3, 4)] for k, seconds in fit.report.searched.items()]
    return {"k": fit.k, "path": path, "steps": fit.report.search_steps, "report": fit.report.one_line}
