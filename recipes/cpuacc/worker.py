"""What the ranks of the accumulation recipes run: a function each, which a request's `do` names.

Layer by layer (Sekiyama et al. 2017, Algorithms 5 to 7) backward passes have a sum a layer beside them, as DDP starts
them: each tensor has a bucket of its own, so no layer waits for another one's.

A rank is on a core or, if the request says so, on a GPU, which ranks share where there are fewer.
"""

from __future__ import annotations

import copy
import gc
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy, Strategy
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from retime.foundations.measure import MemoryProbe, status_bytes
from retime.foundations.streams import has_streams
from retime.foundations.workers import by_name
from retime.mechanisms.cpu_accumulation import BucketReduction, HostReducer, TimedSum
from retime.recipes.core.build import CPU, build, build_batches, build_model, loss_of
from retime.recipes.core.measure import interleave
from retime.recipes.core.trainer_loop import Batch, Run, Training, step_phases, train
from retime.recipes.cpuacc.naive import RANK_ORDERED, sum_in_order
from retime.recipes.emulated.ranks import joined, tell
from retime.recipes.ooo.worker import gradient_bytes

BACKWARD, BRING, ADD, TAKE, WAIT, EXPOSED = "backward", "bring", "accumulate", "take back", "wait", "exposed"
QUANTITIES = (BACKWARD, BRING, ADD, TAKE, WAIT, EXPOSED)


def of_pass(began: float, sums: Iterable[TimedSum], sizes: Sequence[int]) -> dict[str, list[float]]:
    """Milliseconds of each layer, by quantity, from the sums of a backward pass and when that began.

    A layer's backward time is that from the layer behind it to its own last gradient. What is exposed of a sum ran when
    the last gradient was there, so that there was nothing left to hide behind. `sizes` are bytes of each layer, in the
    order of the backward pass; a layer's sums follow one another, whatever their number.

    Raises:
        ValueError: a bucket holds gradients of two layers, or sums went through gloo.
    """
    left = sorted(sums, key=lambda one: one.given)
    finished = left[-1].given
    layer_ms: dict[str, list[float]] = {name: [] for name in QUANTITIES}
    for size in sizes:
        own: list[TimedSum] = []
        while left and sum(one.bytes for one in own) < size:
            own.append(left.pop(0))
        if sum(one.bytes for one in own) != size:
            raise ValueError("a bucket holds gradients of two layers: there are no layers to time")
        times = [one.times for one in own if one.times is not None]
        if len(times) < len(own):
            raise ValueError("these ranks cannot share memory, so sums go through gloo, which does not tell its times")
        layer_ms[BACKWARD].append((own[-1].given - began) * 1e3)
        began = own[-1].given
        layer_ms[BRING].append(sum(one.bring for one in times))
        layer_ms[ADD].append(sum(one.add for one in times))
        layer_ms[TAKE].append(sum(one.take for one in times))
        layer_ms[WAIT].append(sum(one.wait for one in times))
        layer_ms[EXPOSED].append(sum(max(0.0, one.ended - max(one.began, finished)) for one in own) * 1e3)
    return layer_ms


ALONE = "one rank alone"
HOST, GLOO, NCCL, PIECES, COPY = "shared memory", "gloo", "nccl", ", 4 pieces at once", "plain copy"
STATE, GROWN, PEAK, STEP = "optimizer state", "grown by", "peak", "step"
WARMUP_STEPS = 4
"""DDP rebuilds its buckets after the first step; allocators and caches settle in the next ones."""


class CheckedOutputs(Callback):
    """Answers and how many are right, after each so many steps; the time that takes is not the fit's."""

    def __init__(self, every: int, batch: Batch) -> None:
        self._every = every
        self._images, self._classes = batch  # ``(B, C, H, W)`` and ``(B,)``
        self._began = self._checking = 0.0
        self.answers: list[Tensor] = []  # of each check, ``(B, classes)``
        self.right: list[float] = []  # share of the images, of each check
        self.seconds: list[float] = []  # of training before each check

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._began = _now(pl_module.device)

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        if trainer.global_step % self._every:
            return
        began = _now(pl_module.device)
        pl_module.eval()
        with torch.no_grad():
            answers = pl_module(self._images)
        pl_module.train()
        self.answers.append(answers)
        self.right.append(float((answers.argmax(1) == self._classes).double().mean()))
        self.seconds.append(began - self._began - self._checking)
        self._checking += _now(pl_module.device) - began


class HeldState(Callback):
    """The most bytes at the end of any step: of the optimizers' states, and of the process."""

    def __init__(self) -> None:
        self.state = self.resident = 0

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        # ZeroRedundancyOptimizer has its part in an optimizer of its own, `optim`
        optimizers: list[Any] = [getattr(optimizer, "optim", optimizer) for optimizer in trainer.optimizers]
        states = [state for optimizer in optimizers for state in optimizer.state.values()]
        nbytes = sum(value.nbytes for state in states for value in state.values() if isinstance(value, Tensor))
        self.state, self.resident = max(self.state, nbytes), max(self.resident, status_bytes("VmRSS"))


