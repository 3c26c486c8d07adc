"""The gradients of one layer and direction, from its saved values and the gradients that reach it."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

from retime.foundations.messages import warn_no_effect
from retime.mechanisms.scan.cells import (
    GateGradients,
    LocalCell,
    LocalGRU,
    LocalJacobians,
    LocalLSTM,
    LocalRNN,
    Weights,
)
from retime.mechanisms.scan.solvers import Sequential, Solver

# Full float32 products: tf32 keeps 10 bits, and a scan multiplies many Jacobians in a row.


@contextmanager
def ieee_products(device: torch.device) -> Iterator[None]:
    """Float32 matrix products on ``device`` without tf32, whatever the process has allowed elsewhere."""
    if device.type != "cuda":
        yield
        return
    settings = torch.backends.cuda.matmul
    before = settings.fp32_precision
    settings.fp32_precision = "ieee"
    try:
        yield
    finally:
        settings.fp32_precision = before


# CUDA graphs: what may not happen while one is captured.
#
# Between a layer's output and its gradients every solver works on the device alone: the calls depend on shapes, never
# on values; nothing is read back, and nothing is copied from the host. Two things would break that, and ask here
# first: :func:`~retime.mechanisms.scan.backward.safe_solve` reads whether a result is finite, and leaves that out
# while a graph is captured; :class:`~retime.mechanisms.scan.layer.Packing` copies from the host where sequences end,
# and refuses.
#
# Run one step before the capture, as ``torch.cuda.graph`` asks for anyway: cuBLAS makes its workspace then, and
# ``solver="triton"`` compiles. Tested without a GPU: the calls, on torch's "meta" device, not a capture itself.


def capturing(device: torch.device) -> bool:
    """Return whether a CUDA graph is captured on ``device``'s current stream."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


# Solve a scan, and once more the safe way where a product of Jacobians left the range of its type.

_warned: set[str] = set()


def safe_solve(solver: Solver, jacobians: LocalJacobians, gradient: Tensor) -> tuple[Tensor, Tensor]:
    """Solve as ``solver.solve`` does; finite wherever back-propagation through time is.

    While a CUDA graph is captured nothing can be read back, so that the result is taken as it is: capture with
    ``solver="sequential"`` or ``"chunk"`` where gradients explode (:mod:`retime.mechanisms.scan.backward`).
    """
    v, carry = solver.solve(jacobians, gradient)
    if solver.safe or capturing(v.device) or bool(torch.isfinite(v.sum() + carry.sum())):
        return v, carry
    v, carry = Sequential().solve(jacobians, gradient)
    name = repr(solver)
    if name not in _warned and bool(torch.isfinite(carry).all()):
        _warned.add(name)
        warn_no_effect(
            f"solver={name} has no effect on this backward pass: a product of Jacobians overflowed {gradient.dtype}, "
            f"so the {jacobians.steps} steps ran one after another. Use solver='sequential', or clip what makes the "
            "gradients explode. This warning comes once.",
            every_rank=True,
        )
    return v, carry


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
    """Return the gradient of ``x``: ``[T, B, I]``."""
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


# A layer's backward pass in windows of time on a CPU, so that what it works on stays in the cache.

WINDOW_BYTES = 4 * 1024 * 1024
"""Bytes of a series ``[T, B, H]`` in a window; about six are alive at once, which a server's last-level cache holds."""
LEAST_STEPS = 256
"""Shorter windows would cost more in calls than the cache saves."""


def gradients_in_windows(solver: Solver, saved: Saved, outside: list[Tensor]) -> Gradients:
    """Run :func:`layer_gradients` from the last window to the first; each hands its carry to the one before.

    Memory beyond the input's gradient is that of one window. All at once: short sequences; other devices, which need
    every step side by side; an LSTM, whose cell states start from the first step; and under ``create_graph``.
    """
    window = window_steps(saved.output)
    steps = saved.output.shape[0]
    if saved.first_cell is not None or torch.is_grad_enabled() or not saved.output.is_cpu or steps <= window:
        return layer_gradients(solver, saved, outside)
    (reached,) = outside
    windows = -(-steps // window)
    edges = [steps * k // windows for k in range(windows + 1)]
    parts: list[Gradients] = []
    for start, stop in zip(edges[-2::-1], edges[:0:-1], strict=True):
        part = reached[start:stop]
        if parts:
            part = torch.cat([part[:-1], (part[-1] + parts[-1].first).unsqueeze(0)])
        parts.append(layer_gradients(solver, _narrow(saved, start, stop), [part]))
    sums = (torch.stack(one).sum(0) for one in zip(*(part.weights for part in parts), strict=True))
    return Gradients(torch.cat([part.x for part in reversed(parts)]), parts[-1].first, None, Weights(*sums))


def window_steps(series: Tensor) -> int:
    """Time steps of the longest window of a series ``[T, B, H]``."""
    return max(LEAST_STEPS, WINDOW_BYTES // max(1, series[0].nbytes))


def _narrow(saved: Saved, start: int, stop: int) -> Saved:
    return saved._replace(
        x=saved.x[start:stop],
        first=saved.first if start == 0 else saved.output[start - 1],
        output=saved.output[start:stop],
        mask=None if saved.mask is None else saved.mask[start:stop],
    )
