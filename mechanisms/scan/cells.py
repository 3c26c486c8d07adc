"""What a recurrent cell must say about itself, and the cells of torch.nn."""

import math
from abc import ABC, abstractmethod
from typing import NamedTuple, Self

import torch
from torch import Tensor

# Local Jacobians of one recurrent layer, never formed unless a solver asks for them.
#
# Shapes: ``T`` time steps, ``B`` batch, ``H`` hidden size, ``S`` state size (``H``, or ``2H`` for LSTM), ``K`` blocks.
# States and gradients are row vectors, so ``J[t]^T v`` of the papers is the row ``v @ J[t]`` here.


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


# Jacobians that are a sum of diagonal matrices times constant ones: cells whose state is their output.

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
            for (scale, adjoint), (sent, out) in reversed([*zip(later, sooner, strict=True)]):
                torch.mul(scale, adjoint, out=product)
                torch.addmm(sent, row, matrix, out=out)
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


# The elementwise affine scan ``c[t] = a[t] c[t-1] + b[t]`` that rebuilds LSTM's cell states.


def diagonal_scan(a: Tensor, b: Tensor, first: Tensor) -> Tensor:
    """Two levels of about ``sqrt(T)`` steps. Differentiable.

    Args:
        a: ``[T, B, H]``, between 0 and 1, so that no product of it overflows.
        b: ``[T, B, H]``.
        first: ``c[-1]``: ``[B, H]``.

    Returns:
        ``c``: ``[T, B, H]``.
    """
    steps = a.shape[0]
    chunk = max(1, math.isqrt(steps))
    whole = steps // chunk * chunk
    decay: list[Tensor] = []
    within: list[Tensor] = []
    for a_t, b_t in zip(fold(a[:whole], chunk), fold(b[:whole], chunk), strict=True):
        decay.append(a_t * decay[-1] if decay else a_t)
        within.append(torch.addcmul(b_t, a_t, within[-1]) if within else b_t)
    carry, entries = first, []
    for decay_k, within_k in zip(decay[-1], within[-1], strict=True):
        entries.append(carry)
        carry = torch.addcmul(within_k, decay_k, carry)
    cells = unfold(torch.addcmul(torch.stack(within), torch.stack(decay), torch.stack(entries)))
    rest = []
    for a_t, b_t in zip(a[whole:], b[whole:], strict=True):
        carry = torch.addcmul(b_t, a_t, carry)
        rest.append(carry)
    return torch.cat([cells, torch.stack(rest)]) if rest else cells


class Weights(NamedTuple):
    """One layer and direction. ``G`` is 1 (RNN), 3 (GRU) or 4 (LSTM); gates in torch.nn's order."""

    input: Tensor
    """``weight_ih``: ``[G * H, I]``."""
    hidden: Tensor
    """``weight_hh``: ``[G * H, H]``."""
    input_bias: Tensor | None
    """``bias_ih``: ``[G * H]``."""
    hidden_bias: Tensor | None
    """``bias_hh``: ``[G * H]``."""


class GateGradients(NamedTuple):
    """dL/d of the two products that feed the gates, a tensor ``[T, B, H]`` a gate."""

    input: tuple[Tensor, ...]
    """dL/d ``x W_ih^T + b_ih``."""
    hidden: tuple[Tensor, ...]
    """dL/d ``h[t-1] W_hh^T + b_hh``."""


def gate_products(series: Tensor, weight: Tensor, bias: Tensor | None, gates: int) -> tuple[Tensor, ...]:
    """``series @ weight.T + bias``, one contiguous ``[T, B, H]`` a gate, which suits elementwise work.

    Args:
        series: ``[T, B, F]``.
        weight: ``[G * H, F]``.
        bias: ``[G * H]``.
    """
    rows = series.flatten(0, 1).expand(gates, -1, -1)
    matrices = weight.reshape(gates, -1, weight.shape[1]).transpose(1, 2)
    add = None if bias is None else bias.reshape(gates, 1, -1)
    products = torch.bmm(rows, matrices) if add is None else torch.baddbmm(add, rows, matrices)
    return products.view(gates, *series.shape[:2], -1).unbind(0)


