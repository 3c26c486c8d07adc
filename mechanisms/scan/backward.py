"""The gradients of one layer and direction, from its saved values and the gradients that reach it."""

from typing import NamedTuple

import torch
from torch import Tensor

from retime.mechanisms.scan.cells import GateGradients, LocalCell, Weights
from retime.mechanisms.scan.gru import LocalGRU
from retime.mechanisms.scan.lstm import LocalLSTM
from retime.mechanisms.scan.rnn import LocalRNN
from retime.mechanisms.scan.safe_solve import safe_solve
from retime.mechanisms.scan.solver import Solver


class Saved(NamedTuple):
    """One direction, in the order in which it runs: a reverse direction is flipped before."""

    mode: str
    x: Tensor
    """``[T, B, I]``."""
    first: Tensor
    """``h0``: ``[B, H]``."""
    first_cell: Tensor | None
    """``c0`` of LSTM: ``[B, H]``."""
    output: Tensor
    """``[T, B, H]``."""
    weights: Weights
    mask: Tensor | None
    """``[T, B, 1]``, zero where a shorter sequence has ended. None: all have the same length."""


class Gradients(NamedTuple):
    """dL/d each of one direction's tensors."""

    x: Tensor
    first: Tensor
    first_cell: Tensor | None
    weights: Weights


def layer_gradients(solver: Solver, saved: Saved, outside: list[Tensor]) -> Gradients:
    """Solve the scan and read all gradients off its solution.

    Args:
        outside: what reaches each state from outside the recurrence, ``[T, B, H]``: of ``h`` and, for LSTM, ``c``.
    """
    before = torch.cat([saved.first.unsqueeze(0), saved.output[:-1]])
    cell = local_cell(saved, before)
    v, carry = safe_solve(solver, cell.jacobians, outside[0] if len(outside) == 1 else torch.cat(outside, dim=-1))
    first, *first_cell = carry.chunk(len(outside), dim=-1)
    gates = cell.gate_gradients(v)
    return Gradients(
        _input_gradient(gates.input, saved.weights.input),
        first,
        first_cell[0] if first_cell else None,
        _weight_gradients(gates, saved.x, before),
    )


def local_cell(saved: Saved, before: Tensor) -> LocalCell:
    """The cell at the saved values; ``before`` is ``h[t-1]``: ``[T, B, H]``."""
    if saved.first_cell is not None:
        return LocalLSTM(saved.x, before, saved.first_cell, saved.weights, saved.mask)
    if saved.mode == "GRU":
        return LocalGRU(saved.x, before, saved.weights, saved.mask)
    return LocalRNN(saved.mode, saved.output, saved.weights, saved.mask)


def _input_gradient(gates: tuple[Tensor, ...], weight: Tensor) -> Tensor:
    """Of ``x``: ``[T, B, I]``."""
    first, *rest = weight.chunk(len(gates))
    total = gates[0].flatten(0, 1) @ first
    for gate, part in zip(gates[1:], rest, strict=True):
        total = torch.addmm(total, gate.flatten(0, 1), part)
    return total.view(*gates[0].shape[:2], -1)


def _weight_gradients(gates: GateGradients, x: Tensor, before: Tensor) -> Weights:
    inputs, hidden = [g.flatten(0, 1) for g in gates.input], [g.flatten(0, 1) for g in gates.hidden]
    rows, states = x.flatten(0, 1), before.flatten(0, 1)
    input_bias = [gate.sum(0) for gate in inputs]
    shared = [one is other for one, other in zip(gates.input, gates.hidden, strict=True)]
    hidden_bias = [bias if same else gate.sum(0) for bias, same, gate in zip(input_bias, shared, hidden, strict=True)]
    return Weights(
        torch.cat([gate.t() @ rows for gate in inputs]),
        torch.cat([gate.t() @ states for gate in hidden]),
        torch.cat(input_bias),
        torch.cat(hidden_bias),
    )
