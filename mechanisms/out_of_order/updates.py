"""The cross-iteration wait: each parameter is updated when the next forward pass reads it and its gradient is there."""

from collections.abc import Callable, Iterator

from torch import Tensor, nn
from torch.optim import Optimizer

from retime.foundations.ddp import GradientWatch, Reduction
from retime.foundations.lazy_updates import pending_of
from retime.mechanisms.fusion import ForwardFusion, GradientMemory, parameters_of


class CrossIterationUpdates(ForwardFusion):
    """Forward fusion whose buckets are the all-reduces on their way, each with a wait in front of its update.

    Args:
        optimizer: whose updates wait.
        model: of its parameters.
        reduction_of: the all-reduce that carries a parameter's gradient, if one is on its way.
        on_remove: called with this, and once, when it is removed.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        model: nn.Module,
        reduction_of: Callable[[Tensor], Reduction | None],
        on_remove: "Callable[[CrossIterationUpdates], None]",
    ) -> None:
        super().__init__(optimizer, model)
        self._reduction_of = reduction_of
        self._on_remove = on_remove

    def _gradient_memory(self) -> GradientMemory:
        """DDP's buckets hold the gradients."""
        return GradientMemory([])

    def remove(self) -> None:
        """Bring all parameters up to date and give the optimizer its own methods back."""
        if self.is_removed:
            return
        try:
            super().remove()
        finally:
            self._on_remove(self)

    def _settle_others(self) -> None:
        for parameter in parameters_of(self.optimizer):
            pending = pending_of(parameter)
            if pending is not None and not isinstance(pending, GradientWatch):
                pending.settle()

    def _waiting_buckets(self, parameters: list[Tensor]) -> Iterator[tuple[list[Tensor], Callable[[], None] | None]]:
        arrived: list[Tensor] = []
        carried: dict[Reduction, list[Tensor]] = {}
        for parameter in parameters:
            reduction = self._reduction_of(parameter)
            if reduction is not None and isinstance(pending_of(parameter), GradientWatch):
                carried.setdefault(reduction, []).append(parameter)
            else:
                arrived.append(parameter)
        for reduction, mine in carried.items():
            watch = pending_of(mine[0])
            assert watch is not None
            watch.release()
            rest = [p for p in reduction.parameters if p not in set(mine)]
            if rest:
                GradientWatch(rest, reduction.wait)
            yield mine, reduction.wait
        yield from super()._waiting_buckets(arrived)
