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

    :param outside: what reaches each state from outside the recurrence, ``[T, B, H]``: of ``h`` and, for LSTM, ``c``.
    """
    before = torch.cat([saved.first.unsqueeze(0), saved.output[:-1]])
    cell = local_cell(saved, before)
    v, carry = safe_solve(solver, cell.jacobians, outside[0] if len(outside) == 1 else torch.cat(outside, dim=-1))
    first, *first_cell = carry.chunk(len(outside), dim=-1)
    gates = cell.gate_gradients(v)
    return Gradients(
        gates.input @ saved.weights.input,
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


def _weight_gradients(gates: GateGradients, x: Tensor, before: Tensor) -> Weights:
    inputs, hidden = gates.input.flatten(0, 1), gates.hidden.flatten(0, 1)
    input_bias = inputs.sum(0)
    return Weights(
        inputs.t() @ x.flatten(0, 1),
        hidden.t() @ before.flatten(0, 1),
        input_bias,
        input_bias if hidden is inputs else hidden.sum(0),
    )
