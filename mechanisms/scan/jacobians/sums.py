"""Sums of products at precomputed places: the numeric phase of a sparse product.

Legend: P products, M sums, S samples.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

CHUNK = 2**13
"""Products of one sample that are formed at a time: bounds the temporary memory to S times as many numbers."""


class SumOfProducts:
    """``out[m] = sum over p with target m of left[a[p]] * right[b[p]]`` for a fixed list of products.

    Sums with equally many terms are formed together, as one gather, one multiplication and one reduction. No atomic
    additions: the result is the same bits every time, on a GPU too.

    Args:
        left_of: int64 ``(P,)``, row of the left factor; products of one sum lie side by side.
        right_of: int64 ``(P,)``, row of the right factor.
        counts: int64 ``(M,)``, number of products of each sum; may be 0.
    """

    def __init__(self, left_of: Tensor, right_of: Tensor, counts: Tensor) -> None:
        self.products = left_of.numel()
        self._groups: list[_Group] = []
        self._back: Tensor | None = None
        self._sums = counts.numel()
        first = counts.cumsum(0) - counts
        order = torch.argsort(counts, stable=True)
        lengths, sizes = torch.unique_consecutive(counts[order], return_counts=True)
        done = 0
        for length, members in zip(lengths.tolist(), torch.split(order, sizes.tolist()), strict=True):
            for some in torch.split(members, max(1, CHUNK // max(1, length))):
                place = (torch.arange(length, device=first.device)[:, None] + first[some]).flatten()
                sums = slice(done, done + some.numel())
                self._groups.append(_Group(sums, length, _Pick(left_of[place]), _Pick(right_of[place])))
                done += some.numel()
        if lengths.numel() > 1:
            steps = torch.arange(order.numel(), device=order.device)
            self._back = torch.empty_like(order).index_copy_(0, order, steps)

    def __call__(self, left: Tensor, right: Tensor) -> Tensor:
        """``(M, S)`` from factors ``(rows, S)``; S may be 1 on either side and is then broadcast."""
        samples = max(left.shape[1], right.shape[1])
        out = left.new_empty(self._sums, samples)
        for group in self._groups:
            group.write(left, right, out[group.sums])
        return out if self._back is None else out.index_select(0, self._back)


class _Pick:
    """Some rows of a tensor; without a copy where they lie side by side."""

    def __init__(self, rows: Tensor) -> None:
        self._rows: Tensor | slice = rows
        if rows.numel() and bool((rows.diff() == 1).all()):
            self._rows = slice(int(rows[0]), int(rows[-1]) + 1)

    def __call__(self, values: Tensor) -> Tensor:
        return values[self._rows] if isinstance(self._rows, slice) else values.index_select(0, self._rows)


@dataclass(frozen=True)
class _Group:
    """Sums of equally many terms: term by term, all sums side by side."""

    sums: slice
    length: int
    left: _Pick
    right: _Pick

    def write(self, left: Tensor, right: Tensor, out: Tensor) -> None:
        """Put the sums into ``out`` ``(sums, S)``."""
        if self.length == 0:
            out.zero_()
        elif self.length == 1:
            torch.mul(self.left(left), self.right(right), out=out)
        else:
            terms = self.left(left) * self.right(right)
            torch.sum(terms.view(self.length, *out.shape), 0, out=out)
