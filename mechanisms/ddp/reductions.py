"""All-reduces that are on their way while training goes on, and who waits for them.

From the end of the backward pass each parameter watches for reads (the lazy-update engine of forward fusion): whoever
looks at its gradient first waits until the all-reduce of that gradient has ended. So clipping, scalers, loggers and
plain optimizers see complete gradients without knowing of any of this.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch.distributed as dist
from torch import Tensor

from retime.mechanisms.ddp.mean import scale
from retime.mechanisms.ddp.own_group import close_group, own_group
from retime.mechanisms.lazy_updates import PendingUpdate, can_wait, has_alias, is_pending, pending_of


class GradientWatch(PendingUpdate):
    """Parameters whose gradients are on their way; reading one waits for the all-reduce."""


class Reduction:
    """One all-reduce on its way, for the gradients of ``parameters``."""

    def __init__(self, parameters: Iterable[Tensor], work: Any) -> None:
        self.parameters = list(parameters)
        self._work = work

    def wait(self) -> None:
        """Return when the gradients are complete (on CUDA: when the current stream will see them so)."""
        work, self._work = self._work, None
        if work is not None:
            work.wait()

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
    """The all-reduces of one backward pass, in process groups of their own.

    Of their own, so that nothing else (buffers, metrics, a user's barrier) queues behind them; the urgent ones, of the
    layers that the next forward pass needs first, have another, so that they do not queue behind the bulk either.
    """

    def __init__(self, group: Any, *, divide: bool, timeout: Any = None) -> None:
        self._ranks = dist.get_world_size(group)
        self._divide = divide
        self._groups = [own_group(group, timeout=timeout) for _ in range(2)]
        self._on_their_way: list[Reduction] = []

    def start(self, parameters: Iterable[Tensor], values: Tensor, *, urgent: bool) -> None:
        """Begin to replace ``values``, the gradients of ``parameters``, by their mean over the ranks."""
        scale(values, self._ranks, divide=self._divide)
        work = dist.all_reduce(values, group=self._groups[urgent], async_op=True)
        self._on_their_way.append(Reduction(parameters, work))

    def take(self) -> list[Reduction]:
        """Those begun since the last call."""
        taken, self._on_their_way = self._on_their_way, []
        return taken

    def close(self) -> None:
        """Give the process groups back."""
        groups, self._groups = self._groups, []
        for group in groups:
            close_group(group)


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
