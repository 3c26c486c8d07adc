"""Reductions that are on their way while training goes on, and who waits for them.

From the end of the backward pass each parameter watches for reads (the lazy-update engine of forward fusion): whoever
looks at its gradient first waits until the all-reduce of that gradient has ended. So clipping, scalers, loggers and
plain optimizers see complete gradients without knowing of any of this.
"""

from collections.abc import Callable, Hashable, Iterable

import torch
from torch import Tensor

from retime.foundations.ddp.mean import start_mean
from retime.foundations.ddp.reducers import Reducer
from retime.foundations.lazy_updates import PendingUpdate, can_wait, has_alias, is_pending, pending_of


class GradientWatch(PendingUpdate):
    """Parameters whose gradients are on their way; reading one waits for the all-reduce."""


class Reduction:
    """One all-reduce on its way, for the gradients of ``parameters``."""

    def __init__(self, parameters: Iterable[Tensor], done: torch.futures.Future[Tensor]) -> None:
        self.parameters = list(parameters)
        self._done = done

    def wait(self) -> None:
        """Return when the gradients are complete (on CUDA: when the current stream will see them so)."""
        self._done.wait()

    def watch(self, on_read: Callable[[], None]) -> None:
        """Make whoever reads one of these gradients wait for it; where that cannot be seen, wait now."""
        if all(can_wait(p) and not is_pending(p) and not has_alias(p) for p in self.parameters):

            def wait() -> None:
                on_read()
                self.wait()

            GradientWatch(self.parameters, wait)
        else:
            self.wait()


class Reductions:
    """The reductions of one backward pass.

    Args:
        reducer: sums; it stays its owner's.
        ranks: how many there are.
        divide: whether gradients are divided by that number, or multiplied by its rounded reciprocal.
    """

    def __init__(self, reducer: Reducer, ranks: int, *, divide: bool) -> None:
        self._reducer = reducer
        self._ranks = ranks
        self._divide = divide
        self._on_their_way: list[Reduction] = []

    def start(self, key: Hashable, parameters: Iterable[Tensor], values: Tensor, *, urgent: bool) -> None:
        """Begin to replace ``values``, the gradients of ``parameters``, by their mean over the ranks."""
        # .data has a version counter of its own: the sum's arrival is no change in place by somebody else
        done = start_mean(self._reducer, key, values.data, self._ranks, divide=self._divide, urgent=urgent)
        self._on_their_way.append(Reduction(parameters, done))

    def take(self) -> list[Reduction]:
        """Those begun since the last call."""
        taken, self._on_their_way = self._on_their_way, []
        return taken


def settle_gradients(parameters: Iterable[Tensor]) -> None:
    """Wait for gradients that are still on their way, without running updates that wait for them."""
    for parameter in parameters:
        pending = pending_of(parameter)
        if isinstance(pending, GradientWatch):
            pending.settle()


def release(parameters: Iterable[Tensor]) -> None:
    """Forget whatever these parameters still wait for, after a failure that it cannot survive."""
    for parameter in parameters:
        pending = pending_of(parameter)
        if pending is not None:
            pending.release()
