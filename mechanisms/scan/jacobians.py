"""Local Jacobians of one recurrent layer, never formed unless a solver asks for them.

Shapes: ``T`` time steps, ``B`` batch, ``H`` hidden size, ``S`` state size (``H``, or ``2H`` for LSTM), ``K`` blocks.
States and gradients are row vectors, so ``J[t]^T v`` of the papers is the row ``v @ J[t]`` here.
"""

from abc import ABC, abstractmethod
from typing import Self

import torch
from torch import Tensor


class LocalJacobians(ABC):
    """``J[t] = d state[t] / d state[t-1]`` for every ``t``, as products with row vectors.

    Indexing the leading (time) dimension is part of the protocol: the batch dimensions after it are free, which lets
    ``folded`` treat the chunks of a sequence as one more batch dimension.
    """

    batch: tuple[int, ...]
    """Batch dimensions between time and state."""

    steps: int
    state: int

    @abstractmethod
    def step_mv(self, t: int, v: Tensor) -> Tensor:
        """``J[t]^T v`` for one vector a sequence.

        :param v: ``[*batch, S]``.
        :return: ``[*batch, S]``.
        """

    @abstractmethod
    def step_mm(self, t: int, rows: Tensor) -> Tensor:
        """``J[t]^T`` applied to each of ``R`` row vectors a sequence.

        :param rows: ``[*batch, R, S]``.
        :return: ``[*batch, R, S]``.
        """

    @abstractmethod
    def dense(self) -> Tensor:
        """Every ``J[t]`` written out: ``[T, *batch, S, S]``, rows are components of ``state[t]``."""

    @abstractmethod
    def narrow(self, start: int, steps: int) -> Self:
        """The Jacobians of ``steps`` time steps from ``start``, without a copy."""

    @abstractmethod
    def folded(self, chunk: int) -> Self:
        """Chunks of ``chunk`` steps side by side: ``T`` becomes ``chunk``, batch becomes ``(T / chunk, *batch)``."""

    def sweep(self, gradient: Tensor, entry: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """The recurrence ``v[t-1] = gradient[t-1] + J[t]^T v[t]``, one step after another.

        :param gradient: ``[T, *batch, S]``.
        :param entry: what reaches the last step from later ones: ``[*batch, S]``.
        :return: ``v`` as ``[T, *batch, S]``, and ``J[0]^T v[0]`` as ``[*batch, S]``.
        """
        carry = gradient[-1] if entry is None else gradient[-1] + entry
        states = [carry]
        for t in range(self.steps - 1, 0, -1):
            carry = gradient[t - 1] + self.step_mv(t, carry)
            states.append(carry)
        return torch.stack(states[::-1]), self.step_mv(0, carry)


class BlockJacobians(LocalJacobians):
    """``J[t] = sum_k diag(a[t, k]) M[k]``: every cell whose state is its output (RNN: one block; GRU: four).

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


def fold(series: Tensor, chunk: int) -> Tensor:
    """``[T, ...]`` as ``[chunk, T / chunk, ...]``: step within a chunk first, chunks become a batch. No copy."""
    return series.unflatten(0, (-1, chunk)).transpose(0, 1)


def unfold(series: Tensor) -> Tensor:
    """The inverse of :func:`fold`: ``[chunk, N, ...]`` as ``[N * chunk, ...]``."""
    return series.transpose(0, 1).flatten(0, 1)
