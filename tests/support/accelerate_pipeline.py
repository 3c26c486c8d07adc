"""A model and its data for pipelines in Accelerate loops."""

from typing import Any

import torch
from accelerate.state import AcceleratorState, GradientState
from torch import Tensor, nn
from torch.utils.data import TensorDataset

WIDTH, BATCH, BATCHES, ACCUMULATED = 96, 8, 8, 2


class Net(nn.Module):
    """Six equal layers between an embedding and a head that share their weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(13, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(6))
        self.head = nn.Linear(WIDTH, 13)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.tensor(1.0))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.head(x) * self.scale


def net(seed: int = 0) -> Net:
    torch.manual_seed(seed)
    return Net()


def loss_of(model: nn.Module) -> Any:
    return lambda part: nn.functional.cross_entropy(model(part[0]), part[1])


def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, 13, (2, BATCH * BATCHES), generator=generator)
    return TensorDataset(tokens[0], tokens[1])


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def schedule_of(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)


def forget_state() -> None:
    """As in a new process: Accelerate keeps its device, mixed precision and accumulation."""
    AcceleratorState._reset_state(True)
    GradientState._reset_state()


def close(ours: Any, plain: Any) -> None:
    torch.testing.assert_close(ours, plain, rtol=2e-4, atol=2e-5)
