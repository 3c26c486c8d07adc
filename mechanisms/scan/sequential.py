"""One step after another: plain back-propagation through time, without an autograd node a step."""

from torch import Tensor

from retime.mechanisms.scan.jacobians import LocalJacobians


class Sequential:
    """Theta(T) dependent matrix-vector products. Never overflows where autograd does not."""

    name = "sequential"
    safe = True

    def solve(self, jacobians: LocalJacobians, gradient: Tensor) -> tuple[Tensor, Tensor]:
        return jacobians.sweep(gradient)
