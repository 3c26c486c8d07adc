"""VGG-like chains of layers as task graphs, sized by arithmetic alone (moDNN, Figure 1)."""

from retime.schedules.budget import Algorithm, Block, BlockKind, GraphTask, Phase, TaskGraph

FLOAT_BYTES, LABEL_BYTES = 4, 8
TASK_MS = 0.02
"""What each task costs beside its arithmetic."""


def vgg_chain(layers, *, image, classes=10, hidden=(256,), flops_per_ms=1e9):
    """One training step of 3x3 convolutions, 2x2 poolings and fully connected layers, on images of 3 channels.

    Per layer ``i``: ``F`` reads ``Y{i-1}`` and writes ``Yi``; ``BP1`` reads ``δi`` and ``Y{i-1}``, and writes
    ``δ{i-1}``; ``BP2`` reads ``δi`` and ``Y{i-1}`` and writes ``ΔWi``; updates come last.

    Args:
        layers: output channels of each convolution, or ``"M"`` for a pooling.
        image: height and width of the input.
        classes: outputs of the last layer.
        hidden: outputs of the fully connected layers before it.
        flops_per_ms: of the device.
    """
    chain = _Chain(flops_per_ms)
    size, width = image, 3
    chain.block("Y0", BlockKind.INPUT, width * size * size, of_samples=True)
    for layer in layers:
        if layer == "M":
            size //= 2
            chain.add("pool", width * size * size, 0, 4 * width * size * size, 0)
            continue
        weights, patches = 9 * width * layer, 9 * width * size * size
        chain.add("conv", layer * size * size, weights, 2.0 * weights * size * size, patches)
        width = layer
    values = width * size * size
    for out in (*hidden, classes):
        chain.add("fc", out, values * out, 2.0 * values * out, 0)
        values = out
    last = chain.layers
    chain.blocks["label"] = Block("label", BlockKind.INPUT, 0, LABEL_BYTES)
    delta = chain.block(f"δ{last}", BlockKind.GRADIENT, classes, of_samples=True)
    loss = GraphTask("loss", Phase.FORWARD, "loss", (f"Y{last}", "label"), (delta,), chain.algorithms(5.0 * classes))
    backward = [task for tasks in reversed(chain.backward) for task in tasks]
    return TaskGraph(chain.blocks, (*chain.forward, loss, *backward, *chain.update))


class _Chain:
    def __init__(self, flops_per_ms):
        self.flops_per_ms = flops_per_ms
        self.layers = 0
        self.blocks, self.forward, self.backward, self.update = {}, [], [], []

    def block(self, name, kind, values, *, of_samples):
        size = FLOAT_BYTES * values
        self.blocks[name] = Block(name, kind, 0 if of_samples else size, size if of_samples else 0)
        return name

    def algorithms(self, flops, patch_values=0):
        """Implicit GEMM without workspace; for convolutions the faster ones of the paper, which need some."""
        full_ms, patches = flops / self.flops_per_ms, FLOAT_BYTES * patch_values
        options = [Algorithm("implicit gemm", TASK_MS, full_ms)]
        if patch_values:
            options += [
                Algorithm("gemm", TASK_MS, 0.8 * full_ms, patches),
                Algorithm("winograd", TASK_MS, 0.45 * full_ms, 0, patches / 4),
            ]
        return tuple(options)

    def add(self, kind, values, weights, flops, patches):
        """The next layer, with so many outputs a sample and so many weights."""
        below = f"Y{self.layers}"
        self.layers += 1
        number = self.layers
        layer, options = f"{kind}{number}", self.algorithms(flops, patches)
        output = self.block(f"Y{number}", BlockKind.ACTIVATION, values, of_samples=True)
        reads, delta, backward = [below], f"δ{number}", []
        if weights:
            weight = self.block(f"W{number}", BlockKind.WEIGHT, weights, of_samples=False)
            gradient = self.block(f"ΔW{number}", BlockKind.WEIGHT_GRADIENT, weights, of_samples=False)
            reads.append(weight)
            update = (Algorithm("add", TASK_MS + 2.0 * weights / self.flops_per_ms),)
            self.update.append(GraphTask(f"U({layer})", Phase.UPDATE, layer, (weight, gradient), (weight,), update))
        self.forward.append(GraphTask(f"F({layer})", Phase.FORWARD, layer, tuple(reads), (output,), options))
        if number > 1:  # the input gets no gradient
            delta_below = f"δ{number - 1}"
            self.blocks[delta_below] = Block(delta_below, BlockKind.GRADIENT, 0, self.blocks[below].sample_bytes)
            backward.append(GraphTask(f"BP1({layer})", Phase.BACKWARD, layer, (delta, *reads), (delta_below,), options))
        if weights:
            backward.append(GraphTask(f"BP2({layer})", Phase.BACKWARD, layer, (delta, below), (gradient,), options))
        self.backward.append(backward)
