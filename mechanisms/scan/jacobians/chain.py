"""The scan over a chain of sparse Jacobians: symbolic phase once, numeric phase every iteration.

Legend: B batch, d_k rows of M_k, S 1 or B.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

from torch import Tensor

from retime.foundations.arguments import AtLeast, AtMost, checked
from retime.mechanisms.scan.jacobians.sparse import CsrPattern, ProductPlan, VectorPlan, product_count, product_pattern

# Backward as a scan: which products, on which level (Wang et al. 2020, section 3.2 and algorithm 1).
#
# Legend: g the gradient of the last output; M_1 .. M_m the transposed Jacobians from the last layer to the first.
# Wanted are g, M_1 g, M_2 M_1 g, ..., M_m ... M_1 g: all gradients that back-propagation computes one after another.

Phase = Literal["up", "linear", "down"]
MOST_MATRICES = 10**6


@dataclass(frozen=True)
class Multiply:
    """``result <- matrix @ operand``. Each is the number of a value: 0 is g, k is M_k, results count on from m + 1.

    Steps of one level need nothing of one another.
    """

    matrix: int
    operand: int
    result: int
    level: int
    phase: Phase
    is_vector: bool


@dataclass(frozen=True)
class ScanPlan:
    """The steps in order, and the value number of each wanted gradient."""

    matrices: int
    levels: int
    steps: tuple[Multiply, ...]
    gradients: tuple[int, ...]

    def __str__(self) -> str:
        """One line a level: ``up 1: 3=2*1 6=5*4``."""
        lines: dict[tuple[int, str], list[str]] = {}
        for step in self.steps:
            lines.setdefault((step.level, step.phase), []).append(f"{step.result}={step.matrix}*{step.operand}")
        return "\n".join(f"{phase} {level}: {' '.join(words)}" for (level, phase), words in lines.items())


@checked
def full_levels(matrices: Annotated[int, AtLeast(0)]) -> int:
    """Up-sweep levels of the whole algorithm 1 over g and `matrices` Jacobians."""
    return max(0, (matrices + 1).bit_length() - 1)


@checked
def scan_plan(
    matrices: Annotated[int, AtLeast(0), AtMost(MOST_MATRICES)], levels: Annotated[int, AtLeast(0)] | None = None
) -> ScanPlan:
    """The modified Blelloch scan with `levels` up-sweep levels.

    `levels=None` is algorithm 1 whole, 0 is back-propagation (the paper's linear scan). In between lies the hybrid of
    section 5.3 (the published code's L_m): up-sweep inside blocks of ``2**levels``, linear scan over the blocks,
    down-sweep inside the blocks. More levels than algorithm 1 has change nothing. Products that algorithm 1 overwrites
    on line 9 (those into the last slot) and products by the identity are no steps.

    Raises:
        ValueError: negative numbers, or more matrices than a list of them could be made for.
    """
    most = full_levels(matrices)
    levels = most if levels is None else min(levels, most)
    # the slots of algorithm 1; the one that its line 9 overwrites is past the end, so that M_m ... M_1 g comes out too
    last = matrices + 1
    slots: list[int | None] = [*range(last), None]
    vectors = {0}
    steps: list[Multiply] = []
    level = 0

    def multiply(matrix: int, operand: int, phase: Phase) -> int:
        result = last + len(steps)
        if operand in vectors:
            vectors.add(result)
        steps.append(Multiply(matrix, operand, result, level, phase, operand in vectors))
        return result

    def pairs(depth: int) -> list[tuple[int, int]]:
        starts = range(0, last - 2**depth + 1, 2 ** (depth + 1))
        return [(i + 2**depth - 1, min(i + 2 ** (depth + 1) - 1, last)) for i in starts]

    for depth in range(levels):
        for left, right in pairs(depth):
            one, other = slots[left], slots[right]
            if right != last and one is not None and other is not None:
                slots[right] = multiply(other, one, "up")
        level += 1
    before: int | None = None
    for start in range(0, last - 2**levels + 1, 2**levels):
        at = start + 2**levels - 1
        root = slots[at]
        slots[at] = before
        assert root is not None
        if before is None:
            before = root
        else:
            before = multiply(root, before, "linear")
            level += 1
    slots[last] = before
    for depth in reversed(range(levels)):
        for left, right in pairs(depth):
            matrix, slots[left] = slots[left], slots[right]
            vector = slots[right]
            assert matrix is not None
            slots[right] = matrix if vector is None else multiply(matrix, vector, "down")
        level += 1
    gradients = tuple(slot for slot in slots[1:] if slot is not None)
    assert len(gradients) == matrices + 1
    return ScanPlan(matrices, levels, tuple(steps), gradients)


# Floating-point operations of each step of a scan, by static analysis of the patterns (section 4.3 and Figure 10).


@dataclass(frozen=True)
class StepFlop:
    """One step of a scan.

    Attributes:
        step: which product.
        kind: "mv" matrix times vector, "mm" matrix times matrix.
        flop: multiplications and additions with stored entries only.
        dense_size: m * n * k of the same product without sparsity, the horizontal axis of Figure 10.
        critical: whether it lies on the longest path from g to the last gradient, if every step may start as soon as
            its factors are there.
    """

    step: Multiply
    kind: Literal["mv", "mm"]
    flop: int
    dense_size: int
    critical: bool


def flop_of_product(left: CsrPattern, right: CsrPattern) -> int:
    """2 * sum over k of (entries of A's column k) * (entries of B's row k)."""
    return 2 * product_count(left, right)


def flop_of_vector(matrix: CsrPattern) -> int:
    """2 * entries: a gradient vector is taken as dense."""
    return 2 * matrix.entries


def count_flops(plan: ScanPlan, patterns: Sequence[CsrPattern]) -> list[StepFlop]:
    """The cost of every step of ``plan`` for one sample; ``patterns`` of M_1 .. M_m.

    Raises:
        ValueError: another number of patterns than the plan has matrices, or shapes that do not fit.
    """
    if len(patterns) != plan.matrices:
        raise ValueError(f"the plan is for {plan.matrices} Jacobians, not for {len(patterns)}")
    pattern_of = dict(enumerate(patterns, start=1))
    costs: list[tuple[int, int]] = []
    for step in plan.steps:
        matrix = pattern_of[step.matrix]
        if step.is_vector:
            costs.append((flop_of_vector(matrix), matrix.rows * matrix.columns))
        else:
            operand = pattern_of[step.operand]
            costs.append((flop_of_product(matrix, operand), matrix.rows * matrix.columns * operand.columns))
            pattern_of[step.result] = product_pattern(matrix, operand)
    critical = longest_path(plan, [flop for flop, _ in costs])
    return [
        StepFlop(step, "mv" if step.is_vector else "mm", flop, size, step.result in critical)
        for step, (flop, size) in zip(plan.steps, costs, strict=True)
    ]


def longest_path(plan: ScanPlan, flops: Sequence[int]) -> set[int]:
    """Results of the steps on the path that needs the most operations, with as many workers as there are steps."""
    finished: dict[int, int] = {}
    waited_for: dict[int, int] = {}
    for step, flop in zip(plan.steps, flops, strict=True):
        latest = max((step.matrix, step.operand), key=lambda number: finished.get(number, 0))
        waited_for[step.result] = latest
        finished[step.result] = finished.get(latest, 0) + flop
    path: set[int] = set()
    at = max(finished, key=lambda number: finished[number], default=None)
    while at is not None and at in waited_for:
        path.add(at)
        at = waited_for[at]
    return path


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
        pattern_of = dict(enumerate(patterns, start=1))
        self._plans: list[ProductPlan | VectorPlan] = []
        for step in self.plan.steps:
            if step.is_vector:
                self._plans.append(VectorPlan(pattern_of[step.matrix]))
            else:
                product = ProductPlan(pattern_of[step.matrix], pattern_of[step.operand])
                pattern_of[step.result] = product.pattern
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
        results: dict[int, Tensor] = {0: gradient, **dict(enumerate(values, start=1))}
        needed_until = {number: index for index, step in enumerate(self.plan.steps) for number in _read_by(step)}
        keep = set(self.plan.gradients)
        for index, (step, plan) in enumerate(zip(self.plan.steps, self._plans, strict=True)):
            results[step.result] = plan(results[step.matrix], results[step.operand])
            for number in _read_by(step):
                if needed_until[number] == index and number not in keep:
                    results.pop(number, None)
        return [results[number] for number in self.plan.gradients]

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
