"""Figures 17 to 19 of moDNN: sums of gradients by hand, and the recipe at a small size."""

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import pytest

from retime.recipes.core.results import Point, Result, Row, load
from retime.recipes.modnn.four_devices import (
    FOUR_IDEAL,
    NAIVE,
    ONE,
    FourDevices,
    Gradient,
    Host,
    gradients,
    naive_ms,
    overlapped,
    overlapped_ms,
)
from retime.recipes.modnn.settings import MemorySettings
from retime.recipes.modnn.simulated import BATCH, IDEAL
from retime.schedules.budget import Block, BlockKind, GraphTask, Phase, TaskGraph
from retime.schedules.modnn import OffloadSchedule
from retime.schedules.modnn.device import COMPUTE, Copy, Direction
from retime.schedules.timeline import Span

HOST = Host(devices=4, bus_bytes_per_ms=100.0, sum_bytes_per_ms=600.0)


def schedule(*spans: tuple[str, float, float, Phase], copies: tuple[Copy, ...] = ()) -> OffloadSchedule:
    boxes = tuple(Span(name, COMPUTE, start, end - start, phase.value) for name, start, end, phase in spans)
    starts = {box.name: box.start_ms for box in boxes}
    finish = max(box.start_ms + box.duration_ms for box in boxes)
    return OffloadSchedule(1, 0, finish, starts, finish, (), {}, copies, (), (), 0, 0, 0, boxes)


STEP = (("BP2 2", 0.0, 10.0, Phase.BACKWARD), ("BP1 2", 10.0, 20.0, Phase.BACKWARD))
STEP = (*STEP, ("BP2 1", 20.0, 30.0, Phase.BACKWARD), ("update", 30.0, 35.0, Phase.UPDATE))


def test_gradients_are_there_after_their_task_and_weights_free_after_their_last_reader() -> None:
    blocks = {
        name: Block(name, kind, 100)
        for name, kind in (
            *(("w1", BlockKind.WEIGHT), ("w2", BlockKind.WEIGHT), ("x", BlockKind.INPUT)),
            *(("g1", BlockKind.WEIGHT_GRADIENT), ("g2", BlockKind.WEIGHT_GRADIENT), ("d", BlockKind.GRADIENT)),
        )
    }
    tasks = (
        GraphTask("BP2 2", Phase.BACKWARD, "2", ("x",), ("g2",)),
        GraphTask("BP1 2", Phase.BACKWARD, "2", ("w2",), ("d",)),
        GraphTask("BP2 1", Phase.BACKWARD, "1", ("d",), ("g1",)),
        GraphTask("update", Phase.UPDATE, "", ("g1", "g2", "w1", "w2"), ("w1", "w2")),
    )
    found = gradients(TaskGraph(blocks, tasks), schedule(*STEP))
    assert found == [Gradient(10.0, 20.0, 100), Gradient(30.0, 30.0, 100)]


def test_sums_meanwhile_by_hand() -> None:
    """100 bytes of 4 devices: 4 ms on the bus, 6 * 100 / 600 = 1 ms to sum, 4 ms back, not before the weights are free.

    The first is back at 24, the second leaves at 30 and is back at 39; the update of 5 ms is the host's.
    """
    found = [Gradient(10.0, 20.0, 100), Gradient(30.0, 30.0, 100)]
    assert overlapped_ms(found, schedule(*STEP), HOST) == 39.0
    assert overlapped_ms(found[:1], schedule(*STEP), HOST) == 30.0, "hidden: the backward pass ends later"


def test_sums_wait_for_copies_of_the_schedule() -> None:
    """An offload from 31 to 36 cuts the second gradient's 4 ms: 1 before it, 3 after it."""
    copies = (Copy("y", Direction.OFFLOAD, 31.0, 36.0, 500),)
    assert overlapped_ms([Gradient(30.0, 30.0, 100)], schedule(*STEP, copies=copies), HOST) == 39.0 + 5.0


def test_sums_at_the_end_by_hand() -> None:
    """3 devices send 200 bytes and get 200: 12 ms; 3 sums read twice and write 200 bytes at 900 a ms: 2 ms."""
    found = [Gradient(10.0, 20.0, 100), Gradient(30.0, 30.0, 100)]
    assert naive_ms(found, HOST, 900.0) == 14.0


def test_figures_17_to_19(run: Callable[..., Path]) -> None:
    model = "{_target_: retime.recipes.models.vgg, depth: [1, 1, 1, 1, 1], width: 0.25, image_size: 64}"
    cases = f"+cases={{VGG: {{batch_size: 64, image_size: 64, model: {model}}}}}"
    experiment = ("experiment=modnn_fig17_simulated", "~cases", cases, "budgets=[0.2,0.06,0.001]", "devices=4")
    result = load(path := run(*experiment))
    assert result.simulated
    *fitting, impossible = result.points
    for point in fitting:
        times = {name: point.values(name, BATCH)[0] for name in point.variants(BATCH)}
        assert times[overlapped(20)] <= times[overlapped(1)]
        assert times[overlapped(20)] < times[NAIVE]
        assert times[IDEAL] / 4 < times[FOUR_IDEAL]
        assert times[ONE] >= times[IDEAL]
    assert "away from the paper's" not in path.with_name("result.md").read_text(), "these budgets are not the paper's"
    assert "at least" in impossible.facts["does not fit"]
    assert impossible.variants(BATCH) == [IDEAL, FOUR_IDEAL]


def test_distances_from_the_paper_are_of_the_lines() -> None:
    """With 12 GB: 4 times as fast where the paper has 3.1, and 3.33 times where it has 3.7."""
    times = {IDEAL: 40.0, FOUR_IDEAL: 10.0, overlapped(1): 12.0}
    rows = [Row(name, BATCH, "ms", [value]) for name, value in times.items()]
    point = Point({"network": "VGG", "budget_gb": 12.0}, asdict(MemorySettings()), rows)
    notes = FourDevices().notes(Result("", "", "modnn", "", "", [point], simulated=True))
    assert "Speeds are -10 to +29 % away from the paper's, averages of networks each." in notes


def test_a_speed_that_the_paper_does_not_tell_is_refused() -> None:
    with pytest.raises(ValueError, match="cores has 10: the paper tells the speed of 1 and of all 20"):
        FourDevices().points(MemorySettings(cores=[1, 10], cases={"VGG": {}}, budgets=[12]))
