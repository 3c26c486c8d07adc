"""What the ranks of the out-of-order recipes run: one of the functions below, which a request's `do` names.

What they time and compare are short `Trainer.fit`s (:class:`Fits`), all from the same weights on the same batches.
"""

import copy
import gc
import os
import statistics
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

import psutil
import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import LambdaCallback
from lightning.pytorch.strategies import SingleDeviceStrategy
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
from retime.recipes.ooo.variants import COMMUNICATION, COMPUTE, variant
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
    a few steps. Those of warm-up are not counted.
    """

    def __init__(self) -> None:
        self._ends: list[float] = []

    def on_train_batch_end(self, *_: Any) -> None:
        times = psutil.cpu_times(percpu=True)
        self._ends.append(1e3 * sum(times[core].idle + times[core].iowait for core in os.sched_getaffinity(0)))

    @property
    def idle_ms(self) -> float:
        """Idle milliseconds of each counted step, all cores together.

        Raises:
            ValueError: no step was counted.
        """
        warm_up, steps = WARMUP_STEPS + 1, len(self._ends)
        if steps <= warm_up:
            raise ValueError(f"{steps} steps leave none to count after {warm_up} of warm-up: train longer")
        return max(0.0, self._ends[-1] - self._ends[warm_up - 1]) / (steps - warm_up)


@dataclass
class Fits:
    """Fits of any variant of one task. Every rank makes the same calls in the same order."""

    model: nn.Module
    batches: list[Batch]
    optimizer: dict[str, Any]
    layer_bucket_mb: float = 25.0
    tuned_k: int | None = None
    """What `tuned` variants take: the k of a search."""
    weights: dict[str, set[str]] = field(default_factory=dict)
    """Digests of the final weights that each timed variant ended with."""
    idle_ms: dict[str, list[float]] = field(default_factory=dict)
    """What each timed fit of a variant left idle of this rank's core, a step."""
    communication_processor_ms: float | None = None
    """Processor time of this process in the last `communication_ms`: it cannot be hidden behind computation."""

    def fit(
        self, name: str, steps: int | None = None, epochs: int = 1, callbacks: Iterable[Callback] = ()
    ) -> tuple[Training, OutOfOrderReport | None]:
        """Train once; with `steps`, on so many batches, which begin again at their end. An out-of-order one reports."""
        batches = self.batches
        if steps is not None:
            batches = [batches[number % len(batches)] for number in range(steps)]
        gc.collect()  # Trainers are reference cycles, whose tensors would pile up and be freed in the middle of a step
        dist.barrier()
        alone = name == COMPUTE  # a rank that trains by itself: the bound that computation sets
        strategy = SingleDeviceStrategy("cpu") if alone else variant(name).strategy(self.layer_bucket_mb, self.tuned_k)
        devices = 1 if alone else dist.get_world_size()
        run, model = Run(lambda: strategy), copy.deepcopy(self.model)
        training = train(run, model, batches, self.optimizer, devices=devices, epochs=epochs, callbacks=callbacks)
        return training, strategy.report() if isinstance(strategy, OOODataParallelStrategy) else None

    def step_ms(self, name: str) -> float:
        """One timed block: the median step of one fit, or of repeated all-reduces."""
        if name == COMMUNICATION:
            return self.communication_ms()
        idle = IdleClock()
        training, _ = self.fit(name, callbacks=[idle])
        self.idle_ms.setdefault(name, []).append(idle.idle_ms)
        if name != COMPUTE:
            self.weights.setdefault(name, set()).add(training.weights)
        return statistics.median(training.step_ms[WARMUP_STEPS:])

    def phases_ms(self, name: str) -> dict[str, float]:
        """Milliseconds of the phases in steps of one more fit, as `StepTimeline` sees them: medians over its steps."""
        return step_phases(lambda timeline: self.fit(name, callbacks=[timeline]), WARMUP_STEPS)

    def communication_ms(self, repeats: int = 3) -> float:
        """Milliseconds to all-reduce as many bytes as the gradients have, in DDP's buckets, with nothing beside it."""
        whole = gradient_bytes(self.model)
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
    gloo_bits, tcp_bits = bandwidth.values()
    if gloo_bits is not None and tcp_bits is not None:
        tell(f"links carry {rate_text(gloo_bits)}/s in an all-reduce, {rate_text(tcp_bits)}/s of TCP")
    done: dict[str, Any] = by_name(compare, losses, memory, layers)(request)
    return {**done, "bandwidth": bandwidth}


def compare(request: dict[str, Any]) -> dict[str, Any]:
    """Step times of the variants and both bounds, interleaved; the digests of the weights that each ended with."""
    fits = _fits(request)
    search: dict[str, Any] | None = None
    if any(variant(name).k == "tuned" for name in request["variants"]):
        _, report = fits.fit("ooo_auto", request["search_steps"])
        assert report is not None
        fits.tuned_k = report.k
        tell(f"k=auto chose {report.k}")
        path = [[int(k), round(seconds * 1e3, 4)] for k, seconds in report.searched.items()]
        search = {"k": report.k, "path": path, "steps": report.search_steps, "report": report.one_line}
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
        "search": search,
        "parameters": parameter_count(model),
        "gradient_bytes": gradient_bytes(model),
    }


def losses(request: dict[str, Any]) -> dict[str, Any]:
    """The loss of every step on this rank, and the final weights, by variant, over `epochs` of the data."""
    fits = _fits(request)
    variants = {}
    for name in request["variants"]:
        training, report = fits.fit(name, epochs=request["epochs"])
        k = None if report is None else report.k
        variants[name] = {"losses": training.losses, "weights": training.weights, "k": k}
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
    before, first, later = "forward", "backward", "update"  # a probe has no other names for phases
    probe = MemoryProbe(CPU)

    def settled(trainer: Trainer, module: LightningModule, batch: Batch, number: int) -> None:
        if number == WARMUP_STEPS + 1:
            probe.switch(later)

    probe.start()
    probe.switch(before)
    size = gradient_bytes(_model(request))
    probe.switch(first)
    _fits(request).fit(name, callbacks=[LambdaCallback(on_train_batch_start=settled)])
    probe.stop()
    peaks = probe.peaks()
    first_bytes, later_bytes = (peaks[phase] - peaks[before] for phase in (first, later))
    return {"first_bytes": first_bytes, "later_bytes": later_bytes, "gradient_bytes": size}


def layers(request: dict[str, Any]) -> dict[str, Any]:
    """Costs of each layer with all ranks at work on their cores, and of the whole update."""
    model = _model(request)
    (batch,) = build_batches(request["data"], request["batch_size"], 1)
    times = layer_times(model, batch[0])
    update = update_ms(copy.deepcopy(model), lambda parameters: build_optimizer(request["optimizer"], parameters, {}))
    return {"layers": [asdict(one) for one in times], "update_ms": update}


def _fits(request: dict[str, Any]) -> Fits:
    """Fits of the request's model; every rank has a share of its own of the batches."""
    rank, hosts = dist.get_rank(), dist.get_world_size()
    steps = request.get("batches", WARMUP_STEPS + 1 + request["steps"])
    batches = build_batches(request["data"], request["batch_size"], steps * hosts)[rank::hosts]
    return Fits(_model(request), batches, request["optimizer"], request["layer_bucket_mb"])


def _model(request: dict[str, Any]) -> nn.Module:
    if request.get("sleeping"):
        return sleeping_copy([LayerTimes(**one) for one in request["sleeping"]])
    return build_model(request["model"], CPU, request["seed"])
