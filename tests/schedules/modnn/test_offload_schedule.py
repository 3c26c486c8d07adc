"""Algorithm 1 against timelines worked out by hand: Figures 3, 5 and 7 of moDNN, Eq. 9 and Eq. 10."""

import pytest

from retime.schedules import ScheduleError
from retime.schedules.budget import Algorithm, Block, BlockKind, GraphTask, Phase, TaskGraph
from retime.schedules.modnn.device import Direction
from retime.schedules.modnn.offload_schedule import Techniques, offload_schedule
from support.schedules_memory import copies, judge

KINDS = {"i": BlockKind.INPUT, "w": BlockKind.WEIGHT}


def graph(sizes, *rows):
    """Blocks by name and bytes; rows ``name, ms, reads, writes`` with blocks in words, a row's ms may be algorithms."""
    blocks = {name: Block(name, KINDS.get(name[0], BlockKind.ACTIVATION), size) for name, size in sizes.items()}
    tasks = []
    for name, ms, reads, writes in rows:
        options = ms if isinstance(ms, tuple) else (Algorithm("only", ms),)
        tasks.append(GraphTask(name, Phase.FORWARD, name, tuple(reads.split()), tuple(writes.split()), options))
    return TaskGraph(blocks, tuple(tasks))


def run(built, budget, techniques=None, bandwidth=1.0):
    schedule = offload_schedule(built, 1, budget, bandwidth, techniques or Techniques.paper())
    judge(built, schedule)
    return schedule


def figure_3(middle_ms):
    """t makes a (4 bytes); u uses it; s needs its place; end uses it again."""
    return graph(
        {"a": 4, "b": 1, "c": 4, "d": 1},
        ("t", 2, "", "a"),
        ("u", middle_ms, "a", "b"),
        ("s", 3, "b", "c"),
        ("v", 8, "c", "d"),
        ("end", 1, "a d", ""),
    )


def test_figure_3a_offloading_delays_the_next_task():
    """compute   t-- u-      s---
    transfer     a----------
    """
    schedule = run(figure_3(1), 6)
    assert copies(schedule)[0] == ("offload", "a", 2, 6)
    assert schedule.start_ms["u"] == 2
    assert schedule.start_ms["s"] == 6
    assert (schedule.stalls[0].task, schedule.stalls[0].ms) == ("s", 3)


def test_figure_3b_offloading_is_hidden():
    """The copy starts when t has ended, though only s asks for the memory."""
    schedule = run(figure_3(5), 6)
    assert copies(schedule)[0] == ("offload", "a", 2, 6)
    assert schedule.start_ms["s"] == 7
    assert "s" not in {stall.task for stall in schedule.stalls}


def test_one_copy_overlaps_with_several_tasks():
    """Only necessary synchronisations, against Figure 4: the copy of a spans u and w, and neither waits."""
    built = graph(
        {"a": 4, "b": 1, "c": 1, "d": 3, "e": 1},
        ("t", 1, "", "a"),
        ("u", 2, "a", "b"),
        ("w", 2, "b", "c"),
        ("s", 1, "c", "d"),
        ("v", 9, "d", "e"),
        ("end", 1, "a e", ""),
    )
    schedule = run(built, 6)
    assert copies(schedule)[0] == ("offload", "a", 1, 5)
    assert [schedule.start_ms[name] for name in "tuwsv"] == [0, 1, 3, 5, 6]


def test_what_the_host_holds_is_only_freed():
    """a leaves twice and is copied out once; an input never is."""
    built = graph(
        {"a": 4, "i": 2, "b": 1, "c": 4, "d": 1, "e": 4, "f": 1},
        ("t", 1, "i", "a"),
        ("u", 9, "a i", "b"),
        ("s", 9, "b", "c"),
        ("v", 9, "c", "d"),
        ("back", 9, "a d", "b"),
        ("s2", 9, "b d", "e"),
        ("v2", 9, "e", "f"),
        ("end", 1, "a i f", ""),
    )
    schedule = run(built, 8)
    kinds = [(kind, block) for kind, block, _, _ in copies(schedule)]
    assert kinds.count(("offload", "a")) == 1
    assert kinds.count(("prefetch", "a")) == 2
    assert ("offload", "i") not in kinds
    assert kinds.count(("input", "i")) == 1
    assert schedule.offloaded == ("a",)
    assert schedule.moved_bytes(Direction.OFFLOAD) == 4
    assert schedule.moved_bytes(Direction.PREFETCH) == 4 * 2 + 2 * kinds.count(("prefetch", "i"))


