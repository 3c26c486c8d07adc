"""What a rank of `ooo_pipeline_compute` runs: steps of a transformer by schedule, ours and torch's own, in turn."""

from __future__ import annotations

import copy
import math
import statistics
import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from retime.foundations.workers import Answer
from retime.mechanisms.pipeline import PipelineStep
from retime.recipes.core.build import build_batches, build_model, loss_of
from retime.recipes.core.measure import interleave
from retime.recipes.emulated.rank import joined, tell
from retime.recipes.ooo.torch_pipelines import TorchPipeline

ONE = "one device"
_Train = Callable[[Tensor, Tensor], float]


def steps(request: dict[str, Any]) -> dict[str, Any]:
    """By variant: milliseconds of a step a round, the loss and the norm of all gradients; of ours, also bubbles."""
    model = build_model(request["model"], torch.device("cpu"), request["seed"])
    (batch,) = build_batches(request["data"], request["batch_size"], 1)
    blocks, pipelines, said = {}, {}, {}
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
            train = partial(_pipelined, pipelines[name], copied)
        loss = train(*batch)  # also: the first batch runs whole in ours, and torch's stages look at shapes
        said[name] = _summed(loss), math.sqrt(_summed(_squares(copied.parameters())))
        blocks[name] = partial(_block, train, copied, batch, request["steps"])
    times = interleave(blocks, request["rounds"], request["warmup_rounds"], tell)
    reports = {name: pipeline.report() for name, pipeline in pipelines.items()}
    for pipeline in pipelines.values():
        pipeline.remove()
    return {
        "ms": times,
        "loss and norm": said,
        "bubble": {name: report.bubble_share for name, report in reports.items()},
        "simulated bubble": {name: report.simulated_bubble_share for name, report in reports.items()},
        "stages": {name: report.stages for name, report in reports.items()},
    }


def _block(train: _Train, model: nn.Module, batch: tuple[Tensor, Tensor], count: int) -> float:
    took = []
    for _ in range(count):
        model.zero_grad()
        dist.barrier()
        start = time.perf_counter()
        train(*batch)
        dist.barrier()
        took.append(1000 * (time.perf_counter() - start))
    return statistics.median(took)


def _whole(model: nn.Module, micro_batches: int, inputs: Tensor, targets: Tensor) -> float:
    """The same micro-batches one after another on rank 0; the others wait."""
    total = 0.0
    if dist.get_rank() == 0:
        for part, wanted in zip(inputs.chunk(micro_batches), targets.chunk(micro_batches), strict=True):
            loss = loss_of(model(part), wanted) * (len(part) / len(inputs))
            loss.backward()  # type: ignore[no-untyped-call]
            total += float(loss.detach())
    return total


def _pipelined(pipeline: PipelineStep, model: nn.Module, inputs: Tensor, targets: Tensor) -> float:
    results = pipeline.train(lambda part: loss_of(model(part[0]), part[1]), (inputs, targets))
    return sum(result.weight * float(result.output) for result in results)


def _squares(parameters: Iterable[Tensor]) -> float:
    return sum(float(p.grad.double().square().sum()) for p in parameters if p.grad is not None)


def _summed(value: float) -> float:
    """Over ranks."""
    total = torch.tensor(value, dtype=torch.double)
    dist.all_reduce(total)
    return float(total)


def serve() -> Answer:
    """For `run_ranks`."""
    return joined(steps)
