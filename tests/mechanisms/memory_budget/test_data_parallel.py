"""What DistributedDataParallel holds beside a model; on real ranks in strategies/memory_budget/test_ddp.py."""

import pytest
from torch import nn

from retime.mechanisms.memory_budget.data_parallel import (
    _piece_bytes,
    _sizes,
    bucket_bytes,
    buckets_of,
    reduction_bytes,
)

MIB = 2**20


def test_a_bare_model_has_no_buckets() -> None:
    for model in (None, nn.Linear(3, 2)):
        assert (buckets_of(model), bucket_bytes(model), reduction_bytes(model)) == ("", 0, 0)


@pytest.mark.parametrize(
    ("total", "cap", "sizes"),
    [(0, 25, []), (MIB // 2, 25 * MIB, [MIB // 2]), (30 * MIB, 25 * MIB, [MIB, 25 * MIB, 4 * MIB]), (4, 2, [2, 2])],
)
def test_sizes_of_buckets(total: int, cap: int, sizes: list[int]) -> None:
    assert list(_sizes(total, cap)) == sizes


@pytest.mark.parametrize(
    ("nbytes", "ranks", "piece"), [(MIB, 2, MIB // 4), (5 * MIB, 2, -(-5 * MIB // 6)), (64 * MIB, 2, MIB), (100, 4, 13)]
)
def test_pieces_of_a_ring_are_no_larger_than_a_mebibyte(nbytes: int, ranks: int, piece: int) -> None:
    assert _piece_bytes(nbytes, ranks) == piece
