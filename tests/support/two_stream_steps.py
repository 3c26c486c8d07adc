"""Steps of plain loops, which two streams repeat: each of its own passes, and the optimizer's step behind them."""

from collections.abc import Callable
from functools import wraps
from typing import Any

from torch import Tensor


def stepping(passes: Callable[[Any, Tensor, int], object]) -> Callable[..., None]:
    """A step that ends with the optimizer's."""

    @wraps(passes)
    def step(model: Any, optimizer: Any, x: Tensor, index: int, *_: Any) -> None:
        passes(model, x, index)
        optimizer.step()
        optimizer.zero_grad()

    return step


@stepping
def plain_step(model: Any, x: Tensor, index: int) -> None:
    model(x).square().mean().backward()


@stepping
def twice(model: Any, x: Tensor, index: int) -> None:
    loss = model(x).square().mean()
    loss.backward(retain_graph=True)
    loss.backward()
