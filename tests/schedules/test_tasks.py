"""Tasks and schedules as text."""

import random

import pytest

from retime.schedules import Kind, Lane, Schedule, ScheduleError, Task


@pytest.mark.parametrize(
    ("text", "task"),
    [
        ("F1", Task(Kind.F, 1)),
        ("O12", Task(Kind.O, 12)),
        ("W3@0", Task(Kind.W, 3, micro_batch=0)),
        ("S2'", Task(Kind.S, 2, step=1)),
        ("U4@1''", Task(Kind.U, 4, micro_batch=1, step=2)),
        ("D0", Task(Kind.D, 0)),
        ("P7", Task(Kind.P, 7)),
    ],
)
def test_a_task_prints_and_parses(text, task):
    assert Task.parse(text) == task
    assert str(task) == text


@pytest.mark.parametrize("text", ["", "f1", "F", "X3", "F-1", "F1.0", "F1'@0", "F1@", "F1 ", "F\u0661", "1F"])
def test_text_that_is_no_task_is_repeated_with_the_form(text):
    with pytest.raises(ScheduleError) as error:
        Task.parse(text)
    assert str(error.value).startswith(f"cannot read task {text!r}: a task is one of the letters F O W S U D P")


def test_every_kind_has_words_for_the_legend():
    gradients = ["output gradient", "weight gradient"]
    assert [kind.words for kind in Kind] == ["forward", *gradients, "synchronisation", "update", "offload", "prefetch"]


def test_one_lane_prints_as_a_sequence():
    schedule = Schedule.parse("O3 W3 S3 O2 W1 S1 W2 S2")
    assert str(schedule) == "O3 W3 S3 O2 W1 S1 W2 S2"
    assert len(schedule) == 8
    assert Task(Kind.S, 1) in schedule
    assert Task(Kind.S, 4) not in schedule
    assert schedule.tasks[0] == Task(Kind.O, 3)
    assert Schedule.parse("O3 W3 S3\nO2 W1 S1\n  W2 S2") == schedule


def test_lanes_print_one_a_line():
    text = "compute: O2 W2 W1\nnetwork: S2 S1\nidle:"
    schedule = Schedule.parse(text)
    assert [lane.name for lane in schedule.lanes] == ["compute", "network", "idle"]
    assert str(schedule) == text
    assert schedule == Schedule.from_lanes(
        {
            "compute": [Task(Kind.O, 2), Task(Kind.W, 2), Task(Kind.W, 1)],
            "network": [Task(Kind.S, 2), Task(Kind.S, 1)],
            "idle": [],
        }
    )


def test_the_empty_schedule():
    assert Schedule.parse("") == Schedule(()) == Schedule.sequence([])
    assert str(Schedule.parse("  \n")) == ""
    assert len(Schedule(())) == 0


def test_random_schedules_survive_print_and_parse():
    rng = random.Random(0)
    for _ in range(300):
        lanes = [
            Lane(
                f"gpu{number}",
                tuple(
                    Task(rng.choice(list(Kind)), rng.randint(1, 150), rng.choice([None, 0, 1, 11]), rng.randrange(3))
                    for _ in range(rng.randrange(12))
                ),
            )
            for number in range(rng.randrange(1, 5))
        ]
        if len(lanes) == 1 and rng.random() < 0.5:
            lanes = [Lane("", lanes[0].tasks)]
        schedule = Schedule(tuple(lanes))
        assert Schedule.parse(str(schedule)) == schedule
        assert hash(Schedule.parse(str(schedule))) == hash(schedule)


def test_a_bad_word_is_marked():
    with pytest.raises(ScheduleError) as error:
        Schedule.parse("compute: F1 F2\nnetwork: S1 Z9 S2")
    assert str(error.value).splitlines()[1:] == ["  network: S1 Z9 S2", "              ^^ <-- ERROR HERE"]


def test_split_deals_kinds_out_to_lanes():
    step = Schedule.parse("O2 W2 S2 W1 S1 U2 U1")
    assert str(step.split({"S": "network", "U": "host"})) == "compute: O2 W2 W1\nnetwork: S2 S1\nhost: U2 U1"
    assert str(step.split({Kind.S: "network"})) == "compute: O2 W2 W1 U2 U1\nnetwork: S2 S1"
    assert str(Schedule.parse("gpu0: W1 S1").split({"S": "link"})) == "gpu0: W1\nlink: S1"


ONE_LANE, TWO_LANES = Schedule.parse("W1 S1"), Schedule.parse("compute: W1\nnetwork: S1")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Task(Kind.F, 0), "there is no task F0: layers count from 1"),
        (lambda: Task(Kind.P, -1), "there is no task P-1: tensors count from 0"),
        (lambda: Task(Kind.F, 1, micro_batch=-1), "micro_batch=-1: micro-batches count from 0"),
        (lambda: Task(Kind.F, 1, step=-2), "step=-2: steps count from 0"),
        (lambda: Schedule.parse("gpu: F1\nS1"), "line 'S1' has no lane: start it with a name, as in 'compute: S1'"),
        (lambda: Schedule.parse(": F1"), "line ': F1' has an empty lane name"),
        (lambda: Schedule.parse("gpu: F1\ngpu: F2"), "lane 'gpu' is given 2 times"),
        (lambda: Schedule.parse("gpu 0: F1"), "lane name 'gpu 0': leave out colons and white space"),
        (lambda: Schedule((Lane("", ()), Lane("network", ()))), "one of several lanes has no name"),
        (lambda: TWO_LANES.split({"S": "link"}), "already has the lanes compute, network: leave out resources"),
        (lambda: ONE_LANE.split({"sync": "link"}), "resources has the key 'sync': use the letters F O W S U D P"),
    ],
)
def test_what_cannot_be_says_what_to_change(make, message):
    with pytest.raises(ScheduleError, match=message):
        make()
