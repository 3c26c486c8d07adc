"""What each rank decides by itself: numbers come back as they are, and a group that was given stays its owner's."""

import pytest
import torch
import torch.distributed as dist

from retime.foundations.ddp import RankAgreement

pytestmark = pytest.mark.usefixtures("one_rank")


@pytest.mark.parametrize("number", [0.25, -3.5, 0.0, float(2**32 - 1), float(2**53)])
def test_numbers_come_back_as_they_are(number: float) -> None:
    assert RankAgreement().largest(lambda: number, "choose") == number


def test_a_given_group_is_used_and_left() -> None:
    group = dist.new_group([0])
    agreement = RankAgreement(group=group)
    assert agreement.largest(lambda: 1.5, "choose") == 1.5
    agreement.close()
    dist.all_reduce(torch.ones(1), group=group)


def test_an_error_is_raised_where_it_happened() -> None:
    def fails() -> float:
        raise ZeroDivisionError("here")

    with pytest.raises(ZeroDivisionError, match="here"):
        RankAgreement(group=dist.group.WORLD).largest(fails, "choose")
