"""How long the tasks of a network take on the paper's K40: a roofline of its data sheet, not a measurement."""

from __future__ import annotations

from dataclasses import replace
from math import prod

from torch import nn

from retime.recipes.modnn.networks import Network, in_place, operation_of, separate_gradients
from retime.recipes.modnn.settings import MemorySettings
from retime.schedules.budget import Algorithm, GraphTask, TaskGraph

_BYTES = 4  # of a number
_PRODUCTS = ("mm", "addmm", "bmm", "linear")
_MS = 1e3


def k40_graph(network: Network, settings: MemorySettings) -> TaskGraph:
    """The network's task graph as the paper counts layers, with times and workspaces.

    A task takes its arithmetic or its memory traffic, whichever is longer, and a launch. Where a sample has fewer
    outputs than the GPU holds threads, it takes as long as with that many: small sub-batches do not fill it. A
    convolution has two algorithms: implicit GEMM, and the fastest one, which needs workspace.
    """
    graph = separate_gradients(in_place(network.graph()))
    operations = _operations(graph, dict(network.step(1).module.named_modules()))
    return TaskGraph(
        graph.blocks,
        tuple(
            replace(task, algorithms=_algorithms(graph, task, operations[task.name], settings)) for task in graph.tasks
        ),
    )


def _operations(graph: TaskGraph, layers: dict[str, nn.Module]) -> dict[str, float]:
    """By task: floating-point operations for one sample."""
    found: dict[str, float] = {}
    of_layer: dict[str, float] = {}
    for task in graph.tasks:
        layer, kind = layers.get(task.layer), operation_of(task)
        operations = 0.0
        if kind == "convolution" and isinstance(layer, nn.Conv2d | nn.ConvTranspose2d):
            transposed = isinstance(layer, nn.ConvTranspose2d)
            each = (layer.out_channels if transposed else layer.in_channels) / layer.groups * prod(layer.kernel_size)
            operations = of_layer[task.layer] = 2 * each * _numbers(graph, task.reads if transposed else task.writes)
        elif kind == "convolution_backward":
            operations = of_layer.get(task.layer, 0.0)
        elif kind in _PRODUCTS and isinstance(layer, nn.Linear):
            operations = 2.0 * layer.in_features * layer.out_features
        found[task.name] = operations
    return found


def _numbers(graph: TaskGraph, names: tuple[str, ...]) -> float:
    """Numbers in the blocks that grow with the batch, for one sample."""
    return sum(graph.blocks[name].sample_bytes for name in names) / _BYTES


def _algorithms(
    graph: TaskGraph, task: GraphTask, operations: float, settings: MemorySettings
) -> tuple[Algorithm, ...]:
    names = dict.fromkeys((*task.reads, *task.writes))
    fixed_bytes = sum(graph.blocks[name].fixed_bytes for name in names)
    sample_bytes = sum(graph.blocks[name].sample_bytes for name in names)
    if fixed_bytes + sample_bytes < 1024:  # a step count, say
        return (Algorithm(),)
    bandwidth = settings.memory_bytes_per_s * settings.memory_efficiency
    traffic_ms, fixed_ms = sample_bytes / bandwidth * _MS, fixed_bytes / bandwidth * _MS
    outputs = _numbers(graph, task.writes)
    # A weight gradient has as many outputs whatever the batch.
    idle = settings.threads / outputs if outputs else 0.0

    def algorithm(name: str, speedup: float, workspace: float) -> Algorithm:
        arithmetic_ms = operations / (settings.operations_per_s * settings.efficiency * speedup) * _MS
        sample_ms = max(arithmetic_ms, traffic_ms)
        return Algorithm(
            name, settings.launch_ms + fixed_ms + idle * sample_ms, sample_ms, sample_workspace_bytes=workspace
        )

    if "convolution" in operation_of(task):
        return (
            algorithm("implicit gemm", 1.0, 0.0),
            algorithm("fastest", settings.fast_speedup, settings.workspace_share * sample_bytes),
        )
    # matrix products have no choice, and run as fast as the fastest convolution
    return (algorithm("default", settings.fast_speedup, 0.0),)
