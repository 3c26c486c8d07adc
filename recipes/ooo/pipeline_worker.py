"""What a rank of `ooo_pipeline_targets` runs: steps of sleeping layers through `PipelineStep`, schedule by schedule."""

from __future__ import annotations

import statistics
import time
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from retime.mechanisms.pipeline import PipelineStep
from retime.recipes.core.measure import interleave
from retime.recipes.core.workers import Answer
from retime.recipes.emulated import SleepingLayer
from retime.recipes.emulated.rank import joined, tell

_ELEMENTS = 2**15
"""Of a layer's weight: gradients of up to 64 KiB do not wait."""
_WIDTH = 32
_PINGS = 20


class SleepingModel(nn.Module):
    """Layers that take `unit_ms` for each of F, O and W. The first one has an output gradient to compute, too."""

    def __init__(self, layers: int, unit_ms: float) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(SleepingLayer(unit_ms, unit_ms, unit_ms, _ELEMENTS) for _ in range(layers)))

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.layers(inputs.detach().requires_grad_())
        return outputs


def steps(request: dict[str, Any]) -> dict[str, Any]:
    """By schedule: milliseconds of a step a round, and of the last step's tasks by kind; milliseconds of a message."""
    generator = torch.Generator().manual_seed(request["seed"])
    samples = 2 * request["micro_batches"]
    batch = (torch.randn(samples, _WIDTH, generator=generator), torch.randn(samples, _WIDTH, generator=generator))
    pipelines: dict[str, PipelineStep] = {}
    blocks = {}
    for schedule in request["schedules"]:
        model = SleepingModel(request["layers"], request["unit_ms"])
        pipelines[schedule] = PipelineStep(
            model, microbatches=request["micro_batches"], schedule=schedule, layers_per_stage=1
        )
        blocks[schedule] = partial(_block, pipelines[schedule], model, batch, request["steps"])
    hop_ms = _hop_ms()
    times = interleave(blocks, request["rounds"], request["warmup_rounds"], tell)
    tasks = {schedule: _task_ms(pipeline) for schedule, pipeline in pipelines.items()}
    stages = {schedule: pipeline.report().stages for schedule, pipeline in pipelines.items()}
    for pipeline in pipelines.values():
        pipeline.remove()
    return {"ms": times, "hop_ms": hop_ms, "tasks": tasks, "stages": stages}


def _block(pipeline: PipelineStep, model: nn.Module, batch: tuple[Tensor, Tensor], count: int) -> float:
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


def _loss(model: nn.Module, part: Any) -> Tensor:
    inputs, targets = part
    return nn.functional.mse_loss(model(inputs), targets)


def _task_ms(pipeline: PipelineStep) -> dict[str, float]:
    """The median of the last step's tasks on this rank, by kind; B is O and W in one."""
    report = pipeline.report()
    found: dict[str, list[float]] = {}
    for span in report.spans:
        found.setdefault(span.kind, []).append(1000 * (span.end_s - span.start_s))
    return {kind: statistics.median(values) for kind, values in found.items()}


def _hop_ms() -> float:
    """The median one-way message between ranks 0 and 1, of a micro-batch's size, as these see it; 0 on others."""
    rank, message, took = dist.get_rank(), torch.zeros(2, _WIDTH), []
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
