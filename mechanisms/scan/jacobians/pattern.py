"""Where a sparse matrix has its entries, in Compressed Sparse Row (CSR) form.

Legend: R rows, C columns, n stored entries (zeros may be among their values).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor


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
    def diagonal(cls, size: int, device: torch.device | None = None) -> CsrPattern:
        """The diagonal of a square matrix (appendix D.2, algorithms 5 and 6)."""
        return cls(size, size, torch.arange(size + 1, device=device), torch.arange(size, device=device))

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
        """Whether every place is stored, so that the values are a dense matrix in row-major order."""
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

    def same_as(self, other: CsrPattern) -> bool:
        """Whether both store exactly the same places of matrices of the same shape."""
        if (self.rows, self.columns) != (other.rows, other.columns):
            return False
        return torch.equal(self.indptr, other.indptr) and torch.equal(self.indices, other.indices)


def _offsets(counts: Tensor) -> Tensor:
    return torch.cat([counts.new_zeros(1), counts.cumsum(0)])
