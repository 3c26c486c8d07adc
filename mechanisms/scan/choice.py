"""Which solver a layer uses."""

from torch import Tensor

from retime.mechanisms.scan.solver import Solver, parse_solver


def choose_solver(
    solver: str | Solver, mode: str, x: Tensor, state: Tensor, batch_sizes: Tensor | None
) -> Solver | None:
    """The solver for one layer; None: torch's own backward pass.

    :param x: ``[T, B, I]``, or packed ``[N, I]``.
    :param state: ``h0``: ``[D, B, H]``.
    """
    if not isinstance(solver, str):
        return solver
    if solver == "autograd":
        return None
    return parse_solver("chunk" if solver == "auto" else solver)
