"""Names of solvers, and what a solver is."""

import re
from functools import cache
from typing import Protocol, runtime_checkable

from torch import Tensor

from retime.mechanisms.scan.blelloch import Blelloch
from retime.mechanisms.scan.chunk import Chunk
from retime.mechanisms.scan.local_jacobians import LocalJacobians
from retime.mechanisms.scan.sequential import Sequential
from retime.mechanisms.scan.triton_chunk import TritonChunk
from retime.mechanisms.scan.triton_launch import has_triton

NAMES = "auto, sequential, chunk, chunk:<length>, blelloch, truncated:<levels>, triton, triton:<length>, autograd"


@runtime_checkable
class Solver(Protocol):
    """Solves ``v[t-1] = g[t-1] + J[t]^T v[t]`` for all ``t``."""

    @property
    def safe(self) -> bool:
        """Whether every number it forms is one that autograd forms too."""
        ...

    def __repr__(self) -> str:
        """The name that :func:`parse_solver` reads."""
        ...

    def solve(self, jacobians: LocalJacobians, gradient: Tensor) -> tuple[Tensor, Tensor]:
        """Solve one scan.

        Args:
            gradient: ``g``, what reaches each state from outside the recurrence: ``[T, B, S]``.

        Returns:
            ``v``: ``[T, B, S]``, and ``J[0]^T v[0]``, the gradient of the first state: ``[B, S]``.
        """
        ...


def parse_solver(name: str) -> Solver:
    """The solver of that name. Solvers hold no state: one object a name serves all layers.

    Raises:
        ValueError: for an unknown name.
    """
    if not isinstance(name, str):
        raise TypeError(f"name={name!r}: use one of {NAMES}")
    return _parse(name)


@cache
def _parse(name: str) -> Solver:
    match = re.fullmatch(r"(\w+)(?:[:(](\d+)\)?)?", name.strip())
    kind, number = match.groups() if match else (name, None)
    count = None if number is None else int(number)
    if kind == "sequential" and count is None:
        return Sequential()
    if kind == "chunk":
        return Chunk(count)
    if kind == "triton":
        return TritonChunk(count)
    if kind == "blelloch" and count is None:
        return Blelloch()
    if kind == "truncated" and count is not None:
        return Blelloch(count)
    raise ValueError(f"unknown solver {name!r}; use one of {NAMES}")


def check_solver(solver: str | Solver) -> None:
    """Refuse what :func:`scan_layer` would refuse.

    Raises:
        ValueError: for an unknown name.
        ModuleNotFoundError: for ``"triton"`` where triton is not installed.
        TypeError: for an object without ``solve``.
    """
    if isinstance(solver, str):
        if solver not in ("auto", "autograd") and isinstance(parse_solver(solver), TritonChunk) and not has_triton():
            raise ModuleNotFoundError(
                f"solver={solver!r} needs triton, which is not installed: pip install 'lightning-retime[triton]', or "
                "use solver='auto' or 'chunk'"
            )
    elif not callable(getattr(solver, "solve", None)):
        raise TypeError(f"solver={solver!r} has no solve(jacobians, gradient); use one of {NAMES}")
