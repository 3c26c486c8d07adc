"""Small random models, and how each is trained: what `test_deferral_random.py` compares with plain autograd."""

import random
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

WIDTH = 8


class Scaled(torch.autograd.Function):
    """Computes both gradients whatever is asked of it, and takes missing ones for zeros."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x * weight

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        return gradient * weight, (gradient * x).sum(0)


class OwnFunction(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(WIDTH) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        return Scaled.apply(x, self.weight)


class Matrix(nn.Module):
    """A weight of its own; ``how`` says what the layer does with it."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / 3)
        self.calls = 0
        self.register_buffer("keys", torch.randn(1, 1, WIDTH, WIDTH))
        self.loss = self.kept = torch.zeros(())

    def forward(self, x: Tensor, other: Tensor | None = None) -> Any:
        self.calls += 1
        how = self.how
        if how == "saves its output":
            return torch.tanh(x @ self.weight)
        if how == "reads twice":
            return x * (x @ self.weight).sigmoid()
        if how == "writes into its input":
            return x.add_(0.5) @ self.weight
        if how == "returns its input":
            return (x, x @ self.weight)
        if how == "returns a view of its input":
            return (x.view(-1, 2, WIDTH // 2), x @ self.weight)
        if how == "overlapping outputs":
            y = x @ self.weight
            return (y, y[:, 2:])
        if how == "sometimes twice":
            return x @ self.weight if self.calls % 3 else x * (x @ self.weight)
        if how == "sometimes not":
            return x @ self.weight if self.calls % 3 else x * 2
        if how == "ignores an input":
            return x @ self.weight
        if how == "two outputs":
            return (x @ self.weight, other.mul(2) if other is not None else x)
        if how == "power":  # saves its output
            return x.abs().add(0.1).pow(self.weight.sum(0).abs())
        if how == "keys":  # saves its output
            return nn.functional.scaled_dot_product_attention(x[None, None], self.weight[None, None], self.keys)[0, 0]
        if how == "keeps a loss":
            y = x @ self.weight
            self.loss = y.sin().mean()
            return y
        if how == "keeps its output":
            y = self.kept = x @ self.weight
            return y
        if how == "only its weight":
            return self.weight.sin()
        return self.weight  # "its weight itself"


HOWS = ("saves its output", "reads twice", "writes into its input", "returns its input", "returns a view of its input",
        "overlapping outputs", "sometimes twice", "sometimes not", "ignores an input", "two outputs",
        "only its weight", "its weight itself", "power", "keys", "keeps a loss", "keeps its output")  # fmt: skip


def frozen_part(module: nn.Module, rng: random.Random) -> nn.Module:
    """Freeze none, one or all of a module's parameters."""
    parameters = list(module.parameters())
    choice = rng.random()
    if parameters and choice < 0.25:
        rng.choice(parameters).requires_grad_(False)
    elif choice < 0.35:
        module.requires_grad_(False)
    return module


Op = Callable[[list[Tensor], int], None]


class RandomModel(nn.Module):
    """A chain of operations on (B, WIDTH) tensors; each reads earlier ones and appends its result."""

    def __init__(self, seed: int, operations: list[int] | None = None) -> None:
        super().__init__()
        rng = random.Random(seed)
        torch.manual_seed(seed)
        self.parts = nn.ModuleList()
        self.ops: list[tuple[str, Op]] = []
        makers = [self.plain, self.plain, self.image, self.recurrent, self.cell, self.attention, self.embedding,
                  self.matrix, self.matrix, self.elementwise, self.elementwise, self.in_place, self.again, self.tied,
                  self.outside, self.detached, self.unused, self.checkpointed, self.conditional, self.normed,
                  self.bilinear, self.multi]  # fmt: skip
        count = rng.randint(3, 9)
        for number in range(count):
            one = random.Random(rng.random())
            name, op = one.choice(makers)(one)
            if operations is None or number in operations:
                self.ops.append((name, op))
        self.head = nn.Linear(WIDTH, 3)
        self.residual = rng.random() < 0.5

    def add(self, module: nn.Module, rng: random.Random) -> Any:
        self.parts.append(frozen_part(module, rng))
        return module

    def pick(self, rng: random.Random) -> Callable[[list[Tensor]], Tensor]:
        back = 1 if rng.random() < 0.6 else rng.randint(1, 4)
        return lambda seen: seen[max(0, len(seen) - back)]

    def through(self, name: str, call: Callable[[Tensor], Tensor], rng: random.Random) -> tuple[str, Op]:
        pick, residual = self.pick(rng), rng.random() < 0.3

        def op(seen: list[Tensor], step: int) -> None:
            x = pick(seen)
            y = call(x)
            seen.append(x + y if residual else y)

        return name + (" residual" if residual else ""), op

    def plain(self, rng: random.Random) -> tuple[str, Op]:
        make = rng.choice([
            lambda: nn.Linear(WIDTH, WIDTH), lambda: nn.Linear(WIDTH, WIDTH, bias=False), lambda: nn.LayerNorm(WIDTH),
            lambda: nn.BatchNorm1d(WIDTH), lambda: nn.GroupNorm(2, WIDTH), lambda: nn.PReLU(), OwnFunction,
            lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.2)), lambda: nn.RMSNorm(WIDTH),
        ])  # fmt: skip
        module = self.add(make(), rng)
        return self.through(repr(module), module, rng)

    def image(self, rng: random.Random) -> tuple[str, Op]:
        module = self.add(rng.choice([
            lambda: nn.Conv1d(2, 2, 3, padding=1), lambda: nn.Conv1d(2, 2, 3, padding=1, groups=2),
            lambda: nn.ConvTranspose1d(2, 2, 3, padding=1),
        ])(), rng)  # fmt: skip
        return self.through(repr(module), lambda x: module(x.reshape(-1, 2, WIDTH // 2)).flatten(1), rng)

    def recurrent(self, rng: random.Random) -> tuple[str, Op]:
        module = self.add(rng.choice([nn.RNN, nn.GRU, nn.LSTM])(2, 2, batch_first=True), rng)
        return self.through(repr(module), lambda x: module(x.reshape(-1, WIDTH // 2, 2))[0].flatten(1), rng)

    def cell(self, rng: random.Random) -> tuple[str, Op]:
        module = self.add(rng.choice([nn.RNNCell, nn.GRUCell, nn.LSTMCell])(WIDTH, WIDTH), rng)

        def call(x: Tensor) -> Tensor:
            h = module(x)
            h = module(x, h)
            return h[0] if isinstance(h, tuple) else h

        return self.through(repr(module), call, rng)

    def attention(self, rng: random.Random) -> tuple[str, Op]:
        if rng.random() < 0.5:
            module = self.add(nn.MultiheadAttention(2, 1, batch_first=True), rng)
            return self.through("MultiheadAttention", lambda x: self_attend(module, x), rng)
        module = self.add(nn.TransformerEncoderLayer(2, 1, 4, dropout=0.1, batch_first=True), rng)
        return self.through("EncoderLayer", lambda x: module(x.reshape(-1, WIDTH // 2, 2)).flatten(1), rng)

    def embedding(self, rng: random.Random) -> tuple[str, Op]:
        module = self.add(nn.Embedding(6, WIDTH, sparse=rng.random() < 0.3), rng)
        return self.through(repr(module), lambda x: module(x.detach().argmax(1) % 6), rng)

    def matrix(self, rng: random.Random) -> tuple[str, Op]:
        how = rng.choice(HOWS)
        module = self.add(Matrix(how), rng)
        second, in_place = self.pick(rng), rng.random() < 0.3

        def call(x: Tensor) -> Tensor:
            if how == "writes into its input":
                return module(x * 1.5)
            if how in ("only its weight", "its weight itself"):
                return x @ module(x)
            if how in ("ignores an input", "two outputs"):
                y = module(x, torch.sin(x))
                return y[0] if isinstance(y, tuple) else y
            y = module(x * 1.0)
            if isinstance(y, tuple):
                a, b = y
                if in_place:
                    b = b.mul_(2)
                return a.flatten(1) + (b if b.shape[1] == WIDTH else b.sum(1, keepdim=True))
            return y.mul_(2) if in_place else y

        del second
        return self.through(f"Matrix({how}{', then in place' if in_place else ''})", call, rng)

    def elementwise(self, rng: random.Random) -> tuple[str, Op]:
        name = rng.choice(["relu", "tanh", "gelu", "softmax"])
        call: Any = {"relu": torch.relu, "tanh": torch.tanh, "gelu": nn.functional.gelu,
                     "softmax": lambda x: x.softmax(1)}[name]  # fmt: skip
        return self.through(name, call, rng)

    def in_place(self, rng: random.Random) -> tuple[str, Op]:
        name = rng.choice(["relu_", "mul_", "slice"])

        def op(seen: list[Tensor], step: int) -> None:
            if len(seen) < 2:
                return
            if name == "relu_":
                seen[-1] = seen[-1].relu_()
            elif name == "mul_":
                seen[-1] = seen[-1].mul_(0.5)
            else:
                seen[-1][:, :2] *= 2

        return name, op

    def again(self, rng: random.Random) -> tuple[str, Op]:
        which, times = rng.random(), rng.randint(1, 3)

        def call(x: Tensor) -> Tensor:
            fit = [m for m in self.parts if isinstance(m, nn.Linear | nn.LayerNorm | OwnFunction)]
            for _ in range(times if fit else 0):
                x = fit[int(which * len(fit))](x)
            return x * 1.0

        return self.through(f"again x{times}", call, rng)

    def tied(self, rng: random.Random) -> tuple[str, Op]:
        module = nn.Linear(WIDTH, WIDTH)
        fit = [m for m in self.parts if isinstance(m, nn.Linear) and "weight" in m._parameters]
        if fit:
            module.weight = rng.choice(fit).weight
        self.add(module, rng)
        return self.through("tied linear", module, rng)

    def outside(self, rng: random.Random) -> tuple[str, Op]:
        which, start = rng.random(), rng.choice([0, 0, 3])

        def op(seen: list[Tensor], step: int) -> None:
            fit = [m for m in self.parts if isinstance(m, nn.Linear)]
            if fit and step >= start:
                seen.append(seen[-1] @ fit[int(which * len(fit))].weight)

        return f"weight read outside from step {start}", op

    def detached(self, rng: random.Random) -> tuple[str, Op]:
        module = self.add(nn.Linear(WIDTH, WIDTH), rng)
        how = rng.choice(["input", "output", "no_grad"])

        def call(x: Tensor) -> Tensor:
            if how == "input":
                return module(x.detach())
            if how == "output":
                return module(x).detach() + x
            with torch.no_grad():
                return module(x)

        return self.through(f"detached {how}", call, rng)

    def unused(self, rng: random.Random) -> tuple[str, Op]:
        module = self.add(nn.Linear(WIDTH, WIDTH), rng)
        called, pick = rng.random() < 0.6, self.pick(rng)

        def op(seen: list[Tensor], step: int) -> None:
            if called:
                module(pick(seen))

        return f"unused, called={called}", op

    def checkpointed(self, rng: random.Random) -> tuple[str, Op]:
        module = self.add(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)), rng)
        return self.through("checkpoint", lambda x: checkpoint(module, x, use_reentrant=False), rng)

    def conditional(self, rng: random.Random) -> tuple[str, Op]:
        a, b = (self.add(nn.Linear(WIDTH, WIDTH), rng) for _ in range(2))
        pick, every = self.pick(rng), rng.randint(2, 3)

        def op(seen: list[Tensor], step: int) -> None:
            x = pick(seen)
            seen.append(a(x) if step % every else b(a(x)))

        return "conditional", op

    def normed(self, rng: random.Random) -> tuple[str, Op]:
        wrap = rng.choice([parametrizations.weight_norm, parametrizations.spectral_norm, parametrizations.orthogonal])
        module = self.add(wrap(nn.Linear(WIDTH, WIDTH)), rng)
        return self.through(wrap.__name__, module, rng)

    def bilinear(self, rng: random.Random) -> tuple[str, Op]:
        module = self.add(nn.Bilinear(WIDTH, WIDTH, WIDTH), rng)
        pick = self.pick(rng)

        def op(seen: list[Tensor], step: int) -> None:
            seen.append(module(seen[-1], pick(seen)))

        return "bilinear", op

    def multi(self, rng: random.Random) -> tuple[str, Op]:
        module = self.add(nn.Linear(WIDTH, 3 * WIDTH), rng)
        used = rng.sample(range(3), rng.randint(1, 3))

        def call(x: Tensor) -> Tensor:
            chunks = module(x).chunk(3, 1)
            return sum((chunks[i] for i in used), torch.zeros(()))

        return self.through(f"chunks {used}", call, rng)

    def losses(self) -> Tensor:
        """What layers keep for the loss, as their attributes."""
        kept = [m.loss + m.kept.mean() for m in self.modules() if isinstance(m, Matrix)]
        for module in self.modules():
            if isinstance(module, Matrix):
                module.loss = module.kept = torch.zeros(())
        return sum(kept, torch.zeros(()))

    def forward(self, x: Tensor, step: int) -> Tensor:
        seen = [x]
        for _, op in self.ops:
            op(seen, step)
        y = seen[-1] + seen[len(seen) // 2] if self.residual and len(seen) > 2 else seen[-1]
        return self.head(y)


def self_attend(module: nn.MultiheadAttention, x: Tensor) -> Tensor:
    q = x.reshape(-1, WIDTH // 2, 2)
    return module(q, q, q, need_weights=False)[0].flatten(1)
