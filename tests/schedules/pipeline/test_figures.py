"""Figures 5, 6 and 12 of Oh et al. 2022, and the speedups that section 8.4.1 derives for 16 layers."""

import pytest

from retime.schedules import picture
from retime.schedules import pipeline as p


def ran(schedule, placement, micro_batches):
    p.validate_pipeline(schedule, placement, micro_batches)
    return p.simulate_pipeline(schedule, placement, p.StageCosts.uniform(placement.stages))


def figure(layers, ranks, micro_batches):
    """Conventional, fast-forwarding, modulo allocation."""
    blocks, dealt = p.block(layers, ranks), p.modulo(layers, ranks)
    plain = p.cross_layer(blocks) if micro_batches is None else p.gpipe(blocks, micro_batches)
    return [
        ran(plain, blocks, micro_batches),
        ran(p.ooo_pipe1(blocks, micro_batches), blocks, micro_batches),
        ran(p.ooo_pipe2(layers, ranks, micro_batches), dealt, micro_batches),
    ]


def test_figure_5():
    plain, forwarded, dealt = figure(8, 2, None)
    assert [plain.makespan_ms, forwarded.makespan_ms, dealt.makespan_ms] == [23, 19, 16]
    assert picture(plain.timeline.spans) == (
        "rank0  |F1|F2|F3|F4|...................................|W4|O4|W3|O3|W2|O2|W1|\n"
        "rank1   ...........|F5|F6|F7|F8|W8|O8|W7|O7|W6|O6|W5|O5|"
    )
    assert picture(forwarded.timeline.spans) == (
        "rank0  |F1|F2|F3|F4|.......................|O4|O3|O2|W4|W3|W2|W1|\n"
        "rank1   ...........|F5|F6|F7|F8|O8|O7|O6|O5|W8|W7|W6|W5|"
    )
    assert picture(dealt.timeline.spans) == (
        "rank0  |F1|..|F3|..|F5|..|F7|.....|O7|W7|O5|W5|O3|W3|W1|\n"
        "rank1   ..|F2|..|F4|..|F6|..|F8|O8|W8|O6|W6|O4|W4|O2|W2|"
    )


def test_figure_5_modulo_allocation_uses_both_gpus_for_nine_tenths_of_the_backward_pass():
    dealt = figure(8, 2, None)[2]
    backward_ms = 16 - 8
    for rank, works_ms in enumerate((7, 8)):  # W1 and O1..., of 15 gradients
        busy = sum(
            span.duration_ms for span in dealt.timeline.spans if span.lane == f"rank{rank}" and span.start_ms >= 8
        )
        assert busy == works_ms
    assert (7 + 8) / (2 * backward_ms) > 0.9


def test_figure_6():
    assert [run.makespan_ms for run in figure(8, 2, 2)] == [35, 30, 25]


def test_figure_12():
    plain, forwarded, dealt = figure(8, 4, 4)
    assert [plain.makespan_ms, forwarded.makespan_ms, dealt.makespan_ms] == [41, 34, 29]
    assert str(p.gpipe(p.block(8, 4), 4)).splitlines()[3] == (
        "rank3: F7@0 F8@0 F7@1 F8@1 F7@2 F8@2 F7@3 F8@3 "
        "W8@0 O8@0 W7@0 O7@0 W8@1 O8@1 W7@1 O7@1 W8@2 O8@2 W7@2 O7@2 W8@3 O8@3 W7@3 O7@3"
    )
    assert str(p.ooo_pipe2(8, 4, 4)).splitlines()[0] == (
        "rank0: F1@0 F1@1 F1@2 F1@3 F5@0 F5@1 F5@2 F5@3 O5@0 O5@1 O5@2 O5@3 W5@0 W1@0 W5@1 W1@1 W5@2 W1@2 W5@3 W1@3"
    )


def test_sixteen_layers():
    """Section 8.4.1: 1.22x and 1.62x over GPipe.

    1.22 is the flush form, 83 / 68. With that form modulo allocation gives 83 / 53 = 1.57; the paper's 1.62 is
    83 / 51, the time when an output gradient does not wait for its rank's last forward pass.
    """
    plain, forwarded, dealt = (run.makespan_ms for run in figure(16, 4, 4))
    greedy = ran(p.ooo_pipe2(16, 4, 4, rule=p.GREEDY), p.modulo(16, 4), 4).makespan_ms
    assert (plain, forwarded, dealt, greedy) == (83, 68, 53, 51)
    assert plain / forwarded == pytest.approx(1.22, abs=0.005)
    assert plain / greedy == pytest.approx(1.62, abs=0.01)
