"""Steps whose memory is traced: convolutions, a recurrent network, and tied weights."""

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from retime.mechanisms.memory_budget.dry_run.run import TrainingStep

SAMPLES = 8


def convolutions(norm: bool = True) -> nn.Module:
    layers: list[nn.Module] = [nn.Conv2d(3, 8, 3, padding=1)]
    for _ in range(3):
        layers += [*([nn.BatchNorm2d(8)] if norm else []), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.GRU(4, 8, batch_first=True)
        self.head = nn.Linear(8, 5)

    def forward(self, values: Tensor) -> Tensor:
        return self.head(self.rnn(values)[0][:, -1])


class Reads(nn.Module):
    """Reads a value of what it is given, where no dry run can follow."""

    def forward(self, values: Tensor) -> Tensor:
        return values * values.abs().max().item()


class Tied(nn.Module):
    """One embedding at both ends, a skip connection, dropout and attention."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 16)
        self.block = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.block(self.embedding(tokens))
        return (hidden @ self.embedding.weight.t())[:, 0, :5]


MODELS = {
    "convolutions": (convolutions, lambda: torch.randn(SAMPLES, 3, 16, 16)),
    "recurrent": (Recurrent, lambda: torch.randn(SAMPLES, 6, 4)),
    "tied": (Tied, lambda: torch.randint(0, 11, (SAMPLES, 12))),
}


def step_of(name: str, optimizer: str = "Adam", **options: object) -> TrainingStep:
    torch.manual_seed(0)
    make, inputs = MODELS[name]
    model = make()
    batch = inputs(), torch.randint(0, 5, (SAMPLES,))
    kind = getattr(torch.optim, optimizer)(model.parameters(), lr=0.1)
    return TrainingStep(model, batch, SAMPLES, lambda b: cross_entropy(model(b[0]), b[1]), [kind], **options)
