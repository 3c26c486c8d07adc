"""A step's optimizers over stand-ins, brought to the middle of training."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from retime.foundations.preserve_state import Replacement, stand_in_optimizer
from retime.foundations.torch_private import LOCAL_SCALAR_DENSE, FakeTensor, TorchDispatchMode
from retime.mechanisms.memory_budget.dry_run.gradients import drop_gradients
from retime.mechanisms.memory_budget.dry_run.training_step import TrainingStep


class StandInOptimizers:
    """Optimizers over the stand-ins of a step's parameters; made while these are in their places.

    Args:
        step: whose optimizers.
        replacement: makes the stand-ins.

    Attributes:
        trained: the trained parameters.
        lasting: those of them whose gradients no ``zero_grad`` frees.
        not_run: classes of optimizers that cannot be run by themselves, so that their states are not known.
    """

    def __init__(self, step: TrainingStep, replacement: Replacement) -> None:
        self.not_run: list[str] = []
        self._optimizers = [stand_in_optimizer(optimizer, replacement) for optimizer in step.optimizers]
        self.trained = [parameter for parameter in step.module.parameters() if parameter.requires_grad]
        self.lasting = self._without_optimizer()

    @property
    def states(self) -> list[list[Any]]:
        """For each optimizer, the states of its parameters."""
        return [[list(state.values()) for state in one.state.values()] for one in self._optimizers]

    def update(self) -> None:
        """Run the optimizers; one that cannot be run alone (it wants a closure, or sparse gradients) is left out."""
        for optimizer in list(self._optimizers):
            try:
                optimizer.step()
            except Exception:  # whatever an optimizer says to a step that is not in the middle of training
                self._optimizers.remove(optimizer)
                self.not_run.append(type(optimizer).__name__)

    def complete(self, reached: Callable[[], set[int]]) -> None:
        """States appear in a parameter's first update; a step in the middle of training finds them there.

        Once an optimizer has some, a parameter without is a new one (thawed, or of a later group), or one that gets no
        gradients. An additional pass tells, and which gradients that no optimizer frees there are.

        Args:
            reached: runs that pass, and returns the ids of the parameters that got gradients.
        """
        fresh = [one for optimizer in self._optimizers for one in self._without_state(optimizer) if not optimizer.state]
        later = [one for optimizer in self._optimizers for one in self._without_state(optimizer) if optimizer.state]
        if later or self.lasting:
            ids = reached()
            later = [one for one in later if id(one) in ids]
            self.lasting = [one for one in self.lasting if id(one) in ids]
        if fresh or later:
            for parameter in (*fresh, *later):  # the others keep what they have: they are not updated
                parameter.grad = torch.zeros_like(parameter)
            with _AnyValue():  # type: ignore[no-untyped-call]
                self.update()
            drop_gradients(self.trained)

    def _without_state(self, optimizer: torch.optim.Optimizer) -> list[Tensor]:
        trained = {id(parameter) for parameter in self.trained}
        groups = (group["params"] for group in optimizer.param_groups)
        return [one for one in chain.from_iterable(groups) if id(one) in trained and not optimizer.state.get(one)]

    def _without_optimizer(self) -> list[nn.Parameter]:
        """Trained parameters whose gradients no ``zero_grad`` frees. Without any optimizer all are somebody else's."""
        groups = (group["params"] for optimizer in self._optimizers for group in optimizer.param_groups)
        known = {id(one) for one in chain.from_iterable(groups)}
        return [one for one in self.trained if id(one) not in known] if self._optimizers else []


class _AnyValue(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Makes up the values that fake tensors do not have: a step count, say."""

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is LOCAL_SCALAR_DENSE and isinstance(args[0], FakeTensor):
            return 0.5 if args[0].dtype.is_floating_point else 1  # no optimizer divides by 1 - 0.5
        return func(*args, **(kwargs or {}))
