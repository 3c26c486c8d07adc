"""One step after another: back-propagation through time without an autograd node a step."""

from torch import Tensor

from retime.mechanisms.scan.local_jacobians import LocalJacobians


class Sequential:
    """Theta(T) dependent matrix-vector products; forms no number that autograd does not form."""

    safe = True

    def __repr__(self) -> str:
        return "sequential"

    def solve(self, jacobians: LocalJacobians, gradient: Tensor) -> tuple[Tensor, Tensor]:
        return jacobians.sweep(gradient)
