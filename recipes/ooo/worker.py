"""What the ranks of the out-of-order recipes run: one of these functions, which a request's `do` names."""

import copy
from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from retime.foundations.measure import LayerTimes, MemoryProbe, layer_times, update_ms
from retime.foundations.workers import Answer, by_name
from retime.recipes.core.build import CPU, build_batches, build_model, build_optimizer
from retime.recipes.core.measure import interleave
from retime.recipes.core.trainer_loop import Batch
from retime.recipes.emulated.bandwidth import measure_bandwidth
from retime.recipes.emulated.rank import joined, tell
from retime.recipes.emulated.sleeping import sleeping_copy
from retime.recipes.models import parameter_count
from retime.recipes.ooo.fits import WARMUP_STEPS, Fit, Fits, gradient_bytes
from retime.recipes.ooo.variants import COMMUNICATION, COMPUTE, variant
from retime.schedules.network import rate_text


def answer(request: dict[str, Any]) -> dict[str, Any]:
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
    found = {}
    for name in request["variants"]:
        done = fits.fit(name, epochs=request["epochs"])
        found[name] = {"losses": done.training.losses, "weights": done.training.weights, "k": done.k}
        tell(name)
    return {"variants": found}


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
    peaks = [_Peak()]
    size = gradient_bytes(_model(request))
    peaks.append(_Peak())
    fits = _fits(request, lambda batches: _Announced(batches, lambda: peaks.append(_Peak())))
    fits.tuned_k = request["k"]
    k = fits.fit(name).k
    before, first, later = (peak.bytes() for peak in peaks)
    return {"first_bytes": first - before, "later_bytes": later - before, "k": k, "gradient_bytes": size}


class _Peak:
    """The peak of resident bytes from its making to the next one's."""

    _running: "_Peak | None" = None

    def __init__(self) -> None:
        if _Peak._running is not None:
            _Peak._running.bytes()
        self._probe = MemoryProbe(CPU)
        self._found: int | None = None
        self._probe.start()
        _Peak._running = self

    def bytes(self) -> int:
        if self._found is None:
            self._probe.stop()
            self._found = int(self._probe.peaks()["batch"])
        return self._found


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
    """What each layer costs with all ranks at work on their cores, and the whole update."""
    model = _model(request)
    (batch,) = build_batches(request["data"], request["batch_size"], 1)
    found = layer_times(model, batch[0])
    update = update_ms(copy.deepcopy(model), lambda parameters: build_optimizer(request["optimizer"], parameters, {}))
    return {"layers": [asdict(one) for one in found], "update_ms": update}


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
    """How k="auto" went: the k that it tried, each with its step time, and in how many steps."""
    assert fit.report is not None
    path = [[int(k), round(seconds * 1e3, 4)] for k, seconds in fit.report.searched.items()]
    return {
        "k": fit.k,
        "path": path,
        "steps": fit.report.search_steps,
        "report": fit.report.one_line,
    }


def serve() -> Answer:
    """For `run_ranks`."""
    return joined(answer)
