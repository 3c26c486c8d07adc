"""Ranks of a pipeline, and pipelines."""

import pytest

from retime.mechanisms.pipeline import sizes_of


def test_sizes() -> None:
    assert sizes_of(4, "auto", "auto") == (4, 1)
    assert sizes_of(4, "auto", 2) == (2, 2)
    assert sizes_of(4, 2, "auto") == (2, 2)
    assert sizes_of(1, "auto", "auto") == (1, 1)
    with pytest.raises(ValueError, match=r"make 6 ranks, and there are 4"):
        sizes_of(4, 3, 2)
    with pytest.raises(ValueError, match=r"make 3 ranks, and there are 4"):
        sizes_of(4, 3, "auto")
