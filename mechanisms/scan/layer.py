"""One layer and one direction of a recurrent network whose backward pass is a scan."""

import torch
from torch import Tensor

from retime.mechanisms.scan.cells import Weights
from retime.mechanisms.scan.function import ScanFunction
from retime.mechanisms.scan.native import MODES, run_native
from retime.mechanisms.scan.packed import Packing
from retime.mechanisms.scan.solver import Solver, check_solver, parse_solver

Outputs = tuple[Tensor, Tensor] | tuple[Tensor, Tensor, Tensor]


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
    """Run one layer; differentiable in every tensor, any number of times.

    :param mode: ``"RNN_TANH"``, ``"RNN_RELU"``, ``"GRU"`` or ``"LSTM"``.
    :param x: ``[T, B, I]``; with ``batch_sizes`` the packed data ``[N, I]``, sorted by length.
    :param hx: ``h0`` ``[B, H]``; for LSTM ``(h0, c0)``.
    :param w_ih: ``[G * H, I]``, ``G`` 1, 3 or 4 gates in torch.nn's order.
    :param w_hh: ``[G * H, H]``.
    :param b_ih: ``[G * H]``; None, as ``b_hh``, for a layer without bias.
    :param reverse: from each sequence's last step to its first.
    :param solver: a name, or an object (``retime.mechanisms.scan.Solver``).
    :param batch_sizes: as in PackedSequence: ``[T]``, int64, on the CPU.
    :return: output ``[T, B, H]`` (or ``[N, H]``), ``h_n`` ``[B, H]`` and, for LSTM, ``c_n`` ``[B, H]``.
    :raises ValueError: for an unknown mode or solver, or one bias without the other.
    """
    if mode not in MODES:
        raise ValueError(f"unknown mode {mode!r}; use one of {', '.join(MODES)}")
    if (b_ih is None) != (b_hh is None):
        raise ValueError("one of b_ih and b_hh is None: give both, or neither")
    check_solver(solver)
    weights = Weights(w_ih, w_hh, b_ih, b_hh)
    state = hx if isinstance(hx, tuple) else (hx,)
    packing = Packing(batch_sizes, x.device) if reverse and batch_sizes is not None else None
    if reverse:
        x = x.flip(0) if packing is None else packing.reverse(x)
    wanted = torch.is_grad_enabled() and any(
        tensor is not None and tensor.requires_grad for tensor in (x, *state, *weights)
    )
    if not wanted or solver == "autograd":
        output, *last = run_native(mode, x, state, weights, batch_sizes)
    else:
        chosen = parse_solver("chunk" if solver == "auto" else solver) if isinstance(solver, str) else solver
        output, *last = ScanFunction.apply(mode, chosen, batch_sizes, x, *state, *([None] * (2 - len(state))), *weights)
    if reverse:
        output = output.flip(0) if packing is None else packing.reverse(output)
    return (output, *last)  # type: ignore[return-value]
