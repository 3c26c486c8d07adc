"""What a rank of the pipeline recipes runs: steps by schedule in turn, of layers that sleep or of a network's own.

The peer, :class:`TorchPipeline`, is what one writes to train a transformer with torch.distributed.pipelining alone.
"""

from __future__ import annotations

import copy
import math
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from retime.foundations.cpu_pool import MemoryPool
from retime.foundations.workers import by_name
from retime.mechanisms.pipeline import PipelineReport, PipelineStep
from retime.recipes.core.build import CPU, build_batches, build_model, loss_of
from retime.recipes.core.measure import interleave
from retime.recipes.emulated import SleepingLayer
from retime.recipes.emulated.ranks import joined, tell

ONE = "one device"
_ELEMENTS = 2**15
"""Of a layer's weight: gradients of up to 64 KiB do not wait."""
_SAMPLES = 2
"""Of a micro-batch."""
_PINGS = 20
_Train = Callable[[Any], float]
"""A step's forward and backward passes on a batch; the loss on the rank that has it, 0 on others."""


class SleepingModel(nn.Module):
    """Layers that take `unit_ms` for each of F, O and W, and keep their output, so that what is alive can be counted.

    The first one has an output gradient to compute, too.
    """

    def __init__(self, layers: int, unit_ms: float) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            *(nn.Sequential(SleepingLayer(unit_ms, unit_ms, unit_ms, _ELEMENTS), nn.Tanh()) for _ in range(layers))
        )

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.layers(inputs.detach().requires_grad_())
        return outputs


def sleeping(request: dict[str, Any]) -> dict[str, Any]:
    """By schedule: milliseconds of a step a round, and of the last step's tasks by kind; what a simulation needs."""
    generator = torch.Generator().manual_seed(request["seed"])
    samples, width = _SAMPLES * request["micro_batches"], request["message_kib"] * 1024 // (4 * _SAMPLES)
    batch = torch.randn(samples, width, generator=generator)
    hop_ms, beside_ms = _hop_ms(_SAMPLES * width), _beside_ms(request["unit_ms"], batch)
    pipelines: dict[str, PipelineStep] = {}
    blocks = {}
    for variant in request["schedules"]:
        schedule, alive = schedule_of(variant)
        model = SleepingModel(request["layers"], request["unit_ms"])
        pipelines[variant] = PipelineStep(
            model,
            microbatches=request["micro_batches"],
            schedule=schedule,
            layers_per_stage=request["layers_per_stage"],
            activation_cap=None if alive is None else alive * _SAMPLES * width * 4,
            split="fastest",
        )
        train = partial(_pipelined, pipelines[variant], partial(_mean, model))
        train(batch)  # it runs whole
        blocks[variant] = partial(_block, train, model, batch, request["steps"])
    times = interleave(blocks, request["rounds"], request["warmup_rounds"], tell)
    tasks, stages, layers = {}, {}, {}
    for variant, pipeline in pipelines.items():
        report = pipeline.report()
        tasks[variant], alive_stages = _last_step(report)
        stages[variant] = report.stages
        layers[variant] = alive_stages * request["layers"] / report.stages
        pipeline.remove()
    return {"ms": times, "hop_ms": hop_ms, "beside_ms": beside_ms, "tasks": tasks, "stages": stages, "alive": layers}


def computing(request: dict[str, Any]) -> dict[str, Any]:
    """By variant: milliseconds of a step a round, the loss and the norm of all gradients; of ours, also bubbles."""
    model = build_model(request["model"], CPU, request["seed"])
    (batch,) = build_batches(request["data"], request["batch_size"], 1)
    blocks, pipelines, losses_and_norms = {}, {}, {}
    for name in request["variants"]:
        copied = copy.deepcopy(model)
        train: _Train
        if name == ONE:
            train = partial(_whole, copied, request["micro_batches"])
        elif name.startswith("torch "):
            train = TorchPipeline(copied, name.removeprefix("torch "), request["micro_batches"], loss_of).train
        else:
            pipelines[name] = PipelineStep(
                copied, microbatches=request["micro_batches"], schedule=name, split="fastest"
            )
            train = partial(_pipelined, pipelines[name], partial(_loss, copied))
        loss = train(batch)  # also: the first batch runs whole in ours, and torch's stages look at shapes
        squares = (float(p.grad.double().square().sum()) for p in copied.parameters() if p.grad is not None)
        losses_and_norms[name] = _summed(loss), math.sqrt(_summed(sum(squares)))
        blocks[name] = partial(_block, train, copied, batch, request["steps"])
    times = interleave(blocks, request["rounds"], request["warmup_rounds"], tell)
    reports = {name: pipeline.report() for name, pipeline in pipelines.items()}
    for pipeline in pipelines.values():
        pipeline.remove()
    return {
        "ms": times,
        "loss and norm": losses_and_norms,
        "bubble": {name: report.bubble_share for name, report in reports.items()},
        "simulated bubble": {name: report.simulated_bubble_share for name, report in reports.items()},
        "stages": {name: report.stages for name, report in reports.items()},
    }


