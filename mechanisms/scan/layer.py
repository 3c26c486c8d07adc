"""One layer of a recurrent network whose backward pass is a scan."""

import torch
from torch import Tensor

from retime.mechanisms.scan.cells import Weights
from retime.mechanisms.scan.checks import check_layer
from retime.mechanisms.scan.choice import choose_solver
from retime.mechanisms.scan.function import ScanFunction
from retime.mechanisms.scan.native import run_native
from retime.mechanisms.scan.packed import Packing
from retime.mechanisms.scan.solver import Solver, check_solver

Outputs = tuple[Tensor, Tensor] | tuple[Tensor, Tensor, Tensor]
LayerWeights = tuple[Tensor, Tensor, Tensor | None, Tensor | None]
"""``weight_ih`` ``[G * H, I]``, ``weight_hh`` ``[G * H, H]``, then both biases ``[G * H]`` (None: no bias)."""


def scan_layer(
    mode: str,
    x: Tensor,
    hx: Tensor | tuple[Tensor, Tensor],
    w_ih: Tensor,
    w_hh: Tensor,
    b_ih: Tensor | None,
    b_hh: Tensor | None,
    *,
    reverse: bool = False,
    solver: str | Solver = "auto",
    batch_sizes: Tensor | None = None,
) -> Outputs:
    """Run one direction; differentiable in every tensor, any number of times.

    Args:
        mode: ``"RNN_TANH"``, ``"RNN_RELU"``, ``"GRU"`` or ``"LSTM"``.
        x: ``[T, B, I]``; with ``batch_sizes`` the packed data ``[N, I]``, sorted by length.
        hx: ``h0`` ``[B, H]``; for LSTM ``(h0, c0)``.
        w_ih: ``[G * H, I]``, ``G`` 1, 3 or 4 gates in torch.nn's order.
        w_hh: ``[G * H, H]``.
        b_ih: ``[G * H]``; None, as ``b_hh``, for a layer without bias.
        reverse: from each sequence's last step to its first.
        solver: a name (``retime.mechanisms.scan.solver.NAMES``), or an object with ``solve``.
        batch_sizes: as in PackedSequence: ``[T]``, int64, on the CPU.

    Returns:
        Output ``[T, B, H]`` (or ``[N, H]``), ``h_n`` ``[B, H]`` and, for LSTM, ``c_n`` ``[B, H]``.

    Raises:
        ValueError: for an unknown mode or solver, one bias without the other, shapes, dtypes or devices that do not fit
            together, or a layer that ``"triton"`` cannot run.
        ModuleNotFoundError: for ``"triton"`` where triton is not installed.
    """
    states, directions = hx if isinstance(hx, tuple) else (hx,), ((w_ih, w_hh, b_ih, b_hh),)
    check_layer(mode, x, states, directions, batch_sizes)
    state = tuple(part.unsqueeze(0) for part in states)
    if reverse:
        turn = _flip if batch_sizes is None else Packing(batch_sizes, x.device).flip_packed
        output, *last = _run(mode, turn(x), state, directions, solver, batch_sizes)
        output = turn(output)
    else:
        output, *last = _run(mode, x, state, directions, solver, batch_sizes)
    return (output, *(part.squeeze(0) for part in last))  # type: ignore[return-value]


def scan_bidirectional(
    mode: str,
    x: Tensor,
    hx: Tensor | tuple[Tensor, Tensor],
    weights: LayerWeights,
    reverse_weights: LayerWeights,
    *,
    solver: str | Solver = "auto",
    batch_sizes: Tensor | None = None,
) -> Outputs:
    """Run both directions in one native call: torch.nn's reverse half rounds otherwise than a reversed forward one.

    Parameters are those of :func:`scan_layer`, with a leading dimension of 2 in ``hx``: ``[2, B, H]``.

    Returns:
        Output ``[T, B, 2 * H]`` (or ``[N, 2 * H]``), ``h_n`` ``[2, B, H]`` and, for LSTM, ``c_n``.
    """
    state = hx if isinstance(hx, tuple) else (hx,)
    check_layer(mode, x, state, (weights, reverse_weights), batch_sizes)
    return _run(mode, x, state, (weights, reverse_weights), solver, batch_sizes)  # type: ignore[return-value]


def _run(
    mode: str,
    x: Tensor,
    state: tuple[Tensor, ...],
    directions: tuple[LayerWeights, ...],
    solver: str | Solver,
    batch_sizes: Tensor | None,
) -> tuple[Tensor, ...]:
    check_solver(solver)
    flat = tuple(weight for weights in directions for weight in weights)
    chosen = None
    empty = state[0].numel() == 0  # no sequences: torch's own pass knows what to do with them
    if (
        not empty
        and torch.is_grad_enabled()
        and any(part is not None and part.requires_grad for part in (x, *state, *flat))
    ):
        chosen = choose_solver(solver, mode, x, state[0], batch_sizes)
    if chosen is None:
        return run_native(mode, x, state, tuple(Weights(*weights) for weights in directions), batch_sizes)
    first_cell = state[1] if mode == "LSTM" else None
    results = ScanFunction.apply(  # type: ignore[no-untyped-call]
        mode, chosen, batch_sizes, x, state[0], first_cell, *flat
    )
    return tuple(results)


def _flip(series: Tensor) -> Tensor:
    return series.flip(0)
