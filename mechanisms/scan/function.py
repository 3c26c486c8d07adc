"""The autograd function: torch's own forward pass, and a backward pass that solves the affine scan."""

from typing import Any

import torch
from torch import Tensor

from retime.mechanisms.scan.cells import GateGradients, LocalCell, Weights
from retime.mechanisms.scan.gru import LocalGRU
from retime.mechanisms.scan.lstm import LocalLSTM
from retime.mechanisms.scan.native import run_native
from retime.mechanisms.scan.packed import Packing
from retime.mechanisms.scan.rnn import LocalRNN
from retime.mechanisms.scan.solver import Solver


class ScanFunction(torch.autograd.Function):
    """Saves the input, the first states, the output and the weights: what nn saves, without its gates."""

    @staticmethod
    def forward(
        mode: str,
        solver: Solver,
        batch_sizes: Tensor | None,
        x: Tensor,
        first: Tensor,
        first_cell: Tensor | None,
        *weights: Tensor | None,
    ) -> tuple[Tensor, ...]:
        state = (first,) if first_cell is None else (first, first_cell)
        return run_native(mode, x, state, Weights(*weights), batch_sizes)  # type: ignore[arg-type]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.mode, ctx.solver, batch_sizes, x, first, first_cell, *weights = inputs
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(batch_sizes, x, first, first_cell, *weights, output[0])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        batch_sizes, x, first, first_cell, *rest = ctx.saved_tensors
        weights, output = Weights(*rest[:4]), rest[4]
        if all(gradient is None for gradient in gradients):
            return (None,) * 10
        with torch.autocast(x.device.type, enabled=False):
            wanted = ctx.needs_input_grad[3:]
            found = solve_layer(
                ctx.mode, ctx.solver, batch_sizes, x, first, first_cell, weights, output, gradients, wanted
            )
        return (None, None, None, *found)


def solve_layer(
    mode: str,
    solver: Solver,
    batch_sizes: Tensor | None,
    x: Tensor,
    first: Tensor,
    first_cell: Tensor | None,
    weights: Weights,
    output: Tensor,
    gradients: tuple[Tensor | None, ...],
    wanted: tuple[bool, ...],
) -> list[Tensor | None]:
    """Gradients of x, h0, c0, and the four weights; None where not wanted.

    :param gradients: of the output, ``h_n`` and (LSTM) ``c_n``; None: no gradient reaches it.
    """
    targets = (x, first, first_cell, *weights)
    dtype = torch.promote_types(torch.promote_types(x.dtype, weights.hidden.dtype), torch.float32)
    x, first, output = x.to(dtype), first.to(dtype), output.to(dtype)
    first_cell = None if first_cell is None else first_cell.to(dtype)
    weights = Weights(*(None if weight is None else weight.to(dtype) for weight in weights))  # type: ignore[arg-type]
    gradients = tuple(None if gradient is None else gradient.to(dtype) for gradient in gradients)
    packing = None if batch_sizes is None else Packing(batch_sizes, x.device)
    mask = None
    outside, *last = gradients
    if packing is not None:
        x, output, mask = packing.pad(x), packing.pad(output), packing.mask(dtype)
        outside = None if outside is None else packing.pad(outside)
    before = torch.cat([first.unsqueeze(0), output[:-1]])
    cell: LocalCell
    if mode == "LSTM":
        assert first_cell is not None
        cell = LocalLSTM(x, before, first_cell, weights, mask)
    elif mode == "GRU":
        cell = LocalGRU(x, before, weights, mask)
    else:
        cell = LocalRNN(mode, output, weights, mask)

    series = [torch.zeros_like(output) if outside is None else outside]
    if mode == "LSTM":
        series.append(torch.zeros_like(output))
    for k, gradient in enumerate(last):
        if gradient is None:
            continue
        if packing is not None:
            series[k] = series[k] + packing.at_end(gradient)
        else:
            series[k] = torch.cat([series[k][:-1], (series[k][-1] + gradient).unsqueeze(0)])
    joint = series[0] if len(series) == 1 else torch.cat(series, dim=-1)
    v, carry = solver.solve(cell.jacobians, joint)
    states = carry.chunk(len(series), dim=-1)

    gates = cell.gate_gradients(v)
    found: list[Tensor | None] = [
        None,
        states[0],
        states[1] if len(states) == 2 else None,
        *_weight_gradients(gates, x, before),
    ]
    from_input = gates.input @ weights.input
    found[0] = from_input if packing is None else packing.pack(from_input)
    return [
        None if target is None or not want or gradient is None else gradient.to(target.dtype)
        for target, want, gradient in zip(targets, wanted, found, strict=True)
    ]


def _weight_gradients(gates: GateGradients, x: Tensor, before: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Of ``weight_ih``, ``weight_hh``, ``bias_ih`` and ``bias_hh``."""
    inputs, hidden = gates.input.flatten(0, 1), gates.hidden.flatten(0, 1)
    return inputs.t() @ x.flatten(0, 1), hidden.t() @ before.flatten(0, 1), inputs.sum(0), hidden.sum(0)
