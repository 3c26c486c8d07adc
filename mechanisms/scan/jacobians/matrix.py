"""A pattern with its values: the transposed Jacobians of a batch.

Legend: R rows, C columns, n stored entries, S 1 if all samples share the values (they depend on weights only) or B.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from retime.mechanisms.scan.jacobians.pattern import CsrPattern


@dataclass(frozen=True, eq=False)
class SparseJacobian:
    """Transposed Jacobians of one layer for every sample of a batch, all with one pattern.

    Attributes:
        pattern: R inputs by C outputs of one sample.
        values: ``(n, S)``. Samples come last, so that picking entries copies contiguous rows.
    """

    pattern: CsrPattern
    values: Tensor

    def dense(self) -> Tensor:
        """``(S, R, C)``, zeros included; for small matrices and tests."""
        return dense_values(self.pattern, self.values).permute(2, 0, 1).contiguous()

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
