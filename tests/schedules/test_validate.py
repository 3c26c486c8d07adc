"""The dependency rules, what the validator says when one is broken, and counts and sizes that planners are given."""

import math
import random

import pytest

from retime import schedules as s
from retime.schedules import Schedule, ScheduleError, Task, baseline, dependencies, execution_order, validate

VALID = {
    "figure-like backward": "O3 W3 S3 O2 W1 S1 W2 S2",
    "whole step": "F1 F2 F3 O3 W3 O2 W2 W1 U1 U2 U3",
    "the batch's gradient": "F1 F2 O2 W2 O1 W1 U2 U1",
    "all O first": "O4 O3 O2 W1 W2 W3 W4",
    "no O at all": "F1 F2 W2 W1 U1 U2",
    "layer 2 without parameters": "F1 F2 F3 O3 W3 O2 W1 U3 U1 F1' F2' F3'",
    "frozen bottom": "F1 F2 F3 O3 W3 W2 U2 U3",
    "two steps": "F1 W1 U1 F1' W1' U1'",
    "next forward waits for S where there is no U": "W2 S2 O2 W1 S1 F1' F2'",
    "micro-batches": "F1@0 F2@0 O2@0 W2@0 F1@1 F2@1 W1@0 O2@1 W1@1 W2@1 S2 S1 U1 U2",
    "one S a micro-batch": "W1@0 S1@0 W1@1 S1@1 U1",
    "offload and prefetch": "F1 D1 F2 D2 F3 P2 O3 W3 P1 O2 W2 W1",
    "offload of the last output": "F1 F2 D2 P2 O2 W2 W1",
    "offload of the batch": "D0 F1 F2 O2 W2 P0 W1",
    "a device with the upper layers": "F3 F4 O4 W4 O3 W3",
    "lanes": "compute: F1 F2 O2 W2 W1 F1' F2'\nnetwork: S2 S1\nhost: U1 U2",
    "empty": "",
}


@pytest.mark.parametrize("text", VALID.values(), ids=VALID)
def test_valid(text):
    schedule = Schedule.parse(text)
    validate(schedule)
    assert sorted(execution_order(schedule)) == sorted(schedule)


BROKEN = {
    "W before O": ("W2 O3 W3", "W2 needs O3, which comes later", "W2"),
    "O out of order": ("O3 O1 O2", "O1 needs O2, which comes later", "O1"),
    "O missing": ("O4 W4 O2 W2", "O2 needs O3, which is missing", "O2"),
    "F missing": ("F1 F3 W3", "F3 needs F2, which is missing", "F3"),
    "backward before forward": ("F1 O2 F2 W2 W1", "O2 needs F2, which comes later", "O2"),
    "W before the loss, no O": ("F1 W1 F2 W2", "W1 needs F2, which comes later", "W1"),
    "S before W": ("O2 S2 W2 W1 S1", "S2 needs W2, which comes later", "S2"),
    "S without W": ("O2 W1 S2 S1", "S2 needs W2, which is missing", "S2"),
    "U before W": ("F1 U1 W1", "U1 needs W1, which comes later", "U1"),
    "U before S": ("W1 U1 S1", "U1 needs S1, which comes later", "U1"),
    "S forgotten": ("O2 W2 S2 U2 W1 U1", "U1 needs S1, which is missing", "U1"),
    # appendix B.2 of optimizer fusion: O_2 would be computed with the new parameters
    "U before O": ("F1 F2 W2 U2 O2 W1 U1", "U2 needs O2, which comes later", "U2"),
    "U before its own step's F": ("U1 F1", "U1 needs F1, which comes later", "U1"),
    "next F before U": ("F1 W1 F1' U1", "F1' needs U1, which comes later", "F1'"),
    "next F before S": ("W1 F1' S1", "F1' needs S1, which comes later", "F1'"),
    "next F before W": ("O2 W2 F1' F2' W1", "F1' needs W1, which comes later", "F1'"),
    "U before the last micro-batch": ("W1@0 U1 W1@1", "U1 needs W1@1, which comes later", "U1"),
    "one micro-batch's O missing": ("O2@0 W1@0 W1@1", "W1@1 needs O2@1, which is missing", "W1@1"),
    "D before F": ("D1 F1 F2", "D1 needs F1, which comes later", "D1"),
    "P before D": ("F1 P1 D1", "P1 needs D1, which comes later", "P1"),
    "P too late": ("F1 D1 F2 W2 P1", "W2 needs P1, which comes later", "W2"),
    "P missing": ("F1 F2 D1 O2 W2 W1", "O2 needs P1, which is missing", "O2"),
    "twice": ("F1 F2 F1", "F1 is there twice: leave one out", "F1"),
    "W before O, further on": ("O3 W3 W1 O2 W2", "W1 needs O2, which comes later", "W1"),
    "in the second lane": ("compute: F1 F2\nbackward: W1 O2 W2", "W1 needs O2, which comes later", "W1"),
    "not in the lane that waits": ("network: S1 S2\ncompute: W1 O2 W2", "W1 needs O2, which comes later", "W1"),
}


@pytest.mark.parametrize(("text", "message", "marked"), BROKEN.values(), ids=BROKEN)
def test_the_first_broken_dependency_is_named_and_marked(text, message, marked):
    with pytest.raises(ScheduleError) as error:
        validate(Schedule.parse(text))
    said, line, carets = str(error.value).splitlines()
    assert said == message
    assert line == f"  {text.splitlines()[-1]}"  # of lanes the one with the mistake
    column = carets.index("^")
    assert line[column:].split()[0] == marked
    assert carets == " " * column + "^" * len(marked) + " <-- ERROR HERE"


