"""The k that a checkpoint brings is data from outside: what is off is dropped with one warning."""

import math
from typing import Any

import pytest

from retime import NoEffectWarning
from retime.mechanisms.out_of_order import OutOfOrderReport
from retime.mechanisms.out_of_order.k_search import SavedK, read_saved_k

GOOD: dict[str, Any] = {"k": 2, "blocks": 5, "bucket_cap_mb": 4, "world_size": 2}


def test_what_was_kept_comes_back() -> None:
    saved = SavedK(2, 5, 4.0, 2)
    assert read_saved_k(saved.state()) == saved
    assert read_saved_k(GOOD) == saved


@pytest.mark.parametrize(
    "found",
    [
        None,
        3,
        [],
        {},
        {"k": 2},
        GOOD | {"more": 1},
        {1: 2},
        *[GOOD | {name: bad} for name in ("k", "blocks", "world_size") for bad in ("2", None, True, 2.0, [2])],
        *[GOOD | {"k": bad} for bad in (-1, 6, 10**30)],
        *[GOOD | {"bucket_cap_mb": bad} for bad in (0, -1, math.nan, math.inf, 10**30, "4", None, True)],
    ],
    ids=str,
)
def test_anything_off_is_dropped_with_one_warning(found: Any) -> None:
    with pytest.warns(NoEffectWarning, match="k of an earlier run has no effect, and k is searched for") as caught:
        assert read_saved_k(found) is None
    assert len(caught) == 1


def test_a_report_says_what_it_counts():
    text = " ".join(str(OutOfOrderReport(buffered_layers={"several kernels": 4}, in_order={"k is 0": 2})).split())
    assert "sent later because several kernels 2 backward passes in order because k is 0" in text
