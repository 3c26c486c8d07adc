"""The optimizers whose updates wait for their own gradients only."""

import functools
from collections.abc import Callable

from torch import Tensor, nn
from torch.optim import Optimizer

from retime.foundations.ddp import Reduction
from retime.mechanisms.fusion import FusionReport
from retime.mechanisms.out_of_order.updates import CrossIterationUpdates


class AttachedUpdates:
    """One :class:`CrossIterationUpdates` an optimizer; those that were removed leave their counts and nothing else.

    Args:
        model: of the parameters.
        reduction_of: the all-reduce that carries a parameter's gradient, if one is on its way.
    """

    def __init__(self, model: nn.Module, reduction_of: Callable[[Tensor], Reduction | None]) -> None:
        self._model, self._reduction_of = model, reduction_of
        self._updates: list[CrossIterationUpdates] = []
        self._detached = FusionReport("forward")

    def attach(self, optimizer: Optimizer) -> CrossIterationUpdates:
        """Let this optimizer's updates wait."""
        updates = CrossIterationUpdates(optimizer, self._model, self._reduction_of, self._detach)
        self._updates.append(updates)
        return updates

    def _detach(self, updates: CrossIterationUpdates) -> None:
        self._updates.remove(updates)
        self._detached = self._detached.beside(updates.report())

    def flush(self) -> None:
        """Run every update that is still pending."""
        for updates in self._updates:
            updates.flush()

    def remove(self) -> None:
        """Bring all parameters up to date and give the optimizers their own methods back."""
        for updates in list(self._updates):
            updates.remove()

    def report(self) -> FusionReport:
        """What was fused, over all optimizers that are or were attached."""
        return functools.reduce(FusionReport.beside, (updates.report() for updates in self._updates), self._detached)
