"""The all-reduces of the last backward pass, and who waits for them."""

from collections.abc import Iterable

from torch import Tensor

from retime.foundations.ddp import Reduction, release, settle_gradients
from retime.mechanisms.out_of_order.report import OutOfOrderReport


class Arrivals:
    """Gradients that are on their way between two backward passes.

    Args:
        report: counts the steps in which a gradient was read before the next forward pass.
        cross_iteration: whether whoever reads a gradient waits for it; False: the end of the backward pass does.
    """

    def __init__(self, report: OutOfOrderReport, *, cross_iteration: bool) -> None:
        self._report = report
        self._cross_iteration = cross_iteration
        self._carrying: dict[Tensor, Reduction] = {}
        self._read_early = False

    def reduction_of(self, parameter: Tensor) -> Reduction | None:
        """The all-reduce that carries this parameter's gradient, if one is on its way."""
        return self._carrying.get(parameter)

    def expect(self, reductions: Iterable[Reduction]) -> None:
        """The backward pass has ended, and these were begun in it."""
        self._read_early = False
        self._carrying.clear()
        for reduction in reductions:
            if self._cross_iteration:
                reduction.watch(self._on_early_read)
            else:
                reduction.wait()
            self._carrying.update(dict.fromkeys(reduction.parameters, reduction))

    def settle(self) -> None:
        """Wait for all of them."""
        settle_gradients(list(self._carrying))

    def forget(self) -> None:
        """Nothing is on its way any more."""
        self._carrying.clear()

    def release(self) -> None:
        """Let parameters wait for nothing more, whether or not it has arrived."""
        release(self._carrying)
        self._carrying.clear()

    def _on_early_read(self) -> None:
        if not self._read_early:
            self._read_early = True
            self._report.early_waits += 1