# The GRU cell of torch.nn, with the derivatives of the paper's Appendix E.


class LocalGRU:
    """Gates are recomputed for all steps at once, in one batched product each for the input and the hidden state.

    ``J[t] = J11 + J1 (j2 j3 j6 j7) + J8 (j9 j10) + J4 (j5 j6 j7)``: the direct term first, then gates r, z, n.

    Args:
        x: ``[T, B, I]``.
        before: ``h[t-1]``: ``[T, B, H]``.
        mask: ``[T, B, 1]``, zero where a shorter sequence has ended. None: all have the same length.
    """

    def __init__(self, x: Tensor, before: Tensor, weights: Weights, mask: Tensor | None = None) -> None:
        input_r, input_z, input_n = gate_products(x, weights.input, weights.input_bias, gates=3)
        hidden_r, hidden_z, m = gate_products(before, weights.hidden, weights.hidden_bias, gates=3)
        r, z = torch.sigmoid(input_r + hidden_r), torch.sigmoid(input_z + hidden_z)
        n = torch.tanh(torch.addcmul(input_n, r, m))
        j2, j9 = r * (1 - r), z * (1 - z)
        j6_j7 = (1 - n * n) * (1 - z)
        j10 = before - n
        scale = torch.stack([z, j6_j7 * m * j2, j10 * j9, j6_j7 * r])  # blocks outermost: each is one run of memory
        if mask is not None:
            scale, j6_j7 = scale * mask, j6_j7 * mask
        eye = torch.eye(before.shape[-1], dtype=x.dtype, device=x.device)
        self._scale, self._candidate = scale, j6_j7
        self.jacobians = BlockJacobians(scale.movedim(0, -2), torch.cat([eye, weights.hidden]))

    def gate_gradients(self, v: Tensor) -> GateGradients:
        r, z, m = (self._scale[1:] * v).unbind(0)
        return GateGradients((r, z, self._candidate * v), (r, z, m))


# The LSTM cell of torch.nn: its state is the pair (h, c), so Jacobians are ``2H x 2H``.


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


class LocalLSTM:
    """Gates are recomputed in one product for all steps; ``c`` by a scan of ``c[t] = f c[t-1] + i g``.

    Args:
        x: ``[T, B, I]``.
        before: ``h[t-1]``: ``[T, B, H]``.
        first_cell: ``c0``: ``[B, H]``.
        mask: ``[T, B, 1]``, zero where a shorter sequence has ended. None: all have the same length.
    """

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


# The Elman cell: ``h[t] = f(x[t] W_ih^T + b_ih + h[t-1] W_hh^T + b_hh)``, ``f`` tanh or ReLU (paper, Equation 9).


class LocalRNN:
    """Both derivatives follow from the output alone: nothing is recomputed.

    Args:
        output: ``[T, B, H]``.
        mask: ``[T, B, 1]``, zero where a shorter sequence has ended. None: all have the same length.
    """

    def __init__(self, mode: str, output: Tensor, weights: Weights, mask: Tensor | None = None) -> None:
        slope = 1 - output * output if mode == "RNN_TANH" else (output > 0).to(output.dtype)
        self.slope = slope if mask is None else slope * mask
        self.jacobians = BlockJacobians(self.slope.unsqueeze(-2), weights.hidden)

    def gate_gradients(self, v: Tensor) -> GateGradients:
        gradient = self.slope * v
        return GateGradients((gradient,), (gradient,))


LocalCell = LocalGRU | LocalLSTM | LocalRNN
"""One layer's cell at the values of one forward pass: its ``jacobians``, and ``gate_gradients`` from dL/d state
``[T, B, S]``."""
