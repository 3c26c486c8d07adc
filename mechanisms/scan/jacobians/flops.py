"""Floating-point operations of each step of a scan, by static analysis of the patterns (section 4.3 and Figure 10)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from retime.mechanisms.scan.jacobians.pattern import CsrPattern
from retime.mechanisms.scan.jacobians.product import product_count, product_pattern
from retime.mechanisms.scan.jacobians.scan_plan import Multiply, ScanPlan


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
    known = dict(enumerate(patterns, start=1))
    costs: list[tuple[int, int]] = []
    for step in plan.steps:
        matrix = known[step.matrix]
        if step.is_vector:
            costs.append((flop_of_vector(matrix), matrix.rows * matrix.columns))
        else:
            operand = known[step.operand]
            costs.append((flop_of_product(matrix, operand), matrix.rows * matrix.columns * operand.columns))
            known[step.result] = product_pattern(matrix, operand)
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
    found: set[int] = set()
    at = max(finished, key=lambda number: finished[number], default=None)
    while at is not None and at in waited_for:
        found.add(at)
        at = waited_for[at]
    return found
