"""Steps that an update inside ``backward()`` would make another one: they end with an error that says what to do."""

from collections.abc import Iterable

import torch
from torch.optim import Optimizer

from retime.foundations.lazy_updates import OptimizerWindow
from retime.foundations.torch_private import version_of
from retime.mechanisms.fusion.followed import Followed


def refuse_second_derivative() -> None:
    """Called inside of a backward pass.

    Raises:
        RuntimeError: it builds a graph of its own.
    """
    if torch.is_grad_enabled():
        raise RuntimeError(
            "backward(create_graph=True) keeps the old parameters for a second derivative, backward fusion "
            "overwrites them: use mode='forward', or remove the fusion"
        )


def refuse_more_gradients(followed: Followed) -> None:
    """Called when a gradient arrives.

    Raises:
        RuntimeError: it is one more than in the steps before.
    """
    if followed.fired > followed.uses:
        raise RuntimeError(
            f"a parameter of shape {tuple(followed.parameter.shape)} received {followed.fired} gradients in one step, "
            f"{followed.uses} in the steps before, and may be updated already. Wrap all backward passes of a step "
            "but the last in `with fusion.accumulate():`; with checkpointing, pass use_reentrant=False; a "
            "backward() that no optimizer.step() follows needs mode='forward'; after an exception inside a "
            "backward(), call `fusion.abandon_step()` and go on with the next batch"
        )


def refuse_changes(used: Iterable[Followed]) -> None:
    """Called by ``optimizer.step()``, with parameters whose gradients have been used up and stand under a guard.

    Raises:
        RuntimeError: a gradient or a parameter has been changed since.
    """
    used = list(used)
    if any(followed.parameter.grad is not followed.guard for followed in used):
        raise RuntimeError(
            "a gradient was cleared or replaced between backward() and optimizer.step(), but backward fusion has "
            "updated its parameter already: use mode='forward'"
        )
    if any(version_of(followed.parameter) != followed.version for followed in used):
        raise RuntimeError(
            "a parameter was changed in place between backward() and optimizer.step(), but backward fusion has "
            "updated it already: change it before backward() or after step(), or use mode='forward'"
        )


def refuse_new_hyper_parameters(window: OptimizerWindow, optimizer: Optimizer) -> None:
    """Called by ``optimizer.step()``, with the window through which parameters have been updated.

    Raises:
        RuntimeError: a hyper-parameter has been changed since.
    """
    if window.is_outdated(optimizer):
        raise RuntimeError(
            "a learning rate or another hyper-parameter was changed between backward() and optimizer.step(), but "
            "backward fusion has updated parameters already: change it before backward(), or use mode='forward'"
        )
