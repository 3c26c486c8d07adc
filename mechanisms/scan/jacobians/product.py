"""Products of sparse matrices with the symbolic phase done once (Wang et al. 2020, section 3.3).

Legend: A is R x K, B is K x C, P scalar products a[i, k] * b[k, j] with both factors stored, S samples.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import torch
from torch import Tensor

from retime.mechanisms.scan.jacobians.matrix import dense_values
from retime.mechanisms.scan.jacobians.pattern import CsrPattern
from retime.mechanisms.scan.jacobians.sums import SumOfProducts

DENSE_GAIN = 8
"""A dense GEMM forms about this many products while the sparse numeric phase forms one."""
CHUNK = 2**24
"""Scalar products that the symbolic phase lists at a time."""


def product_count(left: CsrPattern, right: CsrPattern) -> int:
    """P, the scalar products of A B: the sum over k of (entries of A's column k) * (entries of B's row k)."""
    _check(left, right)
    return int((left.column_counts * right.row_counts).sum())


def product_pattern(left: CsrPattern, right: CsrPattern) -> CsrPattern:
    """The pattern of A B, without values.

    Raises:
        ValueError: A has not as many columns as B has rows.
    """
    _check(left, right)
    if left.is_full and right.is_full:
        return CsrPattern.full(left.rows, right.columns, left.indices.device)
    places = [torch.unique(place) for _, _, place in _products(left, right)]
    place = torch.cat(places) if places else left.indices.new_zeros(0)
    row_of = torch.div(place, right.columns, rounding_mode="floor")
    return CsrPattern.from_coordinates(left.rows, right.columns, row_of, place % right.columns)[0]


class ProductPlan:
    """A B for fixed patterns: the constructor is the symbolic phase, a call the numeric one.

    Where the scalar products are no small share of R * K * C, the numeric phase is a dense GEMM.

    Raises:
        ValueError: A has not as many columns as B has rows.
    """

    def __init__(self, left: CsrPattern, right: CsrPattern) -> None:
        self.left, self.right = left, right
        self.products = product_count(left, right)
        self.is_dense = self.products * DENSE_GAIN > left.rows * left.columns * right.columns
        if self.is_dense:
            self.pattern = product_pattern(left, right)
            return
        parts = list(_products(left, right))
        empty = left.indices.new_zeros(0)
        left_of, right_of, place = (torch.cat([empty, *(part[i] for part in parts)]) for i in range(3))
        place, order = torch.sort(place, stable=True)
        place, counts = torch.unique_consecutive(place, return_counts=True)
        row_of = torch.div(place, right.columns, rounding_mode="floor")
        self.pattern, _ = CsrPattern.from_coordinates(left.rows, right.columns, row_of, place % right.columns)
        self._sums = SumOfProducts(left_of[order], right_of[order], counts)

    def __call__(self, left: Tensor, right: Tensor) -> Tensor:
        """Values of A B, ``(entries, S)``, from the values of A and B, each ``(entries, S or 1)``."""
        if not self.is_dense:
            return self._sums(left, right)
        out = _dense_product(dense_values(self.left, left), dense_values(self.right, right))
        out = out.reshape(-1, out.shape[-1])
        if self.pattern.is_full:
            return out
        return out.index_select(0, self.pattern.row_of * self.pattern.columns + self.pattern.indices)


class VectorPlan:
    """A v for a fixed pattern of A and a dense vector a sample."""

    def __init__(self, matrix: CsrPattern) -> None:
        self.matrix = matrix
        if not matrix.is_full:
            entry = torch.arange(matrix.entries, device=matrix.indices.device)
            self._sums = SumOfProducts(entry, matrix.indices, matrix.row_counts)

    def __call__(self, values: Tensor, vector: Tensor) -> Tensor:
        """``(R, B)`` from values ``(entries, S)`` and vectors ``(K, B)``."""
        if not self.matrix.is_full:
            return self._sums(values, vector)
        dense = dense_values(self.matrix, values)
        if dense.shape[2] == 1:
            return dense[:, :, 0] @ vector
        return torch.einsum("rkb,kb->rb", dense, vector)


def _dense_product(left: Tensor, right: Tensor) -> Tensor:
    """``(R, C, S)`` from ``(R, K, S or 1)`` and ``(K, C, S or 1)``."""
    if left.shape[2] == 1:
        out = left[:, :, 0] @ right.reshape(right.shape[0], -1)
        return out.view(left.shape[0], *right.shape[1:])
    if right.shape[2] == 1:
        return torch.einsum("rkb,kc->rcb", left, right[:, :, 0])
    return torch.einsum("rkb,kcb->rcb", left, right)


def _products(left: CsrPattern, right: CsrPattern) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Entry of A, entry of B and place ``row * C + column`` in A B of every scalar product, by rows of A, in chunks."""
    counts = right.row_counts[left.indices]
    before = counts.cumsum(0) - counts
    device = left.indices.device
    # a chunk begins at a whole row of A, so that no place occurs in two chunks
    targets = torch.arange(0, int(counts.sum()), CHUNK, device=device)
    entries = torch.searchsorted(before, targets, right=True) - 1
    rows = torch.searchsorted(left.indptr, entries, right=True) - 1
    cuts = sorted({0, *left.indptr[rows].tolist(), left.entries})
    for start, stop in pairwise(cuts):
        here = counts[start:stop]
        left_of = torch.arange(start, stop, device=device).repeat_interleave(here)
        within = torch.arange(left_of.numel(), device=device) - (before[left_of] - before[start])
        right_of = right.indptr[left.indices[left_of]] + within
        yield left_of, right_of, left.row_of[left_of] * right.columns + right.indices[right_of]


def _check(left: CsrPattern, right: CsrPattern) -> None:
    if left.columns != right.rows:
        raise ValueError(
            f"cannot multiply {left.rows} x {left.columns} by {right.rows} x {right.columns}: list the Jacobians from "
            "the last layer to the first"
        )
