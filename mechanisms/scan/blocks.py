"""Jacobians that are a sum of diagonal matrices times constant ones: cells whose state is their output."""

from typing import Self

import torch
from torch import Tensor

from retime.mechanisms.scan.jacobians import LocalJacobians, fold


class BlockJacobians(LocalJacobians):
    """``J[t] = sum_k diag(a[t, k]) M[k]``: one block for an RNN, four for a GRU.

    One elementwise and one matrix product a step, whatever the number of blocks. While gradients of the result are not
    asked for, both write into buffers made once: on a CPU a step costs little more than the two calls.

    :param scale: ``a``: ``[T, *batch, K, H]``.
    :param matrix: the blocks ``M[k]`` under one another: ``[K * H, H]``.
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
        row = product.view(-1, width)
        scales, matrix = self.scale.unbind(0), self.matrix
        gradients = gradient.reshape(self.steps, -1, self.state).unbind(0)
        wide, flat = v.unsqueeze(-2).unbind(0), v.view(self.steps, -1, self.state).unbind(0)
        if entry is None:
            v[-1] = gradient[-1]
        else:
            torch.add(gradient[-1], entry, out=v[-1])
        for t in range(self.steps - 1, 0, -1):
            torch.mul(scales[t], wide[t], out=product)
            torch.addmm(gradients[t - 1], row, matrix, out=flat[t - 1])
        torch.mul(scales[0], wide[0], out=product)
        return v, (row @ matrix).view(*self.batch, self.state)

    def products(self, gradient: Tensor) -> Tensor:
        if torch.is_grad_enabled():
            return super().products(gradient)
        rows = gradient.new_empty(*self.batch, self.state + 1, self.state)
        flat, wide, sent = rows.view(-1, self.state), rows.unsqueeze(-2), rows[..., -1, :]
        product = gradient.new_empty(*self.batch, self.state + 1, self.blocks, self.state)
        row = product.view(-1, self.blocks * self.state)
        scales, gradients = self.scale.unsqueeze(-3).unbind(0), gradient.unbind(0)
        rows[..., :-1, :] = torch.eye(self.state, dtype=rows.dtype, device=rows.device)
        sent.copy_(gradients[-1])
        for t in range(self.steps - 1, -1, -1):
            if t < self.steps - 1:
                sent.add_(gradients[t])
            torch.mul(scales[t], wide, out=product)
            torch.mm(row, self.matrix, out=flat)
        return rows
