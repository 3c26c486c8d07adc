"""Schedules as text for torch.distributed.pipelining, and back."""

import pytest

from retime.schedules import Schedule, ScheduleError
from retime.schedules import pipeline as p

O1 = {"first_output_gradient": True}
BLOCK, MODULO, V = p.block(3, 3), p.modulo(6, 3), p.v_shape(6, 3)
SCHEDULES = {
    "gpipe": (BLOCK, p.gpipe(BLOCK, 4, **O1)),
    "1f1b": (BLOCK, p.one_forward_one_backward(BLOCK, 5, **O1)),
    "zb_h1": (BLOCK, p.zb_h1(BLOCK, 5, **O1)),
    "interleaved": (MODULO, p.interleaved(MODULO, 6, **O1)),
    "interleaved_zero_bubble": (MODULO, p.interleaved_zero_bubble(MODULO, 6, **O1)),
    "zbv": (V, p.zbv(V, 6, **O1)),
    "ooo1": (p.block(6, 3), p.ooo_pipe1(p.block(6, 3), 4, **O1)),
    "ooo2": (MODULO, p.ooo_pipe2(6, 3, 4, **O1)),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_schedule_is_read_back_as_it_was(name):
    placement, schedule = SCHEDULES[name]
    text = p.to_csv(schedule)
    assert len(text.splitlines()) == 3
    assert p.from_csv(text) == schedule
    assert p.placement_of(schedule) == placement


def test_what_a_first_stage_leaves_out_is_a_full_backward_pass():
    text = p.to_csv(p.gpipe(p.block(2, 2), 2))
    assert text == "0F0,0F1,0B0,0B1\n1F0,1F1,1B0,1B1\n"
    assert p.from_csv(text) == p.gpipe(p.block(2, 2), 2, **O1)
    assert p.to_csv(Schedule.parse("rank0: F1 W1\nrank1: F2 W2 O2")) == "0F0,0B0\n1F0,1B0\n"


def test_bubbles_messages_and_overlapped_passes_are_understood():
    text = (
        "0UNSHARD,0F0,0SEND_F0,,0F1,0SEND_F1,0RECV_B0,0I0,0W0, 0RECV_B1,0B1,0REDUCE_GRAD,0RESHARD\r\n"
        ",1RECV_F0,1F0,1RECV_F1,(1F1;1B0)OVERLAP_F_B,1SEND_B0,1B1,1SEND_B1,\r\n\r\n"
    )
    schedule = p.from_csv(text)
    assert str(schedule) == "rank0: F1@0 F1@1 O1@0 W1@0 W1@1 O1@1\nrank1: F2@0 F2@1 W2@0 O2@0 W2@1 O2@1"
    assert p.to_csv(schedule) == "0F0,0F1,0I0,0W0,0B1\n1F0,1F1,1B0,1B1\n"


def test_a_cell_that_cannot_be_read_is_shown_where_it_stands():
    with pytest.raises(ScheduleError) as caught:
        p.from_csv("0F0,0B0\n1F0,,1X0,1B0\n")
    assert str(caught.value) == (
        "row 2, cell 3: cannot read '1X0': an action is a stage from 0, one of F, I, W and B, and a micro-batch from "
        "0, such as 2F0\n"
        "  rank1: 1F0 1X0 1B0\n"
        "             ^^^ <-- ERROR HERE"
    )


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "there is no task"),
        ("0F,0B0", "row 1, cell 1: cannot read '0F'"),
        ("0F0,(0F1;0Q0)OVERLAP_F_B", "row 1, cell 2: cannot read '0Q0'"),
        ('"0F0",0B0', "cannot read '\"0F0\"'"),
        ("0F99999999999,0B0", "cannot read '0F99999999999'"),
        ("0F0,0B0\n\n1F0,1B0", "rank1 has no task: give it a stage"),
        ("0F0,0B0\n0F1,0B1", "F1@1 is of stage 1, which rank0 has\n  rank1: F1@1 W1@1 O1@1\n         ^^^^ <--"),
        ("0F0,0B0\n2F0,2B0", "stage 2 of 3 is on no rank"),
        ("0F0,0B0,0F7,0B7", "the micro-batches are 0, 7: number them from 0 on"),
        ("0F0,0B0,0F1", "O1@1 is missing: put it on rank0"),
        ("0F0,0B0\n1F1,1B0", "F1@1 is missing: put it on rank0"),  # so torch 2.13 shows its own 1F1B
        (
            "0B0,0F0",
            "needs F1@0, which comes later\n  rank0: W1@0 O1@0 F1@0\n         ^^^^ <-- ERROR HERE\n(torch's 0F0 is",
        ),
        ("0F0,0W0,0F1,0I0,0B1", "W1@0 runs before O1@0, and torch has no weight gradient before its output gradient"),
        ("0F0,0B0,0F1,0B1\n1F1,1B1,1F0,1B0", "lanes wait for each other in a circle"),
    ],
)
def test_orders_that_cannot_run(text, says):
    with pytest.raises(ScheduleError) as caught:
        p.from_csv(text)
    assert says in str(caught.value)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("gpu0: F1@0 W1@0", "lane 'gpu0' stands where 'rank0' belongs"),
        ("F1@0 W1@0", "lane '' stands where 'rank0' belongs"),
        ("rank0: F1@0 W1@0 U1", "the micro-batches are 0 and one without a number"),
        ("rank0: F1@0 W1@0 U1@0", "U1@0 is no F, O or W"),
        ("rank0: F1@0 W1@0 F1@0' W1@0'", "F1@0' is of another training step"),
        ("rank0: F1@0 W1@0\nrank1: F2@0 W2@0", "O2@0 is missing: put it on rank1"),
        ("rank0: F1@0 F1@1 W1@0 W1@1\nrank1: F2@0 W2@0 F2@1 O2@0 W2@1 O2@1", "W2@0 runs before O2@0"),
        (str(p.synchronised(p.gpipe(BLOCK, 2), BLOCK)), "stands where 'rank3' belongs"),  # links between replicas
    ],
)
def test_what_torch_has_no_word_for(text, says):
    with pytest.raises(ScheduleError) as caught:
        p.to_csv(Schedule.parse(text))
    assert says in str(caught.value)
