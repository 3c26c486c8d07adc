"""VGG-like chains of layers as task graphs, sized by arithmetic alone: for examples and tests (moDNN, Figure 1)."""

from __future__ import annotations

from collections.abc import Sequence

from retime.schedules.budget import Algorithm, Block, BlockKind, GraphTask, Phase, TaskGraph

_FLOAT_BYTES = 4
_LABEL_BYTES = 8


class _Chain:
    def __init__(self, flops_per_ms: float, task_ms: float) -> None:
        self.flops_per_ms = flops_per_ms
        self.task_ms = task_ms
        self.blocks: dict[str, Block] = {}
        self.forward: list[GraphTask] = []
        self.backward: list[list[GraphTask]] = []
        self.update: list[GraphTask] = []

    def block(self, name: str, kind: BlockKind, values: int, *, of_samples: bool) -> str:
        size = _FLOAT_BYTES * values
        self.blocks[name] = Block(name, kind, 0 if of_samples else size, size if of_samples else 0)
        return name

    def algorithms(self, flops: float, patch_values: int = 0) -> tuple[Algorithm, ...]:
        """Implicit GEMM without workspace; for convolutions the faster ones of the paper, which need some."""
        full_ms = flops / self.flops_per_ms
        options = [Algorithm("implicit gemm", self.task_ms, full_ms)]
        if patch_values:
            patches = _FLOAT_BYTES * patch_values
            options += [
                Algorithm("gemm", self.task_ms, 0.8 * full_ms, patches),
                Algorithm("winograd", self.task_ms, 0.45 * full_ms, 0, patches / 4),
            ]
        return tuple(options)


def vgg_chain(
    layers: Sequence[int | str] = (64, 64, "M", 128, 128, "M", 256, 256, 256, "M"),
    *,
    image: int = 32,
    channels: int = 3,
    classes: int = 10,
    hidden: Sequence[int] = (256,),
    flops_per_ms: float = 1e9,
    task_ms: float = 0.02,
) -> TaskGraph:
    """One training step of a VGG-like network: 3x3 convolutions, 2x2 poolings (``"M"``), fully connected layers.

    Per layer ``i``: ``F`` reads ``Y{i-1}`` and writes ``Yi``; ``BP1`` reads ``δi`` and, where the layer's derivative
    needs it, ``Y{i-1}``, and writes ``δ{i-1}``; ``BP2`` reads ``δi`` and ``Y{i-1}`` and writes ``ΔWi``; updates come
    last.

    Args:
        layers: output channels of each convolution, or ``"M"``.
        image: height and width of the input.
        channels: of the input.
        classes: outputs of the last layer.
        hidden: outputs of the fully connected layers before it.
        flops_per_ms: of the device.
        task_ms: what each task costs beside its arithmetic.
    """
    chain = _Chain(flops_per_ms, task_ms)
    values = channels * image * image
    below = chain.block("Y0", BlockKind.INPUT, values, of_samples=True)
    size, width, number = image, channels, 0
    for layer in layers:
        number += 1
        if layer == "M":
            size //= 2
            below = _add(chain, number, "pool", below, width * size * size, 0, 4 * width * size * size, 0)
            continue
        out = int(layer)
        weights, patches = 9 * width * out, 9 * width * size * size
        flops = 2.0 * weights * size * size
        below = _add(chain, number, "conv", below, out * size * size, weights, flops, patches)
        width = out
    values = width * size * size
    for out in (*hidden, classes):
        number += 1
        below = _add(chain, number, "fc", below, out, values * out, 2.0 * values * out, 0)
        values = out
    chain.blocks["label"] = Block("label", BlockKind.INPUT, 0, _LABEL_BYTES)
    delta = chain.block(f"δ{number}", BlockKind.GRADIENT, classes, of_samples=True)
    loss = GraphTask("loss", Phase.FORWARD, "loss", (below, "label"), (delta,), chain.algorithms(5.0 * classes))
    backward = [task for tasks in reversed(chain.backward) for task in tasks]
    return TaskGraph(chain.blocks, (*chain.forward, loss, *backward, *chain.update))


def _add(
    chain: _Chain, number: int, kind: str, below: str, values: int, weights: int, flops: float, patches: int
) -> str:
    """Layer ``number``; returns the name of its output."""
    layer = f"{kind}{number}"
    output = chain.block(f"Y{number}", BlockKind.ACTIVATION, values, of_samples=True)
    options = chain.algorithms(flops, patches)
    reads = [below]
    if weights:
        weight = chain.block(f"W{number}", BlockKind.WEIGHT, weights, of_samples=False)
        gradient = chain.block(f"ΔW{number}", BlockKind.WEIGHT_GRADIENT, weights, of_samples=False)
        reads.append(weight)
        update_ms = (Algorithm("add", chain.task_ms + 2.0 * weights / chain.flops_per_ms),)
        chain.update.append(GraphTask(f"U({layer})", Phase.UPDATE, layer, (weight, gradient), (weight,), update_ms))
    chain.forward.append(GraphTask(f"F({layer})", Phase.FORWARD, layer, tuple(reads), (output,), options))

    delta, tasks = f"δ{number}", []
    if number > 1:  # the input gets no gradient
        size = chain.blocks[below].sample_bytes
        delta_below = f"δ{number - 1}"
        chain.blocks[delta_below] = Block(delta_below, BlockKind.GRADIENT, 0, size)
        tasks.append(GraphTask(f"BP1({layer})", Phase.BACKWARD, layer, (delta, *reads), (delta_below,), options))
    if weights:
        tasks.append(GraphTask(f"BP2({layer})", Phase.BACKWARD, layer, (delta, below), (gradient,), options))
    chain.backward.append(tasks)
    return output
