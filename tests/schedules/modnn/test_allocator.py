"""The allocator of section 3.3, the offloading schemes of Figure 6, and the transfer stream."""

import random
from itertools import pairwise

import pytest

from retime.schedules import ScheduleError
from retime.schedules.modnn.resources import Pool, TransferLane, offload_runs


def layout(pool):
    return [(segment.offset, segment.size, segment.owner) for segment in pool.segments()]


def holes(*sizes):
    """A pool in which free segments of these sizes lie between blocks of one byte."""
    pool = Pool(sum(sizes) + len(sizes))
    taken = []
    for number, size in enumerate(sizes):
        taken.append(pool.allocate(size, number))
        pool.allocate(1, 100 + number)
    for segment in taken:
        pool.free(segment)
    return pool


def test_exact_size_before_first_fit():
    pool = holes(5, 3, 4)
    assert pool.find(3).offset == 6, "the hole of exactly 3 bytes, though 5 come first"
    assert pool.find(2).offset == 0, "no hole of exactly 2 bytes: the first that is large enough"
    assert pool.find(6) is None


def test_holes_count_for_the_high_water_mark_and_not_for_the_bytes_in_use():
    pool = Pool(12)
    below = pool.allocate(4, 0)
    pool.allocate(4, 1)
    pool.free(below)
    pool.allocate(2, 2)
    assert (pool.peak_bytes, pool.high_water_bytes) == (8, 8)


def test_would_fit_places_requests_one_after_another():
    pool = holes(5, 3)
    assert pool.would_fit([3, 3, 3]) == [True, True, False]
    assert pool.would_fit([6, 5]) == [False, True]
    assert pool.used_bytes == 2, "nothing was allocated"


def test_wrong_requests():
    with pytest.raises(ScheduleError, match="give 1 or more"):
        Pool(4).allocate(0, 1)
    with pytest.raises(ScheduleError, match="give 0 or more"):
        Pool(-1)
    pool = Pool(4)
    segment = pool.allocate(2, 1)
    pool.free(segment)
    with pytest.raises(ScheduleError, match="free already"):
        pool.free(segment)
    assert Pool(0).allocate(1, 1) is None


def test_figure_6():
    """Blocks 1 to 6; 4 must stay. For an allocation of size 4 the schemes are (1)(2) and (5)(6)."""
    pool = Pool(13)
    for number, size in enumerate((2, 2, 1, 3, 3, 2), start=1):
        pool.allocate(size, number)
    segments = list(pool.segments())
    runs = offload_runs(segments, 4, movable=lambda block: block != 4)
    assert [[segment.owner for segment in segments[a:b]] for a, b in runs] == [[1, 2], [5, 6]]


def test_runs_use_free_segments_and_are_shortest():
    pool = holes(2, 2)  # free 2, block 100, free 2, block 101
    segments = list(pool.segments())
    runs = list(offload_runs(segments, 3, movable=lambda _: True))
    assert runs == [(0, 2), (1, 3), (2, 4)]
    assert list(offload_runs(segments, 3, movable=lambda block: block == 100)) == [(0, 2), (1, 3)]
    assert list(offload_runs(segments, 7, movable=lambda _: True)) == []


def test_against_a_map_of_bytes():
    """The linked list against a plain array: same answers, no overlap, neighbours merged."""
    rng = random.Random(1)
    pool, segments, owners = Pool(64), {}, [None] * 64
    for number in range(3000):
        if segments and rng.random() < 0.5:
            segment = segments.pop(rng.choice(sorted(segments)))
            owners[segment.offset : segment.end] = [None] * segment.size
            pool.free(segment)
        else:
            size = rng.randint(1, 12)
            free = []
            for offset in range(64):
                if owners[offset] is None and (offset == 0 or owners[offset - 1] is not None):
                    end = next((at for at in range(offset, 64) if owners[at] is not None), 64)
                    free.append((offset, end - offset))
            expected = next((o for o, room in free if room == size), next((o for o, room in free if room > size), None))
            segment = pool.allocate(size, number)
            assert (segment.offset if segment else None) == expected
            if segment:
                assert owners[segment.offset : segment.end] == [None] * size
                owners[segment.offset : segment.end] = [number] * size
                segments[number] = segment
        pieces = layout(pool)
        assert [owner for _, size, owner in pieces for _ in range(size)] == owners
        assert all(a[2] is not None or b[2] is not None for a, b in pairwise(pieces))
        assert pool.used_bytes == sum(owner is not None for owner in owners)


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
