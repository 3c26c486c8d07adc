"""The LSTM cell of torch.nn: its state is the pair (h, c), so Jacobians are ``2H x 2H``."""

from typing import Self

import torch
from torch import Tensor

from retime.mechanisms.scan.cells import GateGradients, LocalCell, Weights, gate_products
from retime.mechanisms.scan.diagonal import diagonal_scan
from retime.mechanisms.scan.local_jacobians import LocalJacobians, fold


class LSTMJacobians(LocalJacobians):
    """With ``s = vc + vh o (1 - tanh^2 c)``: ``vc' = f s`` and ``vh' = [i' s, f' s, g' s, o' vh] W_hh``.

    Args:
        through: ``o (1 - tanh^2 c)``: ``[T, *batch, H]``.
        forget: ``f``: ``[T, *batch, H]``.
        scale: derivatives of i, f, g with respect to c, and of o with respect to h, each times its gate's slope:
            ``[T, *batch, 4, H]``.
        matrix: ``weight_hh``: ``[4 * H, H]``.
    """

    def __init__(self, through: Tensor, forget: Tensor, scale: Tensor, matrix: Tensor) -> None:
        self.through = through
        self.forget = forget
        self.scale = scale
        self.matrix = matrix
        self.steps = scale.shape[0]
        self.batch = tuple(scale.shape[1:-2])
        self.hidden = scale.shape[-1]
        self.state = 2 * self.hidden

    def step_mv(self, t: int, v: Tensor) -> Tensor:
        return self._step(v, self.through[t], self.forget[t], self.scale[t])

    def step_mm(self, t: int, rows: Tensor) -> Tensor:
        return self._step(
            rows, self.through[t].unsqueeze(-2), self.forget[t].unsqueeze(-2), self.scale[t].unsqueeze(-3)
        )

    def _step(self, v: Tensor, through: Tensor, forget: Tensor, scale: Tensor) -> Tensor:
        gates = self.gates(v, through, scale)
        cell = v[..., self.hidden :] + v[..., : self.hidden] * through
        return torch.cat([gates.flatten(-2) @ self.matrix, forget * cell], dim=-1)

    def gates(self, v: Tensor, through: Tensor, scale: Tensor) -> Tensor:
        """Gradients of the four gates' products: ``[..., 4, H]``."""
        output = v[..., : self.hidden]
        cell = (v[..., self.hidden :] + output * through).unsqueeze(-2)
        return torch.cat([cell.expand(*cell.shape[:-2], 3, self.hidden), output.unsqueeze(-2)], dim=-2) * scale

    def dense(self) -> Tensor:
        eye = torch.eye(self.state, dtype=self.scale.dtype, device=self.scale.device)
        eye = eye.expand(self.steps, *self.batch, self.state, self.state)
        return self._step(eye, self.through.unsqueeze(-2), self.forget.unsqueeze(-2), self.scale.unsqueeze(-3))

    def narrow(self, start: int, steps: int) -> Self:
        through, forget, scale = (part.narrow(0, start, steps) for part in (self.through, self.forget, self.scale))
        return type(self)(through, forget, scale, self.matrix)

    def folded(self, chunk: int) -> Self:
        through, forget, scale = (fold(part, chunk) for part in (self.through, self.forget, self.scale))
        return type(self)(through, forget, scale, self.matrix)


class LocalLSTM(LocalCell):
    """Gates are recomputed in one product for all steps; ``c`` by a scan of ``c[t] = f c[t-1] + i g``.

    Args:
        x: ``[T, B, I]``.
        before: ``h[t-1]``: ``[T, B, H]``.
        first_cell: ``c0``: ``[B, H]``.
        mask: ``[T, B, 1]``, zero where a shorter sequence has ended. None: all have the same length.
    """

    jacobians: LSTMJacobians

    def __init__(
        self, x: Tensor, before: Tensor, first_cell: Tensor, weights: Weights, mask: Tensor | None = None
    ) -> None:
        from_input = gate_products(x, weights.input, weights.input_bias, gates=4)
        from_hidden = gate_products(before, weights.hidden, weights.hidden_bias, gates=4)
        i, f, g, o = (a + b for a, b in zip(from_input, from_hidden, strict=True))
        i, f, g, o = torch.sigmoid(i), torch.sigmoid(f), torch.tanh(g), torch.sigmoid(o)
        cell = diagonal_scan(f, i * g, first_cell)
        cell_before = torch.cat([first_cell.unsqueeze(0), cell[:-1]])
        squashed = torch.tanh(cell)
        through = o * (1 - squashed * squashed)
        scale = torch.stack(
            [g * (i * (1 - i)), cell_before * (f * (1 - f)), i * (1 - g * g), squashed * (o * (1 - o))], dim=-2
        )
        if mask is not None:
            f, through, scale = f * mask, through * mask, scale * mask.unsqueeze(-1)
        self.jacobians = LSTMJacobians(through, f, scale, weights.hidden)

    def gate_gradients(self, v: Tensor) -> GateGradients:
        gradient = self.jacobians.gates(v, self.jacobians.through, self.jacobians.scale).unbind(-2)
        return GateGradients(gradient, gradient)
