"""Backward as a scan: which products, on which level (Wang et al. 2020, section 3.2 and algorithm 1).

Legend: g the gradient of the last output; M_1 .. M_m the transposed Jacobians from the last layer to the first. Wanted
are g, M_1 g, M_2 M_1 g, ..., M_m ... M_1 g: all gradients that back-propagation computes one after another.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from retime.foundations.arguments import AtLeast, AtMost, checked

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
