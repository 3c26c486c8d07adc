"""The scan over a chain of sparse Jacobians: symbolic phase once, numeric phase every iteration.

Legend: B batch, d_k rows of M_k, S 1 or B.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from retime.foundations.arguments import checked
from retime.mechanisms.scan.jacobians.pattern import CsrPattern
from retime.mechanisms.scan.jacobians.product import ProductPlan, VectorPlan
from retime.mechanisms.scan.jacobians.scan_plan import Multiply, scan_plan


class JacobianScan:
    """All gradients of a chain by `scan_plan`, for fixed patterns.

    Sums are formed in another order than back-propagation forms them, so gradients differ from autograd's by rounding
    (section 3.5), and a zero in a Jacobian meets an infinite factor as 0 * inf = NaN.

    Args:
        patterns: of M_1 .. M_m, the transposed Jacobians from the last layer to the first.
        levels: up-sweep levels, None for all; see `scan_plan`.

    Raises:
        ValueError: the shapes of two neighbours do not fit.
    """

    @checked
    def __init__(self, patterns: Sequence[CsrPattern], levels: int | None = None) -> None:
        self.plan = scan_plan(len(patterns), levels)
        self._patterns = tuple(patterns)
        known = dict(enumerate(patterns, start=1))
        self._plans: list[ProductPlan | VectorPlan] = []
        for step in self.plan.steps:
            if step.is_vector:
                self._plans.append(VectorPlan(known[step.matrix]))
            else:
                product = ProductPlan(known[step.matrix], known[step.operand])
                known[step.result] = product.pattern
                self._plans.append(product)

    def __call__(self, gradient: Tensor, values: Sequence[Tensor]) -> list[Tensor]:
        """``[g, M_1 g, ..., M_m ... M_1 g]``, each ``(d_k, B)``.

        Args:
            gradient: g, ``(d_0, B)``.
            values: of M_1 .. M_m, each ``(entries, S)`` in g's dtype.

        Raises:
            ValueError: another number of values, or a shape or dtype that does not fit.
        """
        self._check(gradient, values)
        held: dict[int, Tensor] = {0: gradient, **dict(enumerate(values, start=1))}
        needed_until = {number: index for index, step in enumerate(self.plan.steps) for number in _read_by(step)}
        keep = set(self.plan.gradients)
        for index, (step, plan) in enumerate(zip(self.plan.steps, self._plans, strict=True)):
            held[step.result] = plan(held[step.matrix], held[step.operand])
            for number in _read_by(step):
                if needed_until[number] == index and number not in keep:
                    held.pop(number, None)
        return [held[number] for number in self.plan.gradients]

    def _check(self, gradient: Tensor, values: Sequence[Tensor]) -> None:
        if len(values) != len(self._patterns):
            raise ValueError(f"{len(values)} values: give those of {len(self._patterns)} Jacobians")
        rows = self._patterns[0].columns if self._patterns else gradient.shape[0]
        if gradient.dim() != 2 or gradient.shape[0] != rows:
            raise ValueError(f"gradient has the shape {list(gradient.shape)}: it has to be [{rows}, B]")
        for k, (pattern, given) in enumerate(zip(self._patterns, values, strict=True)):
            entries, samples = pattern.entries, gradient.shape[1]
            if given.dim() != 2 or given.shape[0] != entries or given.shape[1] not in (1, samples):
                raise ValueError(
                    f"values[{k}] has the shape {list(given.shape)}: it has to be [{entries}, {samples}], or "
                    f"[{entries}, 1]"
                )
            if given.dtype != gradient.dtype:
                raise ValueError(
                    f"values[{k}] has the dtype {given.dtype}, the gradient {gradient.dtype}: give one dtype"
                )


def _read_by(step: Multiply) -> tuple[int, int]:
    return step.matrix, step.operand
