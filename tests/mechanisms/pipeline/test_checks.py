"""Optimizers that each rank runs for its own layers."""

import warnings
from typing import Any

import pytest
import torch
from torch import nn

from retime import DifferenceWarning, declare_per_parameter
from retime.mechanisms.pipeline import check_optimizer


class Own(torch.optim.SGD):
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Nothing."""


@declare_per_parameter
class Declared(Own):
    """The same, with a promise."""


def parameters() -> list[nn.Parameter]:
    return [nn.Parameter(torch.zeros(2))]


def test_torchs_own_and_declared_ones_go_apart() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_optimizer(torch.optim.AdamW(parameters()))
        check_optimizer(Declared(parameters(), lr=0.1))


def test_nobody_knows_of_others() -> None:
    with pytest.warns(DifferenceWarning, match=r"own layers only, and Own.step is not torch's own"):
        check_optimizer(Own(parameters(), lr=0.1))


def test_lbfgs_needs_all() -> None:
    with pytest.raises(ValueError, match="LBFGS needs all parameters and gradients at once"):
        check_optimizer(torch.optim.LBFGS(parameters()))