def test_figure_5_a_block_used_next_stays():
    """a, b and c fill 6 bytes; s uses b next, so the room for d is a's or c's, never b's: a is used again last."""
    built = graph(
        {"a": 2, "b": 2, "c": 2, "d": 2},
        ("t", 9, "", "a b c"),
        ("u", 9, "a b c", ""),
        ("s", 1, "b", "d"),
        ("v", 1, "b d", ""),
        ("w", 9, "c", ""),
        ("end", 1, "a", ""),
    )
    schedule = run(built, 6)
    assert schedule.offloaded == ("a",)


def test_criterion_1_spares_blocks_that_no_task_has_used():
    """m is written for the last task alone. The paper's rule leaves nothing to offload, and defragments."""
    built = graph(
        {"m": 3, "b": 1, "c": 3, "d": 1},
        ("t", 2, "", "m b"),
        ("s", 4, "b", "c"),
        ("v", 9, "c", "d"),
        ("end", 1, "m d", ""),
    )
    paper = run(built, 6)
    assert paper.defragmentations == ("s",)
    ours = run(built, 6, Techniques())
    assert ours.defragmentations == ()
    assert ours.offloaded == ("m",)
    assert ours.finish_ms < paper.finish_ms


def figure_7(first_ms, second_ms):
    """a is away from s on; after it, two tasks run before end needs a: 4 ms of copying."""
    return graph(
        {"a": 4, "b": 1, "c": 4, "d": 1, "e": 1},
        ("t", 9, "", "a"),
        ("u", 9, "a", "b"),
        ("s", 9, "b", "c"),
        ("v", 9, "c", "d"),
        ("p", first_ms, "d", "e"),
        ("q", second_ms, "e d", ""),
        ("end", 1, "a", ""),
    )


def test_figure_7_prefetch_starts_in_time():
    """Eq. 9 before p: would 4 ms behind p be late for end? Behind p lies q.

    With q of 4 ms they are not: the copy starts with q. With q of 3 ms it has to start with p. a is in time in both.
    """
    late = run(figure_7(5, 4), 6)
    assert copies(late)[-1] == ("prefetch", "a", 41, 45)
    assert (late.start_ms["q"], late.start_ms["end"]) == (41, 45)
    early = run(figure_7(5, 3), 6)
    assert copies(early)[-1] == ("prefetch", "a", 36, 40)
    assert (early.start_ms["p"], early.start_ms["end"]) == (36, 44)
    assert late.stall_ms == early.stall_ms == 0


def test_figure_7_a_late_start_delays():
    """What cannot start earlier, for there is no memory while v runs, delays end by the rest: 4 - 1 - 1."""
    schedule = run(figure_7(1, 1), 6)
    assert copies(schedule)[-1] == ("prefetch", "a", 36, 40)
    assert schedule.start_ms["end"] == 40
    assert [(stall.task, stall.ms) for stall in schedule.stalls] == [("end", 2)]


def test_no_prefetch_that_a_defragmentation_would_undo():
    """While p runs there is room for a, due for end; but w then finds no room for f, and everything would leave."""
    built = graph(
        {"a": 4, "b": 1, "c": 4, "d": 1, "e": 1, "f": 4},
        ("t", 9, "", "a"),
        ("u", 9, "a", "b"),
        ("s", 9, "b", "c"),
        ("v", 9, "c", "d"),
        ("p", 1, "d", "e"),
        ("w", 1, "d e", "f"),
        ("end", 1, "a", ""),
    )
    for techniques in (Techniques.paper(), Techniques()):
        schedule = run(built, 6, techniques)
        assert schedule.defragmentations == ()
        assert copies(schedule) == [("offload", "a", 9, 13), ("prefetch", "a", 38, 42)]


def test_prefetches_start_early_enough_for_all_later_tasks():
    """Six blocks leave for `wide`, which needs the memory, and come back for tasks of 1 ms each, after a long one.

    Eq. 9 sees before `long` that 4 ms of copying are late for B4, B3 and B2, but not for B1, 4 ms behind B5. Before B5
    it fetches for B1, from 100 to 104, and for B0, from 104 to 108: B0 could start at 105.
    """
    sizes = {f"y{n}": 4 for n in range(6)} | {"big": 24, "z": 1}
    rows = [(f"F{n}", 5, f"y{n - 1}" if n else "", f"y{n}") for n in range(6)]
    rows += [("use", 5, "y5", ""), ("wide", 25, "", "big z"), ("long", 40, "z", "")]
    rows += [(f"B{n}", 1, f"y{n}", "") for n in range(5, -1, -1)]
    built = graph(sizes, *rows)
    paper = run(built, 25, Techniques(prefetch_backlog=False))
    assert [(stall.task, stall.ms) for stall in paper.stalls] == [("B0", 3)]
    ours = run(built, 25, Techniques())
    assert ours.stalls == ()
    assert paper.moved_bytes(Direction.OFFLOAD) == ours.moved_bytes(Direction.OFFLOAD) == 24


