"""The check of a `solver=` argument before anything is built or changed."""

from retime.mechanisms.scan import Solver, parse_solver


def check_solver(solver: str | Solver) -> None:
    """Raise a ValueError that lists the solvers unless `solver` is one, or a name of one.

    Raises:
        TypeError: neither a name nor a solver.
    """
    if isinstance(solver, str):
        if solver not in ("auto", "autograd"):
            parse_solver(solver)
    elif not callable(getattr(solver, "solve", None)):
        raise TypeError(f"solver={solver!r} is a {type(solver).__name__}; give a solver's name, such as 'auto'")
