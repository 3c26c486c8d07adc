"""Jacobians that are a sum of diagonal matrices times constant ones: cells whose state is their output."""

import math
from typing import Self

import torch
from torch import Tensor

from retime.mechanisms.scan.local_jacobians import LocalJacobians, fold

STEPS_OF_VIEWS = 64
"""A sweep makes seven Python objects a step for so many steps at once: more would live through Python's first garbage
collection, and many of those bring about full ones, which cost as much as the sweep itself."""


class BlockJacobians(LocalJacobians):
    """``J[t] = sum_k diag(a[t, k]) M[k]``: one block for an RNN, four for a GRU.

    One elementwise and one matrix product a step, whatever the number of blocks. While gradients of the result are not
    asked for, both write into buffers made once: on a CPU a step costs little more than the two calls.

    Args:
        scale: ``a``: ``[T, *batch, K, H]``.
        matrix: the blocks ``M[k]`` under one another: ``[K * H, H]``.
    """

    def __init__(self, scale: Tensor, matrix: Tensor) -> None:
        self.scale = scale
        self.matrix = matrix
        self.steps = scale.shape[0]
        self.batch = tuple(scale.shape[1:-2])
        self.blocks, self.state = scale.shape[-2:]

    def step_mv(self, t: int, v: Tensor) -> Tensor:
        return (self.scale[t] * v.unsqueeze(-2)).flatten(-2) @ self.matrix

    def step_mm(self, t: int, rows: Tensor) -> Tensor:
        return (self.scale[t].unsqueeze(-3) * rows.unsqueeze(-2)).flatten(-2) @ self.matrix

    def dense(self) -> Tensor:
        blocks = self.matrix.view(self.blocks, self.state, self.state)
        total = self.scale[..., 0, :].unsqueeze(-1) * blocks[0]
        for k in range(1, self.blocks):
            total = torch.addcmul(total, self.scale[..., k, :].unsqueeze(-1), blocks[k])
        return total

    def narrow(self, start: int, steps: int) -> Self:
        return type(self)(self.scale.narrow(0, start, steps), self.matrix)

    def folded(self, chunk: int) -> Self:
        return type(self)(fold(self.scale, chunk), self.matrix)

    def sweep(self, gradient: Tensor, entry: Tensor | None = None) -> tuple[Tensor, Tensor]:
        if torch.is_grad_enabled():
            return super().sweep(gradient, entry)
        width = self.blocks * self.state
        v = gradient.new_empty(gradient.shape)
        product = gradient.new_empty(*self.batch, self.blocks, self.state)
        row, matrix = product.view(-1, width), self.matrix
        gradients = gradient.reshape(self.steps, -1, self.state)
        wide, flat = v.unsqueeze(-2), v.view(self.steps, -1, self.state)
        if entry is None:
            v[-1] = gradient[-1]
        else:
            torch.add(gradient[-1], entry, out=v[-1])
        for stop in range(self.steps, 1, -STEPS_OF_VIEWS):
            start = max(1, stop - STEPS_OF_VIEWS)
            later = zip(self.scale[start:stop].unbind(0), wide[start:stop].unbind(0), strict=True)
            sooner = zip(gradients[start - 1 : stop - 1].unbind(0), flat[start - 1 : stop - 1].unbind(0), strict=True)
            for (scale, known), (sent, found) in reversed([*zip(later, sooner, strict=True)]):
                torch.mul(scale, known, out=product)
                torch.addmm(sent, row, matrix, out=found)
        torch.mul(self.scale[0], wide[0], out=product)
        return v, (row @ matrix).view(*self.batch, self.state)

    def products(self, gradient: Tensor) -> Tensor:
        """As the base class says. Sequences are the last, contiguous dimension inside: vector units then fill up
        however small ``H`` is."""
        if torch.is_grad_enabled():
            return super().products(gradient)
        state, count = self.state, math.prod(self.batch)
        scales = _last(self.scale, self.batch).view(self.steps, self.blocks, state, 1, count).unbind(0)
        sent = _last(gradient, self.batch).unbind(0)
        columns = gradient.new_zeros(state, state + 1, count)
        columns[:, :-1].diagonal().fill_(1)
        product = gradient.new_empty(self.blocks, *columns.shape)
        last, flat, stacked = columns[:, -1], columns.view(state, -1), product.view(self.blocks * state, -1)
        matrix = self.matrix.t()
        for t in range(self.steps - 1, -1, -1):
            last.add_(sent[t])
            torch.mul(scales[t], columns, out=product)
            torch.mm(matrix, stacked, out=flat)
        rows = columns.view(-1, count).t().contiguous().view(*self.batch[1:], -1, state, state + 1)
        return rows.movedim(-3, 0).transpose(-1, -2)


def _last(series: Tensor, batch: tuple[int, ...]) -> Tensor:
    """``[T, N, *rest, *features]`` as ``[T, features, rest * N]``, in two copies that both run along memory.

    Args:
        batch: ``(N, *rest)``; a folded series has its chunks as ``N``, and their steps lie behind one another.
    """
    steps, chunks = series.shape[0], batch[0]
    turned = series.transpose(0, 1).reshape(chunks, -1).t().contiguous()
    rest = math.prod(batch[1:])
    return turned.view(steps, rest, -1, chunks).transpose(1, 2).reshape(steps, -1, rest * chunks)