def test_defragmentation_moves_everything_together():
    """p and r (2 bytes each) stay for v with a hole of 2 between them and 2 above: 4 bytes in one piece need both."""
    built = graph(
        {"p": 2, "h": 2, "r": 2, "big": 4},
        ("t", 1, "", "p h r"),
        ("u", 1, "p h r", ""),
        ("v", 1, "p r", "big"),
        ("end", 1, "p r big", ""),
    )
    schedule = run(built, 8)
    assert schedule.defragmentations == ("v",)
    moved = [(way, block) for way in ("offload", "prefetch") for block in "pr"]
    assert [copy[:2] for copy in copies(schedule)] == moved
    # p and r leave from 1 to 5, behind t; they are back at 9.
    assert schedule.start_ms["v"] == 9
    assert (schedule.peak_bytes, schedule.live_peak_bytes) == (8, 8)


def choice_graph(fast_ms, workspace=4):
    """c may run by a fast algorithm with a workspace; a (4 bytes) would have to leave for it and come back for end."""
    options = (Algorithm("base", 10), Algorithm("fast", fast_ms, 0, workspace))
    return graph(
        {"a": 4, "b": 1, "o": 1},
        ("t", 1, "", "a b"),
        ("u", 1, "a b", ""),
        ("c", options, "b", "o"),
        ("end", 1, "a o", ""),
    )


def test_eq_10_weighs_offloading_against_speed():
    """a is whole at 1 and could be copied out by 5; c would start at 2: a delay of 3.

    Offloading for the workspace also costs the way back, which Eq. 10 does not count: it looks at what the prefetch of
    something else loses.
    """
    assert run(choice_graph(6.5), 6).algorithms == {"c": "fast"}  # gain 10 - 6.5 - 3 > 0
    assert run(choice_graph(7.5), 6).algorithms == {"c": "base"}  # gain 10 - 7.5 - 3 < 0
    assert run(choice_graph(7.5), 6, Techniques("fastest")).algorithms == {"c": "fast"}
    assert run(choice_graph(6.5), 6, Techniques("baseline")).algorithms == {"c": "base"}
    assert run(choice_graph(9.5), 10).algorithms == {"c": "fast"}, "there is room: any gain will do"
    assert run(choice_graph(1, workspace=6), 6).algorithms == {"c": "base"}, "no room at all"


def test_eq_10_counts_a_prefetch_that_has_to_wait():
    """While c runs, a (4 bytes, 4 ms) comes back for end. A workspace in its place delays it."""

    def built(fast_ms):
        options = (Algorithm("base", 5), Algorithm("fast", fast_ms, 0, 4))
        return graph(
            {"a": 4, "b": 1, "big": 4, "o": 1},
            ("t", 9, "", "a"),
            ("u", 9, "a", "b"),
            ("s", 9, "b", "big"),
            ("v", 9, "big b", ""),
            ("c", options, "b", "o"),
            ("end", 1, "a o", ""),
        )

    assert run(built(2), 6).algorithms == {"c": "fast"}  # gain 5 - 2 - min(2, 4) > 0
    slow = run(built(3), 6)
    assert slow.algorithms == {"c": "base"}  # gain 5 - 3 - min(3, 4) < 0
    assert slow.start_ms["end"] == 41
    roomy = run(built(3), 12)
    assert roomy.algorithms == {"c": "fast"}


def test_inputs_come_in_while_earlier_tasks_run():
    built = graph({"i1": 2, "i2": 3, "a": 1}, ("t", 4, "i1", "a"), ("u", 1, "a i2", ""))
    schedule = run(built, 8)
    assert copies(schedule) == [("input", "i1", 0, 2), ("input", "i2", 2, 5)]
    assert schedule.start_ms == {"t": 2, "u": 6}


def test_weights_take_room_but_never_move():
    built = graph({"w": 7, "a": 2}, ("t", 1, "w", "a"), ("u", 1, "a w", ""))
    schedule = run(built, 9)
    assert (schedule.resident_bytes, schedule.peak_bytes) == (7, 9)
    assert schedule.copies == ()


def test_spans_are_the_two_lanes():
    schedule = run(figure_3(1), 6)
    assert {span.lane for span in schedule.spans} == {"compute", "transfer"}
    assert {span.category for span in schedule.spans if span.lane == "transfer"} == {"offload", "prefetch"}
    assert max(span.end_ms for span in schedule.spans) == schedule.finish_ms


def test_wrong_arguments():
    with pytest.raises(ScheduleError, match="'gain', 'fastest' or 'baseline'"):
        Techniques("best")
    with pytest.raises(ScheduleError, match="bandwidth_bytes_per_ms=0"):
        offload_schedule(figure_3(1), 1, 100, 0)
    with pytest.raises(ScheduleError, match="0 samples"):
        offload_schedule(figure_3(1), 0, 100, 1)
