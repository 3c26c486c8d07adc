"""Numbers of bytes, as people write them."""

from typing import Any

import numpy as np
import pytest

import retime
from retime.foundations.messages import parse_bytes


@pytest.mark.parametrize(
    ("size", "count"),
    [
        (1, 1),
        (np.int32(2**30), 2**30),
        ("1", 1),
        ("1MiB", 2**20),
        (" 500 MB ", 500 * 10**6),
        ("1.5gib", 3 * 2**29),
        ("9" * 30, int("9" * 30)),
    ],
)
def test_reads(size: int | str, count: int) -> None:
    assert parse_bytes("bucket_bytes", size) == count


@pytest.mark.parametrize(
    ("size", "error"),
    [(0, ValueError), (-1, ValueError), ("0MiB", ValueError), ("lots", ValueError), ("90%", ValueError),
     ("-1MiB", ValueError), (True, TypeError), (1.5, TypeError), (float("nan"), TypeError), (None, TypeError)],
)  # fmt: skip
def test_refuses_by_the_arguments_name(size: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match=r"bucket_bytes="):
        parse_bytes("bucket_bytes", size)


def test_budgets_may_be_numpys() -> None:
    assert retime.MemoryBudgetStrategy(budget=np.int64(2**20))._budget == 2**20
