"""How long profiling and planning a large step takes, and how much memory: on tensors without memory."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from retime.foundations.cpu_pool import give_back_freed_memory, trim_heap
from retime.foundations.measure import MemoryProbe
from retime.foundations.workers import Answer
from retime.mechanisms.memory_budget import PlanChoice, StepMemory, TrainingStep, part_sizes, search_plan
from retime.recipes.modnn.networks import network_of


def serve() -> Answer:
    """For :class:`Worker`: a request has a `network` as in an experiment file, `share` of the ideal peak, `seed`."""
    torch.set_num_threads(1)
    return plan_dry


def plan_dry(request: dict[str, Any]) -> dict[str, Any]:
    """Profile the step, and plan it for a share of its peak, twice: memory counts for each time, time for the first.

    The first time loads code that a process has once, which counts like all else that the process grows by. Where
    sub-batches are allowed and what operations need for themselves is found by running parts of the batch, which is no
    part of this.
    """
    give_back_freed_memory()
    network = network_of("network", request["network"], request["optimizer"], request["seed"])
    step = network.step()
    sizes = part_sizes(network.batch_size) if request["sub_batches"] else (network.batch_size,)

    def once() -> tuple[float, int, int, PlanChoice]:
        gc.collect()
        trim_heap()
        started = time.perf_counter()
        with _growing() as growth:
            peak, choice = _profile_and_plan(step, sizes, request["share"])
        return time.perf_counter() - started, growth[0], peak, choice

    seconds, first_bytes, peak, choice = once()
    _, again_bytes, *_ = once()
    return {
        "seconds": seconds,
        "first_bytes": first_bytes,
        "again_bytes": again_bytes,
        "peak_bytes": peak,
        "floor_bytes": choice.floor.bytes if choice.floor else 0,
        "plan": str(choice.plan),
    }


@contextmanager
def _growing() -> Iterator[list[int]]:
    """Afterwards the list has one entry: the bytes that the process grew by at its peak."""
    growth: list[int] = []
    probe = MemoryProbe("cpu")
    probe.start()
    probe.stop()
    before = probe.peaks()["batch"]
    probe = MemoryProbe("cpu")
    probe.start()
    try:
        yield growth
    finally:
        probe.stop()
        growth.append(probe.peaks()["batch"] - before)


def _profile_and_plan(step: TrainingStep, sizes: tuple[int, ...], share: float) -> tuple[int, PlanChoice]:
    memory = StepMemory(step, sizes)
    if memory.plain is None:
        raise ValueError(f"this network cannot be run dry: {memory.note}")
    peak = memory.plain.peak_bytes
    return peak, search_plan(step, int(share * peak), memory=memory)
