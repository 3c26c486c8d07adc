"""The loss in what a training step returns."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor


def loss_of(output: Any) -> Tensor:
    """The loss in what a step returns: the scalar itself, or its ``loss``.

    Raises:
        ValueError: there is none.
    """
    loss = output
    if isinstance(output, Mapping):
        loss = output.get("loss")
    elif not isinstance(output, Tensor):
        loss = getattr(output, "loss", None)
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        raise ValueError(f"a step must return its loss, a scalar, or a mapping with 'loss'; it returned {type(output)}")
    return loss.reshape(())