def remembering(request: dict[str, Any]) -> dict[str, Any]:
    """The most bytes of this rank's tensors in a step, with its parameters and Adam's state; by round.

    Raises:
        RuntimeError: tensors cannot be counted here.
    """
    counter = MemoryPool()
    if not counter.install():
        raise RuntimeError(f"a pool counts the bytes of tensors, and {counter.why_not}")
    model = build_model(request["model"], CPU, request["seed"])
    (batch,) = build_batches(request["data"], request["batch_size"], 1)
    how = {key: request[key] for key in ("schedule", "layers_per_stage")}
    pipeline = PipelineStep(model, microbatches=request["micro_batches"], split="even", **how)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    peaks = []
    before = request["warmup_rounds"]  # until a rank has its own layers alone, and its optimizer's state
    for _ in range(before + request["rounds"]):
        dist.barrier()
        counter.reset_peaks()
        _pipelined(pipeline, partial(_loss, model), batch)
        optimizer.step()
        optimizer.zero_grad()
        peaks.append(counter.counts().peak_live)
        tell(request["schedule"])
    stages = pipeline.report().stages
    pipeline.remove()
    return {"peak_bytes": peaks[before:], "stages": stages}


def schedule_of(variant: str) -> tuple[str, int | None]:
    """The schedule, and how many layers' activations may be alive on a rank; ``"ooo@32"`` names both.

    Raises:
        ValueError: no whole number behind the sign.
    """
    schedule, sign, alive = variant.partition("@")
    if sign and not alive.isdigit():
        raise ValueError(f"schedules: {variant!r} has no number of layers behind '@': write it as in 'ooo@32'")
    return schedule, int(alive) if sign else None


def _block(train: _Train, model: nn.Module, batch: Any, count: int) -> float:
    """The median step."""
    took = []
    for _ in range(count):
        model.zero_grad()
        dist.barrier()
        start = time.perf_counter()
        train(batch)
        dist.barrier()
        took.append(1000 * (time.perf_counter() - start))
    return statistics.median(took)


def _mean(model: nn.Module, part: Tensor) -> Tensor:
    """A loss that keeps nothing for its backward pass: what is alive are the layers'."""
    loss: Tensor = model(part).mean()
    return loss


def _loss(model: nn.Module, part: tuple[Tensor, Tensor]) -> Tensor:
    return loss_of(model(part[0]), part[1])


def _pipelined(pipeline: PipelineStep, loss: Callable[[Any], Tensor], batch: Any) -> float:
    results = pipeline.train(loss, batch)
    return sum(result.weight * float(result.output) for result in results)


def _whole(model: nn.Module, micro_batches: int, batch: tuple[Tensor, Tensor]) -> float:
    """The same micro-batches one after another on rank 0; the others wait."""
    total = 0.0
    if dist.get_rank() == 0:
        for part in zip(*(tensor.chunk(micro_batches) for tensor in batch), strict=True):
            loss = _loss(model, part) * (len(part[0]) / len(batch[0]))
            loss.backward()  # type: ignore[no-untyped-call]
            total += float(loss.detach())
    return total


def _last_step(report: PipelineReport) -> tuple[dict[str, float], int]:
    """Medians of this rank's tasks by kind (B is O and W in one), and the most stages whose activations it kept."""
    by_kind: dict[str, list[float]] = {}
    alive = most = 0
    for span in sorted(report.spans, key=lambda span: span.start_s):
        by_kind.setdefault(span.kind, []).append(1000 * (span.end_s - span.start_s))
        alive += {"F": 1, "W": -1, "B": -1}.get(span.kind, 0)
        most = max(most, alive)
    return {kind: statistics.median(values) for kind, values in by_kind.items()}, most


