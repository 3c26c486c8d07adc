"""Layers of torch.nn and the same layers by scan, on the same tensors."""

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from retime.mechanisms.scan import Solver, scan_bidirectional, scan_layer

MODES = ("RNN_TANH", "RNN_RELU", "GRU", "LSTM")
SOLVERS = ("sequential", "chunk", "chunk:4", "blelloch", "truncated:2")


def make_net(mode: str, inputs: int, hidden: int, **options: object) -> nn.RNNBase:
    if mode.startswith("RNN"):
        return nn.RNN(inputs, hidden, nonlinearity=mode[4:].lower(), **options)  # type: ignore[arg-type]
    return (nn.GRU if mode == "GRU" else nn.LSTM)(inputs, hidden, **options)  # type: ignore[arg-type]


@dataclass
class Case:
    """One layer with its inputs; ``D`` directions."""

    mode: str
    net: nn.RNNBase
    x: Tensor
    state: tuple[Tensor, ...]

    @property
    def leaves(self) -> list[Tensor]:
        return [self.x, *self.state, *self.net.parameters()]

    def to(self, where: Any) -> "Case":
        """The same values, as leaves of their own, on a device or in a dtype."""
        x, *state = (part.detach().to(where).requires_grad_() for part in (self.x, *self.state))
        return Case(self.mode, copy.deepcopy(self.net).to(where), x, tuple(state))

    def native(self) -> list[Tensor]:
        output, last = self.net(self.x, self.state if self.mode == "LSTM" else self.state[0])
        return [output, *(last if self.mode == "LSTM" else (last,))]

    def scan(self, solver: str | Solver, batch_sizes: Tensor | None = None) -> list[Tensor]:
        return self.scan_of(self.x, solver, batch_sizes)

    def scan_of(self, x: Tensor, solver: str | Solver, batch_sizes: Tensor | None = None) -> list[Tensor]:
        weights = list(self.net.parameters())
        if self.net.bidirectional:
            hx = self.state if self.mode == "LSTM" else self.state[0]
            return list(
                scan_bidirectional(
                    self.mode, x, hx, tuple(weights[:4]), tuple(weights[4:]), solver=solver, batch_sizes=batch_sizes
                )
            )
        first = tuple(part[0] for part in self.state)
        output, *last = scan_layer(
            self.mode, x, first if self.mode == "LSTM" else first[0], *weights, solver=solver, batch_sizes=batch_sizes
        )
        return [output, *(part.unsqueeze(0) for part in last)]


def make_case(
    mode: str,
    steps: int = 7,
    batch: int = 2,
    hidden: int = 3,
    inputs: int = 2,
    dtype: torch.dtype = torch.float64,
    **options: object,
) -> Case:
    torch.manual_seed(steps * 100 + hidden)
    net = make_net(mode, inputs, hidden, **options).to(dtype)
    directions = 2 if net.bidirectional else 1
    x = torch.randn(steps, batch, inputs, dtype=dtype, requires_grad=True)
    state = tuple(
        torch.randn(directions, batch, hidden, dtype=dtype, requires_grad=True) for _ in range(1 + (mode == "LSTM"))
    )
    return Case(mode, net, x, state)


def gradients(outputs: list[Tensor], leaves: list[Tensor], seed: int = 0) -> list[Tensor]:
    """Of a random direction through all outputs."""
    generator = torch.Generator().manual_seed(seed)
    sent = [torch.randn(part.shape, generator=generator, dtype=torch.float64).to(part.dtype) for part in outputs]
    return list(torch.autograd.grad(outputs, leaves, sent))


def worst_error(found: list[Tensor], truth: list[Tensor]) -> float:
    """The largest error of a tensor, relative to that tensor's largest number."""
    return max(
        float((a.double() - b.double()).abs().max() / b.double().abs().max().clamp_min(1e-300))
        for a, b in zip(found, truth, strict=True)
    )


class CountOps(TorchDispatchMode):
    """Counts what reaches the device, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: dict[str, int] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        name = func.overloadpacket.__name__
        self.counts[name] = self.counts.get(name, 0) + 1
        return func(*args, **(kwargs or {}))

    @property
    def products(self) -> int:
        return sum(self.counts.get(name, 0) for name in ("mm", "addmm", "bmm", "baddbmm", "mv", "addmv"))
