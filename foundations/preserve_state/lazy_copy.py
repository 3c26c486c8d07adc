"""Copies that take memory only once they are written into."""

from __future__ import annotations

from torch import Tensor, nn

from retime.foundations.storages import has_storage
from retime.foundations.torch_private import lazy_clone

__all__ = ["LARGE_BYTES", "lazy_copy"]

LARGE_BYTES = 2**20
"""A model's tables and masks may be as large as the model; its counters and sums are small."""


def lazy_copy(tensor: Tensor) -> Tensor:
    """The same values for whoever may write into them; a large tensor shares its memory until somebody does."""
    tensor = tensor.detach()
    if type(tensor) in (Tensor, nn.Parameter) and has_storage(tensor) and tensor.nbytes > LARGE_BYTES:
        try:
            return lazy_clone(tensor)
        except RuntimeError:  # memory that is not torch's own: NumPy's, say, or a file's
            pass
    return tensor.clone()
