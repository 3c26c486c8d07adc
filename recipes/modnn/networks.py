"""The networks of moDNN's section 7 as training steps without memory, as task graphs, and planned.

Tensors are on torch's meta device: they have sizes and no bytes, so VGG-101 with 128 images is profiled on any machine.
How long profiling and planning such a step takes, and how much memory, a process of its own measures (`plan_dry`).
"""

from __future__ import annotations

import gc
import time
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch

from retime.foundations.cpu_pool import give_back_freed_memory, trim_heap
from retime.foundations.measure import MemoryProbe
from retime.mechanisms.memory_budget import (
    PlanChoice,
    StepMemory,
    StepProfile,
    TrainingStep,
    part_sizes,
    profile_step,
    search_plan,
    task_graph,
)
from retime.recipes.core.build import build_model, build_optimizer, loss_of
from retime.schedules.budget import STAYS, Block, BlockKind, GraphTask, TaskGraph

_META = torch.device("meta")
# What the paper's layers compute in place, or as a part of the layer before: their outputs are no blocks of their own.
_IN_PLACE = ("relu", "threshold_backward", "native_batch_norm", "native_batch_norm_backward", "native_dropout")


@dataclass(frozen=True)
class Network:
    """One of the figure's networks."""

    name: str  # as in the paper
    model: dict[str, Any]  # the block that builds it
    batch_size: int  # samples of a batch
    optimizer: dict[str, Any]  # the block that builds its optimizer
    image_size: int = 224  # height and width of its images
    pixels: bool = False  # whether every pixel has a label
    tokens: int = 0  # length of its token sequences; 0 for images
    seed: int = 0  # of the weights, which have no values here

    def step(self, samples: int | None = None) -> TrainingStep:
        """A training step on so many samples, by default the whole batch."""
        samples = samples or self.batch_size
        with _META:
            model = build_model(self.model, _META, self.seed)
            batch = self._batch(samples)
            optimizer = build_optimizer(self.optimizer, model.parameters(), {})
        return TrainingStep(model, batch, samples, lambda given: loss_of(model(given[0]), given[1]), [optimizer])

    def _batch(self, samples: int) -> tuple[torch.Tensor, torch.Tensor]:
        if self.tokens:
            inputs = torch.empty(samples, self.tokens, dtype=torch.long)
            return inputs, torch.empty_like(inputs)
        place = (self.image_size, self.image_size) if self.pixels else ()
        images = torch.empty(samples, 3, self.image_size, self.image_size)
        return images, torch.empty((samples, *place), dtype=torch.long)

    def graph(self, whole: StepProfile | None = None) -> TaskGraph:
        """The step's task graph, sized by profiles of two batch sizes, checked on a third; `whole` is the batch's."""
        sizes = (2, max(3, self.batch_size // 2))
        return task_graph(whole or profile_step(self.step()), *(profile_step(self.step(size)) for size in sizes))


def network_of(name: str, case: dict[str, Any], optimizer: dict[str, Any], seed: int) -> Network:
    """A network from its entry in an experiment file; ValueError if that has keys of no network, or lacks some."""
    try:
        return Network(name=name, **{"optimizer": optimizer, "seed": seed, **case})
    except TypeError as error:
        raise ValueError(
            f"cases.{name}={case}: {error}; give model, batch_size, image_size, pixels or tokens"
        ) from None


def operation_of(task: GraphTask) -> str:
    """A task's operation without its number and overload: ``3 relu_.default`` is ``relu_``."""
    return task.name.split(" ")[1].split(".")[0]


def in_place(graph: TaskGraph) -> TaskGraph:
    """The graph with activations, batch normalisation and dropout computed in place, as the paper counts layers.

    The paper's layer is one task from ``X`` to ``Y = f(g(X, W))``; torch's step has a block between ``g`` and ``f``,
    one more for a batch normalisation, and the same in the backward pass. This is a way to count, not to compute:
    torch's batch normalisation needs its input again.
    """
    stands_for: dict[str, str] = {}

    def of(name: str) -> str:
        while name in stands_for:
            name = stands_for[name]
        return name

    for task in graph.tasks:
        if operation_of(task) not in _IN_PLACE:
            continue
        moving = [name for name in task.reads if graph.blocks[name].kind not in STAYS | {BlockKind.INPUT}]
        for output in task.writes:
            size = graph.blocks[output].sample_bytes
            same = next((name for name in moving if graph.blocks[name].sample_bytes == size and size), None)
            if same is not None and of(same) != output:
                stands_for[output] = same
                break  # other outputs, a dropout's mask say, are blocks

    def renamed(names: Iterable[str]) -> tuple[str, ...]:
        return tuple(dict.fromkeys(map(of, names)))

    tasks = tuple(replace(task, reads=renamed(task.reads), writes=renamed(task.writes)) for task in graph.tasks)
    blocks = {name: block for name, block in graph.blocks.items() if name not in stands_for}
    return TaskGraph(blocks, tasks)


def weight_gradients_pass(graph: TaskGraph) -> TaskGraph:
    """The graph with weight gradients as data of their tasks: the paper's ``S_W`` is the weights alone."""
    blocks: dict[str, Block] = {
        name: replace(block, kind=BlockKind.GRADIENT) if block.kind is BlockKind.WEIGHT_GRADIENT else block
        for name, block in graph.blocks.items()
    }
    return TaskGraph(blocks, graph.tasks)


def separate_gradients(graph: TaskGraph) -> TaskGraph:
    """The graph with two tasks in place of torch's one for both gradients of a convolution (``BP1`` and ``BP2``)."""
    tasks = []
    for task in graph.tasks:
        kinds = {name: graph.blocks[name].kind for name in (*task.reads, *task.writes)}
        outputs = [name for name in task.writes if kinds[name] is BlockKind.GRADIENT]
        weights = [name for name in task.writes if kinds[name] is BlockKind.WEIGHT_GRADIENT]
        if "convolution_backward" not in task.name or not outputs or not weights:
            tasks.append(task)
            continue
        gradient = next(name for name in task.reads if kinds[name] is BlockKind.GRADIENT)
        parameters = [name for name in task.reads if kinds[name] is BlockKind.WEIGHT]
        inputs = [name for name in task.reads if name != gradient and name not in parameters]
        tasks.append(replace(task, name=f"{task.name} BP2", reads=(gradient, *inputs), writes=tuple(weights)))
        tasks.append(replace(task, name=f"{task.name} BP1", reads=(gradient, *parameters), writes=tuple(outputs)))
    return TaskGraph(graph.blocks, tuple(tasks))


def plan_dry(request: dict[str, Any]) -> dict[str, Any]:
    """Profile the step, and plan it for a share of its peak, twice: memory counts for each time, time for the first.

    The first time loads code that a process has once, which counts like all else that the process grows by. Where
    sub-batches are allowed and what operations need for themselves is found by running parts of the batch, which is no
    part of this. The request has a `network` as in an experiment file, `share` of the ideal peak, `seed`.
    """
    torch.set_num_threads(1)
    give_back_freed_memory()
    network = network_of("network", request["network"], request["optimizer"], request["seed"])
    step = network.step()
    sizes = part_sizes(network.batch_size) if request["sub_batches"] else (network.batch_size,)

    def once() -> tuple[float, int, int, PlanChoice]:
        gc.collect()
        trim_heap()
        started = time.perf_counter()
        before, probe = MemoryProbe("cpu"), MemoryProbe("cpu")
        before.start()
        before.stop()
        probe.start()
        memory = StepMemory(step, sizes)
        if memory.plain is None:
            raise ValueError(f"this network cannot be run dry: {memory.note}")
        peak = memory.plain.peak_bytes
        choice = search_plan(step, int(request["share"] * peak), memory=memory)
        probe.stop()
        return time.perf_counter() - started, probe.peaks()["batch"] - before.peaks()["batch"], peak, choice

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
