"""Who updates what: by bytes, whole parameters, for good."""

import torch

from retime.mechanisms.cpu_accumulation.host_update import Shares


def tensors(*sizes: int) -> list[torch.Tensor]:
    return [torch.empty(size) for size in sizes]


def test_the_largest_go_first_to_who_has_least() -> None:
    given = tensors(1, 6, 2, 5, 3)
    shares = Shares(2, given)
    assert shares.give_out(given) == given
    assert [shares.owner(one) for one in given] == [0, 0, 0, 1, 1]
    assert shares.bytes == [36, 32]


def test_what_comes_later_moves_nothing() -> None:
    first, later = tensors(4, 2), tensors(8, 1)
    shares = Shares(2, [*first, *later])
    shares.give_out(first)
    assert shares.give_out([*later, *first]) == later
    assert [shares.owner(one) for one in (*first, *later)] == [0, 1, 1, 0]


def test_what_cannot_be_divided_belongs_to_all() -> None:
    divisible, other = tensors(4, 4)
    shares = Shares(2, [divisible])
    assert shares.give_out([divisible, other]) == [divisible]
    assert shares.owner(other) is None
    assert not shares.may_divide(other)
