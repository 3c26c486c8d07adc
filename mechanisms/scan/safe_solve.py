"""Solve a scan, and once more the safe way where a product of Jacobians left the range of its type."""

import torch
from torch import Tensor

from retime.foundations.no_effect import warn_no_effect
from retime.mechanisms.scan.capture import capturing
from retime.mechanisms.scan.local_jacobians import LocalJacobians
from retime.mechanisms.scan.sequential import Sequential
from retime.mechanisms.scan.solver import Solver

_warned: set[str] = set()


def safe_solve(solver: Solver, jacobians: LocalJacobians, gradient: Tensor) -> tuple[Tensor, Tensor]:
    """As ``solver.solve``; finite wherever back-propagation through time is.

    While a CUDA graph is captured nothing can be read back, so that the result is taken as it is: capture with
    ``solver="sequential"`` or ``"chunk"`` where gradients explode (:mod:`retime.mechanisms.scan.capture`).
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
