"""The transfer stream: gaps are filled, nothing overlaps."""

import random

from retime.schedules.modnn.resources import TransferLane


def test_copies_go_into_the_first_gap_that_holds_them():
    lane = TransferLane()
    assert lane.book(0, 2) == 0
    assert lane.book(6, 2) == 6
    assert lane.place([(0, 3), (0, 3), (0, 5)]) == [2, 8, 11], "3 ms fit between 2 and 6 once"
    assert lane.free_ms == 8, "place books nothing"
    assert lane.book(0, 5) == 8
    assert lane.book(0, 4) == 2
    assert lane.book(0, 1) == 13
    assert lane.free_ms == 14


def test_not_before_it_is_ready():
    lane = TransferLane()
    assert lane.book(3, 1) == 3
    assert lane.book(1, 1) == 1
    assert lane.place([(1.5, 1)]) == [2]
    assert lane.book(3.5, 1) == 4
    assert lane.place([(20, 0)]) == [20]
    assert lane.book(20, 0) == 20
    assert lane.free_ms == 5, "a copy that takes no time occupies nothing"


def test_against_a_calendar_of_whole_milliseconds():
    rng = random.Random(3)
    for _ in range(30):
        lane, busy = TransferLane(), set()
        for _ in range(60):
            requests = [(rng.randint(0, 100), rng.randint(1, 6)) for _ in range(rng.randint(1, 3))]
            expected, taken = [], set(busy)
            for ready_ms, copy_ms in requests:
                start = next(at for at in range(ready_ms, 9999) if not taken & set(range(at, at + copy_ms)))
                taken |= set(range(start, start + copy_ms))
                expected.append(start)
            assert lane.place(requests) == expected
            if rng.random() < 0.5:
                assert [lane.book(*request) for request in requests] == expected
                busy = taken
                assert lane.free_ms == max(busy) + 1
