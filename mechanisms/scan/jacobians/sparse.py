"""Products of sparse matrices with the symbolic phase done once (Wang et al. 2020, section 3.3).

Legend: A is R x K, B is K x C, P scalar products a[i, k] * b[k, j] with both factors stored, S samples.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import torch
from torch import Tensor

# Where a sparse matrix has its entries, in Compressed Sparse Row (CSR) form.
#
# Legend: R rows, C columns, n stored entries (zeros may be among their values).


@dataclass(frozen=True, eq=False)
class CsrPattern:
    """Positions of the entries of an R x C matrix, row by row and ascending inside a row.

    For a transposed Jacobian these are all places that are not *guaranteed* zeros: they follow from the layer and its
    input shape alone (Wang et al. 2020, section 3.3), so one pattern serves every iteration.

    Attributes:
        rows: R.
        columns: C.
        indptr: int64 ``(R + 1,)``; row r owns the entries ``indptr[r]:indptr[r + 1]``.
        indices: int64 ``(n,)``, the column of each entry.
    """

    rows: int
    columns: int
    indptr: Tensor
    indices: Tensor

    def __post_init__(self) -> None:
        if self.rows < 0 or self.columns < 0:
            raise ValueError(f"rows={self.rows}, columns={self.columns}: give 0 or more")
        for name, tensor in (("indptr", self.indptr), ("indices", self.indices)):
            if tensor.dtype != torch.int64 or tensor.dim() != 1:
                raise ValueError(f"{name} is {list(tensor.shape)} {tensor.dtype}: give one dimension of torch.int64")
        if len(self.indptr) != self.rows + 1:
            raise ValueError(f"indptr has {len(self.indptr)} numbers: {self.rows} rows need {self.rows + 1}")

    @classmethod
    def from_coordinates(cls, rows: int, columns: int, row_of: Tensor, column_of: Tensor) -> tuple[CsrPattern, Tensor]:
        """The pattern of entries at ``(row_of, column_of)``, both int64 ``(n,)``, and the order that sorts them.

        ``values[order]`` puts values listed like the coordinates into the pattern's order. No place may occur twice.
        """
        place, order = torch.sort(row_of * columns + column_of)
        counts = torch.bincount(torch.div(place, columns, rounding_mode="floor"), minlength=rows)
        return cls(rows, columns, _offsets(counts), place % columns), order

    @classmethod
    def diagonal(cls, size: int) -> CsrPattern:
        """The diagonal of a square matrix (appendix D.2, algorithms 5 and 6)."""
        return cls(size, size, torch.arange(size + 1), torch.arange(size))

    @classmethod
    def full(cls, rows: int, columns: int, device: torch.device | None = None) -> CsrPattern:
        """Every place of the matrix."""
        indptr = torch.arange(0, rows * columns + 1, columns, device=device)
        return cls(rows, columns, indptr, torch.arange(columns, device=device).repeat(rows))

    @property
    def entries(self) -> int:
        """n, the number of stored entries."""
        return self.indices.numel()

    @property
    def sparsity(self) -> float:
        """Share of guaranteed zeros among all R * C places (the paper's Table 1)."""
        return 1 - self.entries / (self.rows * self.columns)

    @property
    def is_full(self) -> bool:
        """Return whether every place is stored, so that the values are a dense matrix in row-major order."""
        return self.entries == self.rows * self.columns

    @cached_property
    def row_counts(self) -> Tensor:
        """Entries of each row, int64 ``(R,)``."""
        return self.indptr.diff()

    @cached_property
    def column_counts(self) -> Tensor:
        """Entries of each column, int64 ``(C,)``."""
        return torch.bincount(self.indices, minlength=self.columns)

    @cached_property
    def row_of(self) -> Tensor:
        """Row of each entry, int64 ``(n,)``."""
        return torch.arange(self.rows, device=self.indices.device).repeat_interleave(self.row_counts)

    def only(self, kept: Tensor) -> CsrPattern:
        """The pattern of those entries for which the bool ``kept`` ``(n,)`` is true."""
        counts = torch.bincount(self.row_of[kept], minlength=self.rows)
        return CsrPattern(self.rows, self.columns, _offsets(counts), self.indices[kept])

    def to(self, device: torch.device) -> CsrPattern:
        """The same pattern on another device."""
        return CsrPattern(self.rows, self.columns, self.indptr.to(device), self.indices.to(device))


def _offsets(counts: Tensor) -> Tensor:
    return torch.cat([counts.new_zeros(1), counts.cumsum(0)])


# A pattern with its values: the transposed Jacobians of a batch.
#
# Legend: R rows, C columns, n stored entries, S 1 if all samples share the values (they depend on weights only) or B.


@dataclass(frozen=True, eq=False)
class SparseJacobian:
    """Transposed Jacobians of one layer for every sample of a batch, all with one pattern.

    Attributes:
        pattern: R inputs by C outputs of one sample.
        values: ``(n, S)``. Samples come last, so that picking entries copies contiguous rows.
    """

    pattern: CsrPattern
    values: Tensor

    def without_zeros(self, sample: int = 0) -> CsrPattern:
        """The places of one sample that hold something else than zero.

        The paper's Figure 10 counts these; they change with the input where a ReLU or a max-pooling is involved.
        """
        column = min(sample, self.values.shape[1] - 1)
        return self.pattern.only(self.values[:, column] != 0)


def dense_values(pattern: CsrPattern, values: Tensor) -> Tensor:
    """``(R, C, S)`` from the values ``(n, S)`` of a pattern; a view if the pattern is full."""
    samples = values.shape[1]
    if not pattern.is_full:
        place = pattern.row_of * pattern.columns + pattern.indices
        values = values.new_zeros(pattern.rows * pattern.columns, samples).index_copy(0, place, values)
    return values.view(pattern.rows, pattern.columns, samples)


# Sums of products at precomputed places: the numeric phase of a sparse product.
#
# Legend: P products, M sums, S samples.

PRODUCTS_AT_A_TIME = 2**13
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
        self._groups: list[_Group] = []
        self._back: Tensor | None = None
        self._sums = counts.numel()
        first = counts.cumsum(0) - counts
        order = torch.argsort(counts, stable=True)
        lengths, sizes = torch.unique_consecutive(counts[order], return_counts=True)
        done = 0
        for length, members in zip(lengths.tolist(), torch.split(order, sizes.tolist()), strict=True):
            for some in torch.split(members, max(1, PRODUCTS_AT_A_TIME // max(1, length))):
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


DENSE_GAIN = 8
"""A dense GEMM forms about this many products while the sparse numeric phase forms one."""
LISTED_AT_A_TIME = 2**24
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
        self.is_dense = product_count(left, right) * DENSE_GAIN > left.rows * left.columns * right.columns
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
    targets = torch.arange(0, int(counts.sum()), LISTED_AT_A_TIME, device=device)
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
