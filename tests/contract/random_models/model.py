"""From a `Spec` to a module and batches."""

import inspect
from typing import Any

import torch
from torch import Tensor, nn

from contract.random_models import wiring  # noqa: F401  # fills KINDS
from contract.random_models.layers import KINDS, TOKENS, Batch
from contract.random_models.losses import COUNTS
from contract.random_models.spec import Node, Spec

CLASSES = 3


class Chain(nn.Module):
    """Layers one after the other, as inside a segment."""

    def __init__(self, layers: list[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        for layer in self.layers:
            x = layer(x, batch)
        return x


class RandomModel(nn.Module):
    """A stem, the spec's nodes, and a head that gives [B, T, CLASSES] beside the last node's [B, T, X]."""

    def __init__(self, spec: Spec) -> None:
        super().__init__()
        x = spec.features
        self.nodes = spec.nodes
        self.stem, self.head = nn.Linear(x, x), nn.Linear(x, CLASSES)
        layers: list[nn.Module] = []
        for index, node in enumerate(spec.nodes):
            other = index - node.like
            layers.append(layers[other] if node.like and other >= 0 else _build(node, spec))
            if node.frozen:
                layers[-1].requires_grad_(False)
        self.layers = nn.ModuleList(layers)
        self.register_buffer("class_weights", torch.linspace(0.5, 1.5, CLASSES))

    def at_step(self, step: int) -> None:
        """What depends on the step's number is told it."""
        for module in self.modules():
            if hasattr(module, "step") and isinstance(module.step, int):
                module.step = step

    def forward(self, batch: Any) -> tuple[Tensor, Tensor]:
        batch = Batch(*batch)
        values = [self.stem(batch.inputs)]
        for node, layer in zip(self.nodes, self.layers, strict=True):
            inputs = [values[max(0, len(values) - back)] for back in node.of]
            values.append(inputs[0] if node.unused else layer(*inputs, batch))
        return self.head(values[-1]), values[-1]


def _build(node: Node, spec: Spec) -> nn.Module:
    make = KINDS[node.kind]
    options = dict(node.options)
    if "time" in inspect.signature(make).parameters:
        options["time"] = spec.time
    if node.inner:
        options["inner"] = Chain([_build(one, spec) for one in node.inner])
    return make(spec.features, **options)


def build(spec: Spec) -> RandomModel:
    """The model, with the same weights each time."""
    torch.manual_seed(spec.seed)
    model = RandomModel(spec)
    return model.double() if spec.dtype == "float64" else model


def batches(spec: Spec, rank: int = 0) -> list[Batch]:
    """As many as the training takes."""
    generator = torch.Generator().manual_seed(spec.seed * 2 + rank)
    b, t, x = spec.batch, spec.time, spec.features
    dtype = torch.float64 if spec.dtype == "float64" else torch.float32

    def batch() -> Batch:
        labels = torch.randint(CLASSES, (b, t), generator=generator)
        labels[torch.rand(b, t, generator=generator) < 0.3] = -100
        labels[0, 0] = 1
        mask = (torch.rand(b, t, generator=generator) < 0.6).to(dtype)
        mask[0, 0] = 1
        return as_counted(
            Batch(
                torch.randn(b, t, x, generator=generator, dtype=dtype),
                torch.randint(TOKENS, (b, t), generator=generator),
                labels,
                torch.randint(1, t + 1, (b,), generator=generator),
                mask,
                torch.randn(b, t, x, generator=generator, dtype=dtype),
            )
        )

    def as_counted(batch: Batch) -> Batch:
        """In the first batch each sample has as much to count, in later ones some have, or none."""
        if spec.training.loss in COUNTS:
            some = torch.randint(0, b + 1, (), generator=generator) if batches else b
            batch.mask.zero_()[:some, 0] = 1
        batches.append(batch)
        return batch

    batches: list[Batch] = []
    return [batch() for _ in range(spec.training.steps * spec.training.accumulate)]