def sums(request: dict[str, Any]) -> dict[str, Any]:
    """Milliseconds of a sum on this rank, each way, and whether it comes out the same, in the order of the ranks.

    The plain copy is one in memory; of a GPU one to the host and back.
    """
    device, peer = _device(request), request["backend"]
    generator = torch.Generator().manual_seed(dist.get_rank())
    given = torch.randn(request["mib"] * 2**20 // 4, generator=generator).to(device)
    streamed = has_streams(device)
    values, into = given.clone(), torch.empty_like(given, device="cpu", pin_memory=streamed)
    reducer = HostReducer(device)
    ways: dict[str, Callable[[], Any]] = {
        HOST: lambda: reducer.start(0, values).wait(),
        peer: lambda: dist.all_reduce(values),
        peer + PIECES: lambda: [
            work.wait()
            for work in [dist.all_reduce(piece, async_op=True) for piece in values.chunk(4)]
            if work is not None
        ],
        COPY: lambda: values.copy_(into.copy_(values)) if streamed else into.copy_(values),
    }

    def block(do: Callable[[], Any]) -> float:
        times = []
        for _ in range(request["steps"]):
            values.copy_(given)
            dist.barrier()
            began = _now(device)
            do()
            times.append((_now(device) - began) * 1e3)
        return statistics.median(times)

    times = interleave({name: partial(block, do) for name, do in ways.items()}, request["rounds"], 1, tell)
    expected, same = sum_in_order(given), []
    for _ in range(request["repeats"]):
        values.copy_(given)
        ways[HOST]()
        same.append(torch.equal(values, expected))
    reducer.close()
    return {"ms": times, "same": all(same), "how": reducer.note}


def fits(request: dict[str, Any]) -> dict[str, Any]:
    """Median steps of fits under each strategy, and of one rank alone; digests of the final weights.

    Phases of steps are those of other fits, which take turns too.
    """
    model = build_model(request["model"], CPU, request["seed"])
    batches = _batches(request, WARMUP_STEPS + 1 + request["steps"])
    fit = partial(_fit, model, batches, request["optimizer"])
    weights: dict[str, str] = {}

    def block(label: str) -> float:
        done = fit(request["variants"].get(label))
        weights[label] = done.weights
        return statistics.median(done.step_ms[WARMUP_STEPS:])

    blocks = {label: partial(block, label) for label in [*request["variants"], ALONE]}
    times = interleave(blocks, request["rounds"], request["warmup_rounds"], tell)
    apart = {name: partial(step_phases, partial(fit, each), WARMUP_STEPS) for name, each in request["variants"].items()}
    phases = interleave(apart, request["rounds"], 0, tell) if dist.get_world_size() > 1 else {}
    return {"ms": times, "weights": weights, "gradient_bytes": gradient_bytes(model), "phases": phases}


def outputs(request: dict[str, Any]) -> dict[str, Any]:
    """By strategy and seed: what `CheckedOutputs` saw in a fit, and how far that is from others'.

    Those are the first strategy's, and torch's own sums in the order of the ranks. The order of strategies rotates from
    seed to seed. With the first seed each strategy trains twice.
    """
    torch.backends.cudnn.deterministic = True  # a second run is to differ by nothing that can be chosen
    (held_out,) = build_batches(request["held_out"], request["held_out_size"], 1, _device(request))
    labels = [*request["variants"]]
    answers: dict[str, list[dict[str, Any]]] = {label: [] for label in labels}
    for number in range(request["rounds"]):
        model = build_model(request["model"], CPU, request["seed"] + number)
        batches = _batches(request, request["steps"])

        def fit(strategy: dict[str, Any], model: nn.Module = model, batches: list[Batch] = batches) -> CheckedOutputs:
            checks = CheckedOutputs(request["check_every"], held_out)
            _fit(model, batches, request["optimizer"], strategy, checks)
            return checks

        in_order, turn, done = fit(RANK_ORDERED).answers, number % len(labels), dict[str, CheckedOutputs]()
        for label in labels[turn:] + labels[:turn]:
            done[label] = fit(request["variants"][label])
            tell(f"{label}, seed {request['seed'] + number}")
        for label in labels:
            checks, first = done[label], done[labels[0]].answers
            one = {"right": checks.right, "seconds": checks.seconds}
            one |= {"differences": _apart(checks.answers, first), "from_order": _apart(checks.answers, in_order)}
            if not number:
                one["from_repeat"] = _apart(checks.answers, fit(request["variants"][label]).answers)
            answers[label].append(one)
    return answers


def _apart(ours: list[Tensor], theirs: list[Tensor]) -> list[float]:
    """The most that an output differs, by check."""
    return [float((one - other).abs().max()) for one, other in zip(ours, theirs, strict=True)]


def layers(request: dict[str, Any]) -> dict[str, Any]:
    """Milliseconds of each layer's backward pass and of the parts of its sum beside it; of a backward pass alone.

    Layers are in the order of the backward pass, of a model that uses its modules in order: names, and parameters.
    """
    ((inputs, targets),) = _batches(request, 1)
    model = build_model(request["model"], CPU, request["seed"])
    own = [(name, list(module.parameters(recurse=False))) for name, module in model.named_modules()]
    own = [(name, parameters) for name, parameters in reversed(own) if parameters]
    sizes = [sum(one.nbytes for one in parameters) for _, parameters in own]
    network = DistributedDataParallel(model, bucket_cap_mb=1e-6, gradient_as_bucket_view=True)  # a byte, a tensor
    made: list[TimedSum] = []
    reducer = HostReducer(watch=made.append)
    reduction = BucketReduction(network, reducer)

    def backward(*, sums: bool = True) -> float:
        network.zero_grad(set_to_none=False)
        with nullcontext() if sums else network.no_sync():
            loss = loss_of(network(inputs), targets)
            dist.barrier()
            began = time.perf_counter()
            loss.backward()  # type: ignore[no-untyped-call]
        return began

    def alone() -> float:
        began = backward(sums=False)
        return (time.perf_counter() - began) * 1e3

    def beside() -> dict[str, list[float]]:
        made.clear()
        return of_pass(backward(), made, sizes)

    backward()  # whose buckets hold several layers
    ways: dict[str, Callable[[], Any]] = {"alone": alone, "beside": beside}
    times = interleave(ways, request["rounds"], request["warmup_rounds"], tell)
    reduction.close()
    named = [(name, sum(one.numel() for one in parameters)) for name, parameters in own]
    by_quantity = {quantity: [by_layer[quantity] for by_layer in times["beside"]] for quantity in QUANTITIES}
    return {"layers": named, "ms": by_quantity, "alone": times["alone"], "how": reducer.note}


def held(request: dict[str, Any]) -> dict[str, Any]:
    """Bytes of state and of memory of this rank in a fit, and a median step; for a process that has run nothing.

    Memory is what the process has resident, and its peak, of a GPU, what is allocated there.
    """
    batches = _batches(request, WARMUP_STEPS + 1 + request["steps"])
    device, before = batches[0][0].device, status_bytes("VmRSS")
    allocated = torch.cuda.memory_allocated(device) if device.type == "cuda" else before
    model = build_model(request["model"], CPU, request["seed"])
    probe, most = MemoryProbe(device), HeldState()
    probe.start()
    done = _fit(model, batches, request["optimizer"], request["strategy"], most)
    probe.stop()
    answer = {STATE: most.state, GROWN: most.resident - before, STEP: statistics.median(done.step_ms[WARMUP_STEPS:])}
    answer[PEAK] = probe.peaks()["batch"] - allocated
    return {**answer, "weights": done.weights, "parameters": gradient_bytes(model)}


def _batches(request: dict[str, Any], count: int) -> list[Batch]:
    """So many batches, this rank's."""
    own = slice(dist.get_rank(), None, dist.get_world_size())
    return build_batches(request["data"], request["batch_size"], count * dist.get_world_size(), _device(request), own)


def _device(request: dict[str, Any]) -> torch.device:
    """This rank's."""
    if request["hardware"]["device"] == CPU.type:
        return CPU
    device = torch.device("cuda", dist.get_rank() % max(1, torch.cuda.device_count()))
    torch.cuda.set_device(device)
    return device


def _now(device: torch.device) -> float:
    """Seconds, when the device has done what it was given."""
    if has_streams(device):
        torch.cuda.synchronize()
    return time.perf_counter()


def _fit(
    model: nn.Module,
    batches: list[Batch],
    optimizer: dict[str, Any],
    strategy: dict[str, Any] | None,
    *callbacks: Callback,
) -> Training:
    gc.collect()  # Trainers are reference cycles, whose tensors would be freed in the middle of a step
    dist.barrier()
    device = batches[0][0].device

    def placed() -> Strategy:
        if strategy is None:
            return SingleDeviceStrategy(device)
        ddp: DDPStrategy = build(strategy)
        ddp.parallel_devices = [device] * dist.get_world_size()  # by rank, each of which reads its own
        return ddp

    return train(Run(placed), copy.deepcopy(model), batches, optimizer, device=device.type, callbacks=callbacks)


@joined
def serve(request: dict[str, Any]) -> Any:
    """For `run_ranks`."""
    return by_name(sums, fits, outputs, layers, held)(request)