def test_a_long_line_is_cut_around_the_mark():
    text = str(baseline(40)).replace("O20 W20", "W19 O20 W20").replace("O19 W19", "O19")
    with pytest.raises(ScheduleError) as error:
        validate(Schedule.parse(text))
    said, line, carets = str(error.value).splitlines()
    assert said == "W19 needs O20, which comes later"
    assert line == ("  ... O24 W24 O23 W23 O22 W22 O21 W21 W19 O20 W20 O19 O18 W18 O17 W17 O16 ...")
    assert line[carets.index("^") :].startswith("W19 ")


def test_lanes_that_wait_for_each_other_are_a_circle():
    text = "compute: O2 W2 F1' F2' W1\nnetwork: S1 S2"
    with pytest.raises(ScheduleError) as error:
        validate(Schedule.parse(text))
    assert str(error.value).splitlines() == [
        "lanes wait for each other in a circle: F1' needs S1; S1 needs W1, which lane compute runs after F1'",
        "  compute: O2 W2 F1' F2' W1",
        "                 ^^^ <-- ERROR HERE",
    ]


def test_needs_can_be_given_for_a_model_that_is_no_chain():
    f1, f2, f3 = (Task.parse(text) for text in ("F1", "F2", "F3"))
    branches = {f3: (f1, f2)}
    validate(Schedule.parse("F2 F1 F3"), branches)
    with pytest.raises(ScheduleError, match="F3 needs F1, which comes later"):
        validate(Schedule.parse("F2 F3 F1"), branches)
    with pytest.raises(ScheduleError, match="F1 needs itself"):
        validate(Schedule.parse("F1"), {f1: [f1]})


def test_dependencies_of_one_step():
    needs = dependencies(Schedule.parse("F1 F2 D1 P1 O2 W2 W1 S1 S2 U1 U2 F1'"))
    assert {str(task): " ".join(map(str, of_task)) for task, of_task in needs.items()} == {
        **{"F1": "", "F2": "F1", "D1": "F1", "P1": "D1"},
        **{"O2": "F2 P1", "W2": "F2 P1", "W1": "O2", "S1": "W1", "S2": "W2"},
        **{"U1": "W1 S1 F1", "U2": "W2 S2 O2 F2", "F1'": "U1"},
    }


def test_any_shuffle_is_judged_as_its_pairs_are():
    """The validator agrees with looking at every pair: valid exactly when no need stands behind its task."""
    rng = random.Random(1)
    tasks = list(Schedule.parse("F1 F2 O2 W2 W1 S2 S1 U2 U1 F1'"))
    needs = dependencies(tasks)
    verdicts = set()
    for _ in range(2000):
        # a few swaps from a valid order: a plain shuffle is almost never valid
        order = list(tasks)
        for _ in range(rng.randrange(3)):
            i = rng.randrange(len(order) - 1)
            order[i], order[i + 1] = order[i + 1], order[i]
        place = {task: index for index, task in enumerate(order)}
        valid = all(place[need] < place[task] for task in order for need in needs[task])
        verdicts.add(valid)
        if valid:
            validate(Schedule.sequence(order))
            continue
        first = next(task for task in order if any(place[need] > place[task] for need in needs[task]))
        with pytest.raises(ScheduleError, match=f"^{first} needs "):
            validate(Schedule.sequence(order))
    assert verdicts == {True, False}


def test_a_thousand_layers_take_no_time_to_speak_of():
    validate(baseline(1000, steps=2))


COSTS = [s.LayerCost(1, 1, 1, 10)] * 3
TAKES = {
    "layers": [
        s.baseline,
        s.backward_fusion,
        s.forward_fusion,
        lambda v: s.reverse_first_k(v, 1),
        lambda v: s.largest_k(v, 10),
        s.KSearch,
    ],
    "steps": [
        lambda v: s.baseline(3, steps=v),
        lambda v: s.backward_fusion(3, steps=v),
        lambda v: s.forward_fusion(3, steps=v),
        lambda v: s.reverse_first_k(3, 0, steps=v),
        lambda v: s.simulate_data_parallel(COSTS, s.Communication(s.layer_buckets(COSTS), _message), steps=v),
    ],
    "k": [lambda v: s.reverse_first_k(3, v), lambda v: s.size_buckets(COSTS, 10, k=v)],
    "max_memory": [lambda v: s.largest_k(3, v)],
    "bucket_bytes": [lambda v: s.size_buckets(COSTS, v)],
    "first_bytes": [lambda v: s.size_buckets(COSTS, 10, first_bytes=v)],
    "largest": [lambda v: s.KSearch(3, largest=v)],
    "budget": [lambda v: s.KSearch(3, budget=v)],
    "nodes": [lambda v: s.Cluster(v, 1, s.Link(1e9))],
    "devices_per_node": [lambda v: s.Cluster(1, v, s.Link(1e9))],
    "partition_bytes": [
        lambda v: s.simulate_data_parallel(
            COSTS, s.Communication(s.layer_buckets(COSTS), _message, partition_bytes=v), k=1
        )
    ],
}
MAY_BE_0 = ("k", "largest", "first_bytes", "max_memory")


def _message(size_bytes: float) -> s.Transfer:
    return s.Transfer(0, 1)


@pytest.mark.parametrize("name", TAKES)
@pytest.mark.parametrize("value", [-1, 0, math.nan, 1.5, True, "2"])
def test_a_count_is_a_whole_number_in_its_range(name, value):
    for take in TAKES[name] if value != 0 or name not in MAY_BE_0 else ():
        with pytest.raises((TypeError, ValueError), match=f"^{name}={value!r}: give "):
            take(value)
