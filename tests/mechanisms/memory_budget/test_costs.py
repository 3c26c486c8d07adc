"""What a process has beyond tensors, measured at two sizes: it is not taken to grow where the counts are noise."""

from retime.mechanisms.memory_budget.costs import Scratch, rest_between

KIB = 1024


def rest(nbytes: int) -> Scratch:
    return Scratch({}, nbytes, 0)


def test_noise_does_not_grow_with_the_batch() -> None:
    between = rest_between(rest(1 * KIB), rest(44 * KIB), 32, 64)
    assert between.at(32) == between.at(256) == 44 * KIB
    between = rest_between(rest(44 * KIB), rest(0), 32, 64)
    assert between.at(32) == between.at(256) == 44 * KIB


def test_more_than_noise_does() -> None:
    between = rest_between(rest(100 * KIB), rest(300 * KIB), 32, 64)
    assert between.at(128) == 700 * KIB
