"""Which optimizers may run on each rank for the layers that it has."""

from __future__ import annotations

from torch.optim import LBFGS, Optimizer

from retime.foundations.lazy_updates import why_class_not_per_parameter
from retime.foundations.no_effect import warn_difference

__all__ = ["check_optimizer"]


def check_optimizer(optimizer: Optimizer) -> None:
    """Look whether a parameter's update needs nothing of parameters on other ranks; warn where nobody can know.

    Raises:
        ValueError: it does.
    """
    if isinstance(optimizer, LBFGS):
        raise ValueError(
            "LBFGS needs all parameters and gradients at once, and each rank of a pipeline has its own layers only: "
            "choose a first-order optimizer"
        )
    why = why_class_not_per_parameter(type(optimizer))
    if why is not None:
        warn_difference(f"each rank of a pipeline updates its own layers only, and {why}")
