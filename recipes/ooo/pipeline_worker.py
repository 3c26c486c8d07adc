"""What a rank of `ooo_pipeline_targets` runs: steps of sleeping layers through `PipelineStep`, schedule by schedule."""

from __future__ import annotations

import statistics
import time
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from retime.foundations.workers import Answer
from retime.mechanisms.pipeline import PipelineStep
from retime.recipes.core.measure import interleave
from retime.recipes.emulated import SleepingLayer
from retime.recipes.emulated.rank import joined, tell

_ELEMENTS = 2**15
"""Of a layer's weight: gradients of up to 64 KiB do not wait."""
_SAMPLES = 2
"""Of a micro-batch."""
_PINGS = 20


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


def steps(request: dict[str, Any]) -> dict[str, Any]:
    """By schedule: milliseconds of a step a round, and of the last step's tasks by kind; what a simulation needs."""
    generator = torch.Generator().manual_seed(request["seed"])
    samples, width = _SAMPLES * request["micro_batches"], request["message_kib"] * 1024 // (4 * _SAMPLES)
    batch = torch.randn(samples, width, generator=generator)
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
        blocks[variant] = partial(_block, pipelines[variant], model, batch, request["steps"])
    hop_ms, beside_ms = _hop_ms(_SAMPLES * width), _beside_ms(request["unit_ms"], batch)
    times = interleave(blocks, request["rounds"], request["warmup_rounds"], tell)
    tasks = {variant: _task_ms(pipeline) for variant, pipeline in pipelines.items()}
    stages = {variant: pipeline.report().stages for variant, pipeline in pipelines.items()}
    layers = {variant: _alive(pipelines[variant]) * request["layers"] / stages[variant] for variant in pipelines}
    for pipeline in pipelines.values():
        pipeline.remove()
    return {"ms": times, "hop_ms": hop_ms, "beside_ms": beside_ms, "tasks": tasks, "stages": stages, "alive": layers}


def schedule_of(variant: str) -> tuple[str, int | None]:
    """The schedule, and how many layers' activations may be alive on a rank; ``"ooo@32"`` names both.

    Raises:
        ValueError: no whole number behind the sign.
    """
    schedule, sign, alive = variant.partition("@")
    if sign and not alive.isdigit():
        raise ValueError(f"schedules: {variant!r} has no number of layers behind '@': write it as in 'ooo@32'")
    return schedule, int(alive) if sign else None


def _block(pipeline: PipelineStep, model: nn.Module, batch: Tensor, count: int) -> float:
    if not pipeline.is_spread:  # the first batch also runs whole
        pipeline.train(lambda part: _loss(model, part), batch)
    took = []
    for _ in range(count):
        model.zero_grad()
        dist.barrier()
        start = time.perf_counter()
        pipeline.train(lambda part: _loss(model, part), batch)
        dist.barrier()
        took.append(1000 * (time.perf_counter() - start))
    return statistics.median(took)


def _loss(model: nn.Module, part: Tensor) -> Tensor:
    """A loss that keeps nothing for its backward pass: what is alive are the layers'."""
    loss: Tensor = model(part).mean()
    return loss


def _task_ms(pipeline: PipelineStep) -> dict[str, float]:
    """The median of the last step's tasks on this rank, by kind; B is O and W in one."""
    report = pipeline.report()
    found: dict[str, list[float]] = {}
    for span in report.spans:
        found.setdefault(span.kind, []).append(1000 * (span.end_s - span.start_s))
    return {kind: statistics.median(values) for kind, values in found.items()}


def _alive(pipeline: PipelineStep) -> int:
    """The most stages whose activations this rank kept at once in the last step."""
    spans = sorted(pipeline.report().spans, key=lambda span: span.start_s)
    alive = most = 0
    for span in spans:
        alive += {"F": 1, "W": -1, "B": -1}.get(span.kind, 0)
        most = max(most, alive)
    return most


def _beside_ms(unit_ms: float, batch: Tensor) -> float:
    """What a task takes beside its layer, for the simulation: of a pipeline with one layer a rank, by ZB-H1."""
    model = SleepingModel(dist.get_world_size(), unit_ms)
    pipeline = PipelineStep(model, microbatches=len(batch) // _SAMPLES, schedule="zb_h1", split="fastest")
    for _ in range(2):
        model.zero_grad()
        pipeline.train(lambda part: _loss(model, part), batch)
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


def serve() -> Answer:
    """For `run_ranks`."""
    return joined(steps)