def _beside_ms(unit_ms: float, batch: Tensor) -> float:
    """Time that a task takes beside its layer, for the simulation: of a pipeline with one layer a rank, by ZB-H1."""
    model = SleepingModel(dist.get_world_size(), unit_ms)
    pipeline = PipelineStep(model, microbatches=len(batch) // _SAMPLES, schedule="zb_h1", split="fastest")
    for _ in range(2):
        model.zero_grad()
        pipeline.train(partial(_mean, model), batch)
    took = [1000 * (span.end_s - span.start_s) for span in pipeline.report().spans if span.kind != "B"]
    pipeline.remove()
    return statistics.median(took) - unit_ms


def _hop_ms(elements: int) -> float:
    """The median one-way message between ranks 0 and 1, as these see it; 0 on others."""
    rank, message, took = dist.get_rank(), torch.zeros(elements), []
    if rank > 1:
        return 0.0
    for _ in range(_PINGS):
        start = time.perf_counter()
        for sender in (0, 1):
            if rank == sender:
                dist.send(message, 1 - rank)
            else:
                dist.recv(message, 1 - rank)
        took.append(500 * (time.perf_counter() - start))
    return statistics.median(took[1:])


def _summed(value: float) -> float:
    """Over ranks."""
    total = torch.tensor(value, dtype=torch.double)
    dist.all_reduce(total)
    return float(total)


@joined
def serve(request: dict[str, Any]) -> Any:
    """For `run_ranks`."""
    return by_name(sleeping, computing, remembering)(request)


Loss = Callable[[Tensor, Tensor], Tensor]
_IN_A_V = ("ZBVZeroBubble", "DualPipeV")
_ONE_STAGE = ("GPipe", "1F1B")


class TorchPipeline:
    """A transformer cut by hand into stages of equally many blocks, on one of torch's schedules.

    Args:
        model: of `retime.recipes.models.hub`: GPT-2 with a language model's head, or BERT with one for masked tokens.
        schedule: torch's name, and how many stages a rank has: ``"Interleaved1F1B 2"``.
        micro_batches: of each batch.
        loss: of the last stage's output and targets, the mean over samples.

    Raises:
        ValueError: no schedule of torch's, or a model that nobody has cut.
    """

    def __init__(self, model: nn.Module, schedule: str, micro_batches: int, loss: Loss) -> None:
        from torch.distributed.pipelining import PipelineStage, schedules

        name, _, chunks = schedule.partition(" ")
        kind: Any = getattr(schedules, f"Schedule{name}", None)
        if kind is None:
            raise ValueError(f"peers: torch has no schedule {name!r}: name one as in 'Interleaved1F1B 2'")
        ranks, rank = dist.get_world_size(), dist.get_rank()
        self._stages = ranks * (1 if name in _ONE_STAGE else 2 if name in _IN_A_V else int(chunks or 2))
        modules = stages_of(model, self._stages)
        way = [*range(ranks), *reversed(range(ranks))] if name in _IN_A_V else [*range(ranks)]
        self.mine = [stage for stage in range(self._stages) if way[stage % len(way)] == rank]
        for stage, module in enumerate(modules):
            if stage not in self.mine:
                module.requires_grad_(False)
        self._model = model
        stages = [PipelineStage(modules[one], one, self._stages, torch.device("cpu")) for one in self.mine]
        self._schedule = kind(stages[0] if name in _ONE_STAGE else stages, micro_batches, loss_fn=loss)

    def train(self, batch: tuple[Tensor, Tensor]) -> float:
        """Add a batch's gradients to ``.grad``; returns the loss on the last stage's rank, 0 on others."""
        first = (batch[0],) if 0 in self.mine else ()
        losses: list[Tensor] = []
        last = {"target": batch[1], "losses": losses} if self._stages - 1 in self.mine else {}
        self._schedule.step(*first, return_outputs=False, **last)
        return float(torch.stack(losses).mean()) if losses else 0.0


def stages_of(model: nn.Module, stages: int) -> list[nn.Module]:
    """Blocks in equal shares, the embedding with the first and the head with the last.

    Raises:
        ValueError: neither of the two models, or blocks that do not divide.
    """
    inner: Any = getattr(model, "model", model)
    if (name := type(inner).__name__) == "GPT2LMHeadModel":
        body = inner.transformer
        front, blocks = _TokensAndPositions(body.wte, body.wpe), body.h
        behind = nn.Sequential(body.ln_f, inner.lm_head)
    elif name == "BertForMaskedLM":
        front, blocks, behind = inner.bert.embeddings, inner.bert.encoder.layer, inner.cls
    else:
        raise ValueError(f"peers: {name} was not cut by hand for torch's schedules: leave the peers out, with peers=[]")
    if len(blocks) % stages:
        raise ValueError(f"peers: {len(blocks)} blocks do not divide into {stages} stages")
    share = len(blocks) // stages
    parts = [list(blocks[stage * share : (stage + 1) * share]) for stage in range(stages)]
    parts[0].insert(0, front)
    parts[-1].append(behind)
    return [_Stage(*part) for part in parts]


class _Stage(nn.Sequential):
    def forward(self, hidden: Tensor) -> Tensor:
        for part in self:
            answer = part(hidden)
            hidden = answer if isinstance(answer, Tensor) else answer[0]
        return hidden


class _TokensAndPositions(nn.Module):
    """GPT-2's embedding."""

    def __init__(self, tokens: nn.Module, positions: nn.Module) -> None:
        super().__init__()
        self.tokens, self.positions = tokens, positions

    def forward(self, given: Tensor) -> Tensor:
        embedded: Tensor = self.tokens(given) + self.positions(torch.arange(given.shape[1], device=given.device))
        return embedded
