"""What is wrong with a pipeline schedule is said in a sentence, with a mark."""

import pytest

from retime.schedules import Schedule, ScheduleError
from retime.schedules import pipeline as p

GOOD = "rank0: F1@0 F1@1 W1@0 W1@1\nrank1: F2@0 O2@0 F2@1 O2@1 W2@0 W2@1"


def test_a_good_one():
    p.validate_pipeline(Schedule.parse(GOOD), p.block(2, 2), 2)


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("W1@1", "", "W1@1 is missing: put it on rank0"),
        ("W1@1", "W1@1 W1@1", "W1@1 is there twice"),
        ("W1@1", "W1@1 O1@1", "O1@0 is missing: put it on rank0"),
        ("F2@0 O2@0", "O2@0 F2@0", "O2@0 needs F2@0, which comes later"),
        ("O2@1 W2@0 W2@1", "W2@0 W2@1", "O2@1 is missing: put it on rank1"),
        ("W1@1", "W1@1 F2@2", "F2@2 is of no micro-batch of 0 to 1"),
        ("W1@1", "W1@1 F3@1", "F3@1 is of no stage of 1 to 2"),
        ("W1@1", "W1@1 U1", "U1 is no F, O or W"),
        ("rank1", "gpu1", "F2@0 is on no rank's lane"),
        ("F1@0 F1@1", "F1@0 F2@1", "F2@1 is of stage 2, which the placement gives to rank1"),
        ("F1@0 F1@1 W1@0", "F1@0 W1@0 F1@1", "lanes wait for each other in a circle"),
    ],
)
def test_mistakes(old, new, says):
    text = GOOD.replace(old, new, 1)
    if "circle" in says:
        text = text.replace("F2@0 O2@0 F2@1 O2@1", "F2@0 F2@1 O2@0 O2@1")
    with pytest.raises(ScheduleError) as caught:
        p.validate_pipeline(Schedule.parse(text), p.block(2, 2), 2)
    assert says in str(caught.value)
    assert "missing" in says or "<-- ERROR HERE" in str(caught.value)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: p.gpipe(p.modulo(4, 2), 2), r"GPipe needs consecutive stages .*block\(\)"),
        (lambda: p.gpipe(p.block(4, 2), 0), "micro_batches=0: give 1 or more"),
        (lambda: p.one_forward_one_backward(p.v_shape(4, 2), 2), "1F1B needs consecutive stages"),
        (lambda: p.zb_h1(p.modulo(4, 2), 2), "ZB-H1 needs consecutive stages"),
        (lambda: p.interleaved(p.v_shape(4, 2), 2), r"dealt out in turn: use modulo\(\)"),
        (lambda: p.interleaved(p.modulo(4, 2), 5), "micro_batches=5 do not fill 2 rounds.*such as 4"),
        (lambda: p.interleaved_zero_bubble(p.modulo(5, 2), 2), r"use modulo\(\) with a group size that divides"),
        (lambda: p.zbv(p.modulo(4, 2), 2), r"ZBV needs two chunks a rank.*v_shape\(\)"),
        (lambda: p.zbv(p.block(2, 1), 2), "ZBV needs at least 2 ranks"),
    ],
)
def test_placements_that_a_schedule_cannot_use(make, says):
    with pytest.raises(ValueError, match=says):
        make()
