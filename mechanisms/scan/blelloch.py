"""The paper's scan (Algorithm 1) over affine maps, whole or cut off after some levels (section 5.3)."""

from typing import Annotated

import torch
from torch import Tensor

from retime.foundations.arguments import AtLeast, checked
from retime.mechanisms.scan.local_jacobians import LocalJacobians


class Blelloch:
    """Theta(log T) dependent steps over dense Jacobians: ``T * B * S * S`` numbers of memory.

    Element ``s`` is the map ``v -> v J[T-1-s] + g[T-2-s]``. Up-sweep: neighbours are composed, level by level.
    Down-sweep: what reaches a pair reaches its left half as it is, and its right half through the left one: the
    reversed operands of line 13.

    Args:
        levels: levels of the up-sweep before a linear scan takes over. None: all of them.
    """

    safe = False

    @checked
    def __init__(self, levels: Annotated[int, AtLeast(1)] | None = None) -> None:
        self.levels = levels

    def __repr__(self) -> str:
        return "blelloch" if self.levels is None else f"truncated({self.levels})"

    def solve(self, jacobians: LocalJacobians, gradient: Tensor) -> tuple[Tensor, Tensor]:
        maps = jacobians.dense()[1:].flip(0)
        offsets = gradient[:-1].flip(0)
        levels = [(maps, offsets)]
        while maps.shape[0] > 1 and (self.levels is None or len(levels) <= self.levels):
            pairs = maps.shape[0] // 2
            left, right = maps[: 2 * pairs : 2], maps[1 : 2 * pairs : 2]
            composed = left @ right
            offset = apply(right, offsets[: 2 * pairs : 2], offsets[1 : 2 * pairs : 2])
            unpaired = 2 * pairs
            maps, offsets = torch.cat([composed, maps[unpaired:]]), torch.cat([offset, offsets[unpaired:]])
            levels.append((maps, offsets))
        reaching = _linear(maps, offsets, gradient[-1])
        for maps, offsets in reversed(levels[:-1]):
            pairs = maps.shape[0] // 2
            below = torch.empty_like(offsets)
            below[::2] = reaching
            below[1::2] = apply(maps[: 2 * pairs : 2], reaching[:pairs], offsets[: 2 * pairs : 2])
            reaching = below
        last = apply(maps[-1:], reaching[-1:], offsets[-1:]) if len(maps) else gradient[-1:]
        v = torch.cat([reaching, last]).flip(0) if len(maps) else last
        return v, jacobians.step_mv(0, v[0])


def apply(maps: Tensor, v: Tensor, offsets: Tensor) -> Tensor:
    """``v J + g`` for every element: ``[n, B, S, S]``, ``[n, B, S]``, ``[n, B, S]``."""
    return (v.unsqueeze(-2) @ maps).squeeze(-2) + offsets


def _linear(maps: Tensor, offsets: Tensor, first: Tensor) -> Tensor:
    """What reaches each element, one after another: ``[n, B, S]``."""
    if maps.shape[0] == 0:
        return offsets
    reaching = torch.empty_like(offsets)
    reaching[0] = first
    for s in range(1, maps.shape[0]):
        reaching[s] = apply(maps[s - 1], reaching[s - 1], offsets[s - 1])
    return reaching
