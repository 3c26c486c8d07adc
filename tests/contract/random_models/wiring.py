"""Layers that have no weights of their own: views, in-place operations, detached paths, buffers, segments, branches."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from contract.random_models.layers import KINDS, Batch, Call, kind


def _plain(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    KINDS[function.__name__] = lambda x: Call(lambda self, v, _: function(v))
    return function


@_plain
def add_(v: Tensor) -> Tensor:
    v = v + 0.0
    v.add_(0.1)
    return v


@_plain
def slices(v: Tensor) -> Tensor:
    v = v.clone()
    v[:, 0] = v[:, -1] * 0.5
    v[..., 0] += 0.1
    return v


@_plain
def chunks(v: Tensor) -> Tensor:
    first, last = v.chunk(2, -1)
    return torch.cat([last.tanh(), first], -1)


@_plain
def unsafe_chunks(v: Tensor) -> Tensor:
    first, last = (v * 1.0).unsafe_chunk(2, -1)
    return torch.cat([first.sigmoid_(), last.tanh_()], -1)


@_plain
def unsafe_split(v: Tensor) -> Tensor:
    parts = (v * 1.0).unsafe_split(1, 1)
    return torch.cat([part.tanh_() for part in parts], 1)


@_plain
def partly_detached(v: Tensor) -> Tensor:
    first, last = v.chunk(2, -1)
    return torch.cat([first.detach(), last], -1)


@_plain
def without_gradient(v: Tensor) -> Tensor:
    with torch.no_grad():
        gate = v.sigmoid()
    return v * gate


@_plain
def reshaped(v: Tensor) -> Tensor:
    return v.transpose(1, 2).reshape(v.shape[0], -1).view(v.shape[0], v.shape[2], v.shape[1]).transpose(1, 2)


@_plain
def through_numpy(v: Tensor) -> Tensor:
    return v + torch.from_numpy(np.tanh(v.detach().double().numpy())).to(v.dtype)


KINDS |= {
    "masked": lambda x: Call(lambda self, v, _: v.clone().masked_fill_(v > 1.0, 1.0)),
    "unbound": lambda x: Call(lambda self, v, _: torch.stack([one.tanh() for one in v.unbind(1)], 1)),
    "expanded": lambda x: Call(lambda self, v, _: v - v.mean(1, keepdim=True).expand_as(v)),
    "rolled": lambda x: Call(lambda self, v, _: v.roll(1, 1).flip(2)),
    "detached": lambda x: Call(lambda self, v, _: v + 0.5 * v.detach()),
    "read_value": lambda x: Call(lambda self, v, _: v * (1.0 + 0.01 * float(v.detach().abs().mean().clamp(max=1.0)))),
    "cumulative": lambda x: Call(lambda self, v, _: v.cumsum(1) / 3),
    "over_samples": lambda x: Call(lambda self, v, _: v - v.mean(0, keepdim=True)),
    "tanh_": lambda x: Call(lambda self, v, _: v.tanh_()),
    "relu_": lambda x: Call(lambda self, v, _: v.relu_()),
    "mul_": lambda x: Call(lambda self, v, _: v.mul_(0.9)),
    # of two inputs
    "add": lambda x: Call(lambda self, a, b, _: a + b),
    "multiply": lambda x: Call(lambda self, a, b, _: a * b.tanh()),
    "joined": lambda x: Call(lambda self, a, b, _: self.module(torch.cat([a, b], -1)), module=nn.Linear(2 * x, x)),
    "largest": lambda x: Call(lambda self, a, b, _: torch.maximum(a, b)),
    "chosen": lambda x: Call(lambda self, a, b, batch: torch.where(batch.mask.unsqueeze(-1) > 0, a, b)),
    # around others
    "residual": lambda x, inner: Call(lambda self, v, batch: v + self.inner(v, batch), inner=inner),
    "own_function": lambda x: Call(lambda self, v, _: Cubed.apply(v.tanh())),
}


@kind
def counter(x: int) -> nn.Module:
    """A buffer that counts forward passes, and is not read."""
    call = Call(_count)
    call.register_buffer("calls", torch.zeros((), dtype=torch.long))
    return call


def _count(self: Any, v: Tensor, _: Batch) -> Tensor:
    if self.training:
        self.calls += 1
    return v


@kind
def running_mean(x: int) -> nn.Module:
    """A buffer that each forward pass changes and reads."""
    call = Call(_follow)
    call.register_buffer("mean", torch.zeros(x))
    return call


def _follow(self: Any, v: Tensor, _: Batch) -> Tensor:
    if self.training:
        with torch.no_grad():
            self.mean.mul_(0.9).add_(v.mean((0, 1)).to(self.mean.dtype), alpha=0.1)
    return v - self.mean


@kind
def constant(x: int) -> nn.Module:
    """A tensor that is no buffer."""
    call = Call(lambda self, v, _: v * self.gains.to(v.dtype))
    call.gains = torch.linspace(0.5, 1.5, x)
    return call


class Cubed(torch.autograd.Function):
    """A backward pass of one's own."""

    @staticmethod
    def forward(ctx: Any, v: Tensor) -> Tensor:
        ctx.save_for_backward(v)
        return v - v**3 / 6

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (v,) = ctx.saved_tensors
        return gradient * (1 - v**2 / 2)


@kind
def segment(x: int, inner: Any, reentrant: bool = False) -> nn.Module:
    return Call(
        lambda self, v, batch: (
            checkpoint(self.inner, v, batch, use_reentrant=reentrant)
            if self.training and torch.is_grad_enabled()
            else self.inner(v, batch)
        ),
        inner=inner,
    )


@kind
def every_other_step(x: int, inner: Any) -> nn.Module:
    """The layers inside run in every other step only."""
    return Call(lambda self, v, batch: self.inner(v, batch) if self.step % 2 == 0 else v.tanh(), inner=inner, step=0)


@kind
def by_value(x: int, inner: Any, bound: float = 0.03) -> nn.Module:
    """The layers inside run if the batch's values say so."""
    return Call(lambda self, v, batch: self.inner(v, batch) if v.mean() > bound else v.tanh(), inner=inner)


@kind
def without_gradient_of(x: int, inner: Any) -> nn.Module:
    """The layers inside as a teacher: they are run without gradients."""
    return Call(_teach, inner=inner)


def _teach(self: Any, v: Tensor, batch: Batch) -> Tensor:
    with torch.no_grad():
        hint = self.inner(v, batch)
    return v + 0.1 * hint
