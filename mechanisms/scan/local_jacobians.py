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

        Args:
            v: ``[*batch, S]``.

        Returns:
            ``[*batch, S]``.
        """

    @abstractmethod
    def step_mm(self, t: int, rows: Tensor) -> Tensor:
        """``J[t]^T`` applied to each of ``R`` row vectors a sequence.

        Args:
            rows: ``[*batch, R, S]``.

        Returns:
            ``[*batch, R, S]``.
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

    def products(self, gradient: Tensor) -> Tensor:
        """The affine map of all steps together, ``v -> v J[T-1] ... J[0] + q``.

        Args:
            gradient: ``[T, *batch, S]``, added before each step.

        Returns:
            ``[*batch, S + 1, S]``: the matrix, and ``q`` as its last row.
        """
        rows = torch.eye(self.state, dtype=gradient.dtype, device=gradient.device).expand(*self.batch, -1, -1)
        sent = torch.zeros_like(gradient[0])
        rows = torch.cat([rows, sent.unsqueeze(-2)], dim=-2)
        for t in range(self.steps - 1, -1, -1):
            rows = torch.cat([rows[..., :-1, :], rows[..., -1:, :] + gradient[t].unsqueeze(-2)], dim=-2)
            rows = self.step_mm(t, rows)
        return rows

    def sweep(self, gradient: Tensor, entry: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """The recurrence ``v[t-1] = gradient[t-1] + J[t]^T v[t]``, one step after another.

        Args:
            gradient: ``[T, *batch, S]``.
            entry: what reaches the last step from later ones: ``[*batch, S]``.

        Returns:
            ``v`` as ``[T, *batch, S]``, and ``J[0]^T v[0]`` as ``[*batch, S]``.
        """
        carry = gradient[-1] if entry is None else gradient[-1] + entry
        states = [carry]
        for t in range(self.steps - 1, 0, -1):
            carry = gradient[t - 1] + self.step_mv(t, carry)
            states.append(carry)
        return torch.stack(states[::-1]), self.step_mv(0, carry)


def fold(series: Tensor, chunk: int) -> Tensor:
    """``[T, ...]`` as ``[chunk, T / chunk, ...]``: step within a chunk first, chunks become a batch. No copy."""
    length, *rest = series.shape
    return series.reshape(length // chunk, chunk, *rest).transpose(0, 1)


def unfold(series: Tensor) -> Tensor:
    """The inverse of :func:`fold`: ``[chunk, N, ...]`` as ``[N * chunk, ...]``."""
    return series.transpose(0, 1).flatten(0, 1)
