"""`ooo_fig7` in small: one process, plain, compiled and two streams, verdicts by quartiles, and the picture."""

from contextlib import nullcontext
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from retime.commands import advise_worker
from retime.foundations.cpu_pool import MemoryPool
from retime.foundations.measure import MemoryProbe, spread
from retime.mechanisms.two_streams import search
from retime.recipes.core.build import loss_of
from retime.recipes.core.claims import Claim, Target
from retime.recipes.core.results import Point, Result, Row
from retime.recipes.core.schema import Hardware
from retime.recipes.cpu_memory import allocators
from retime.recipes.ooo import one_step, single_device
from retime.recipes.ooo.claims import claim
from retime.recipes.ooo.settings import SingleDeviceSettings
from retime.recipes.ooo.single_device import (
    ALIVE,
    COMPILED,
    GRAPH,
    PLAIN,
    TAKEN_OFF,
    TURNED,
    SingleDevice,
    best_gain,
    fastest,
    gains,
)
from support.recipes import assert_draws, fork_workers, ran, settings_for
from support.simulated_cuda import simulated_cuda

SMALL = ["processes=1", "rounds=2", "steps=1", "allocators=[glibc,tcmalloc]"]
LINEAR = {
    "batch_size": 8,
    "model": {"_target_": "retime.recipes.models.mlp", "depth": 3, "width": 64},
    "data": {"_target_": "retime.recipes.data.synthetic_vectors", "features": 64, "classes": 64},
    "optimizer": {"_target_": "torch.optim.SGD", "lr": 0.01},
}


def bare_loops(case: dict[str, Any]) -> single_device.Server:
    server = single_device.Server()
    server.begin({"case": case, "seed": 0})
    return server


@pytest.fixture
def settings(monkeypatch: pytest.MonkeyPatch) -> SingleDeviceSettings:
    fork_workers(monkeypatch, single_device)
    monkeypatch.setattr(allocators, "_FOLDERS", ())
    monkeypatch.setattr(allocators.ctypes.util, "find_library", lambda name: None)
    return replace(settings_for("experiment=ooo_fig7", *SMALL), cases={"linear": LINEAR})


def test_it_measures_and_reports(
    settings: SingleDeviceSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn, draw = list[str](), one_step.draw
    monkeypatch.setattr(one_step, "draw", lambda axes, title, facts: (drawn.append(title), draw(axes, title, facts)))
    recipe = SingleDevice()
    result = recipe.run(settings, tmp_path, Console(quiet=True))
    (point,) = result.points
    *plain, ours = point.variants("step")
    assert ours == "two streams, glibc"
    assert "plain, 1 thread, glibc" in plain
    assert "libtcmalloc_minimal" in point.facts["missing"]["tcmalloc"]
    assert "still searching" not in point.facts["reports"][ours]
    assert len(point.facts["kept"][ours]) == 1
    assert point.facts[one_step.SETTINGS].startswith(f"{fastest(point, PLAIN)}, and two streams")
    verdicts, off, memory = recipe.compare(result)
    assert isinstance(verdicts.against, Target)
    assert off.against == Target(TAKEN_OFF, "x", 0.99)
    assert off.note.startswith("linear, over plain, ")
    assert len(point.variants(TURNED)) == 1 + 2 * torch.get_num_threads(), "two streams; plain and taken off by threads"
    assert verdicts.note.startswith("linear, glibc, over plain, ")
    assert memory.against == claim("figure-9-peak")
    assert len(point.values("two streams", ALIVE)) == single_device.PEAKS
    assert any("two streams over the best plain step of the same allocator" in line for line in recipe.notes(result))
    cases = ["linear", "again", "and again"]
    assert_draws(recipe, replace(result, points=[replace(point, at={"case": case}) for case in cases]), tmp_path)
    assert [title.partition(":")[0] for title in drawn] == cases, "a step of each case"


def test_two_streams_that_are_taken_off_leave_a_plain_step(monkeypatch: pytest.MonkeyPatch) -> None:
    loops, close = list[one_step.Loop](), one_step.Loop.close
    monkeypatch.setattr(one_step.Loop, "close", lambda loop: (loops.append(loop), close(loop)))
    two = {"threads": 2, "layers": ["0"], "forward": 1}
    turns = bare_loops(LINEAR).turns({"rounds": 2, "two": two, "first": 1})
    assert [*turns] == [
        "two streams",
        *(f"{name}, {n}" for n in ("1 thread", "2 threads") for name in ("plain", "taken off")),
    ]
    assert {len(values) for values in turns.values()} == {2}
    off, on, _ = loops  # the first was made last
    assert on.two.report().sub_stream + on.two.report().main_stream > 0
    steps = one_step.TURN_STEPS * 3 * 2 + one_step.WARM_UP_STEPS  # a round of warm-up, and two
    assert off.two.report().sub_stream + off.two.report().main_stream < 3 * steps, "only those of the first steps"
    assert not [module for module in off._model.modules() if "forward" in vars(module)]


def test_fused_cases_have_fused_optimizer_beside_the_plain_step(settings: SingleDeviceSettings, tmp_path: Path) -> None:
    fused = replace(settings, cases={"linear": {**LINEAR, "fuse_updates": True}})
    (point,) = SingleDevice().run(fused, tmp_path, Console(quiet=True)).points
    *peers, ours = point.variants("step")
    assert {"plain, 1 thread, glibc", "plain, fused_optimizer, 1 thread, glibc"} <= set(peers)
    assert "backward fusion: " in point.facts["reports"][ours]
    assert point.facts[one_step.SETTINGS].startswith(f"{fastest(point, f'{PLAIN}, fused_optimizer')}, and ")
    assert len(point.values("two streams", ALIVE)) == single_device.PEAKS


def test_compiled_steps_are_measured_beside(
    settings: SingleDeviceSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")  # compiling takes half a minute: here it does nothing
    torch.set_num_threads(1)
    recipe = SingleDevice()
    result = ran(recipe, replace(settings, compiled=True), tmp_path)
    (point,) = result.points
    assert not [reason for name, reason in point.facts["missing"].items() if name.startswith(COMPILED)]
    assert fastest(point, COMPILED) == "compiled, 1 thread, glibc"
    assert [*point.facts["first compiled step (s)"]] == ["compiled, 1 thread"]
    assert [line.against for line in recipe.compare(result)].count(claim("over-compiled")) == 1
    assert any("which compiles" in line for line in recipe.notes(result))


@pytest.mark.parametrize(
    ("limit_s", "target", "reason"),
    [(0.01, LINEAR["model"], "more than 0.01 s (compile_limit_s)"), (60, {"_target_": "torch.nn.Linear"}, "features")],
)
def test_what_does_not_compile_in_time_is_left_out_with_the_reason(
    settings: SingleDeviceSettings, tmp_path: Path, limit_s: float, target: dict[str, Any], reason: str
) -> None:
    missing: dict[str, str] = {}
    request = {"do": "begin", "case": {**LINEAR, "model": target}, "seed": 0}
    assert single_device._compile(replace(settings, compile_limit_s=limit_s), request, str(tmp_path), 1, missing) == {}
    assert reason in missing["compiled, 1 thread"]


def test_two_streams_are_held_against_the_best_plain_step() -> None:
    times = {
        "plain, 1 thread, glibc": [8.0, 8.0],
        "plain, 2 threads, glibc": [6.0, 6.0],
        "compiled, 2 threads, glibc": [3.0, 2.0],
        "two streams, glibc": [3.0, 4.0],
        "plain, 1 thread, tcmalloc": [4.0, 4.0],
        "two streams, tcmalloc": [4.0, 5.0],
    }
    rows = [Row(name, "step", "ms", values) for name, values in times.items()]
    kept = {"two streams, tcmalloc": [True, False], "two streams, glibc": [True, True]}
    point = Point({"case": "x"}, {"case": {"wanted": 1.1}}, rows, facts={"kept": kept})
    assert fastest(point, PLAIN) == "plain, 1 thread, tcmalloc"
    assert fastest(point, PLAIN, "glibc") == "plain, 2 threads, glibc"
    assert {label: over.rounds for label, over in gains(point).items()} == {
        "two streams, tcmalloc": [1.0, 0.8],
        "two streams, glibc": [2.0, 1.5],
    }, "two streams are fastest with glibc, but the verdict has the allocator of the fastest plain step"
    assert best_gain(point, COMPILED)[2] == spread([1.0, 0.5])
    over_plain, over_compiled = SingleDevice().compare(Result("x", "x", "x", "x", "x", [point]))
    on = "on in 1 of 2 fits: 1.000 x, off by itself in the others: 0.800 x"
    assert over_plain.note == f"x, tcmalloc, over plain, 1 thread, tcmalloc; {on}; does not hold"
    assert over_compiled.note == "x, glibc, over compiled, 2 threads, glibc; on in 2 of 2 fits"
    assert isinstance(over_compiled.against, Claim)


def test_the_papers_number_stands_beside_each_case_of_its_networks() -> None:
    def point(name: str, ours: float) -> Point:
        rows = [Row("plain, 1 thread, glibc", "step", "ms", [4.0]), Row("two streams, glibc", "step", "ms", [ours])]
        case = {"model": {"blocks": [6, 6]}} if name == "ResNet-50" else {}
        return Point({"case": name}, {"case": case}, rows, facts={"kept": {"two streams, glibc": [True]}})

    points = [point("ResNet-18", 4.0), point("ResNet-50", 2.0), point("GRU", 1.0)]
    lines = SingleDevice().compare(Result("x", "x", "x", "x", "x", points))
    papers = [line for line in lines if line.against == claim("figure-7-resnet")]
    cases = [line.note.partition("here a CPU, ")[2] for line in papers]
    assert cases == ["ResNet-18", "ResNet-50 (blocks of 6, 6 layers)"]
    assert [line.measured for line in papers] == [spread([1.0]), spread([2.0])]


@pytest.mark.parametrize(
    ("rounds", "said"), [([1.2, 1.2], "holds"), ([0.9, 0.95], "does not hold"), ([1.0, 1.3], "undecided")]
)
def test_verdicts_follow_from_quartiles(rounds: list[float], said: str) -> None:
    assert single_device.verdict(spread(rounds), 1.1).startswith(said)


def test_a_device_without_a_case_is_refused(tmp_path: Path) -> None:
    recipe, of = SingleDevice(), "experiment=ooo_fig7"
    with pytest.raises(ValueError, match="choose hardware=cpu"):
        recipe.run(settings_for(f"{of}_compiled", "hardware=cuda"), tmp_path, Console(quiet=True))
    points = [recipe.points(settings_for(of, f"hardware={name}")) for name in ("cpu", "cuda")]
    assert [{at["case"].rpartition(", ")[2] for at in one} for one in points] == [{"32 px", "64 px"}, {"224 px"}]


@pytest.mark.parametrize("is_simulated", [True, pytest.param(False, marks=pytest.mark.long)])
def test_fits_on_a_device_take_turns(
    settings: SingleDeviceSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_simulated: bool
) -> None:
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")
    monkeypatch.setattr(single_device, "SEARCH_STEPS", 4)  # too few for the search, which is slow here, to end
    peaks = count(2**40, -(2**20))
    monkeypatch.setattr(MemoryProbe, "peaks", lambda probe: {"batch": next(peaks)})
    few = replace(settings, rounds=1, hardware=Hardware("cpu", "cpu", None))
    with simulated_cuda("late") if is_simulated else nullcontext() as device:
        found = single_device.on_device(few, LINEAR, lambda text: None)
    graphs = [label for label in single_device.WAYS if "graph" in label.lower() or "search" in label]
    there = list(single_device.WAYS) if is_simulated else [label for label in single_device.WAYS if label not in graphs]
    assert [row.variant for row in found.rows if row.quantity == "step"] == there
    assert list(found.facts["missing"]) == ([] if is_simulated else graphs)
    assert all(len(row.values) == few.rounds for row in found.rows)
    assert [row.values for row in found.rows if row.quantity == ALIVE] == [[1.0], [1.0]]
    assert found.facts["kept"]["two streams, eager"] == [True]
    if device is not None:
        # torch warms its graphs up on another stream than that which it captures
        assert [fault for fault in device.faults if not fault.startswith("first call of ")] == []
        assert "graph: " in found.facts["reports"]["two streams, CUDA graphs"]
    point = Point({"case": "linear"}, {"hardware": {"device": "cuda"}, "case": LINEAR}, found.rows, found.facts)
    recipe, result = SingleDevice(), Result("x", "x", "x", "x", "x", [point])
    peers = [kind for kind in (PLAIN, COMPILED, GRAPH) if is_simulated or kind != GRAPH]
    notes = [line.note for line in recipe.compare(result) if line.note.startswith("linear, ")]
    assert [note.partition(", over ")[2].partition(",")[0] for note in notes] == peers
    assert any("two streams over the plain step: " in line for line in recipe.notes(result))
    assert_draws(recipe, result, tmp_path)


@pytest.mark.parametrize(
    "experiment",
    [*(pytest.param(name, marks=pytest.mark.long) for name in ("ooo_fig7", "ooo_fig7_more")), "ooo_fig7_compiled"],
)
def test_every_case_trains(experiment: str) -> None:
    for case in settings_for(f"experiment={experiment}").cases.values():
        loop = one_step.Loop({**case, "batch_size": 2}, 0, 1, two=True)
        for _ in range(1 if case.get("device") else 3):
            loop.step()
        loop.close()


def test_a_step_shows_what_each_thread_ran() -> None:
    facts = bare_loops(LINEAR).both_steps({"plain": {"threads": 2}, "two streams": {"threads": 2}})
    plain, two = ([box.split(";") for box in facts[f"{one_step.BOXES}, {name}"]] for name in ("plain", "two streams"))
    assert [int(kind) for kind, *_ in plain] == [one_step.FORWARD, one_step.REST, one_step.UPDATE]
    kinds = [int(kind) for kind, *_ in two]
    assert kinds.count(one_step.WEIGHT) == 3
    assert kinds.count(one_step.OUTPUT) == 2, "nothing is below the first layer"
    step_ms = facts[one_step.BUSY]["two streams"]["ms"]
    assert all(0 <= float(start) <= float(end) <= step_ms for *_, start, end in two)
    assert facts[one_step.BUSY]["plain"]["busy_ms"][one_step.SUB] == 0


def test_a_step_of_chosen_layers_has_their_weight_gradients_only() -> None:
    step = one_step.middle_step(LINEAR, 0, 2, two=True, layers=["0"])
    assert [kind for kind, *_ in step["boxes"]].count(one_step.WEIGHT) == 1


def test_layers_that_a_fit_chose_are_those_of_the_drawn_step(monkeypatch: pytest.MonkeyPatch) -> None:
    answers: list[dict[str, Any]] = []
    requests = iter([{"steps": 6}, {"steps": 32}])

    class EnoughError(Exception): ...

    def next_request(answer: dict[str, Any]) -> dict[str, Any]:
        answers.append(answer)
        request = next(requests, None)
        if request is None:
            raise EnoughError
        return request

    monkeypatch.setattr(search, "layers_to_give", lambda times, passes, rest_s: (sorted(times)[:1], 0.5))
    monkeypatch.setattr(advise_worker, "next_request", next_request)
    torch.set_num_threads(2)
    with pytest.raises(EnoughError):
        bare_loops(LINEAR).fit({"threads": 2, "method": "ooo_single_device"})
    _, in_the_search, behind_it = (answer["layers"] for answer in answers)
    assert in_the_search is None, "still in the profile, and the first settings are plain ones"
    drawn = {"plain": {"threads": 1}, "two streams": {"threads": 2, "layers": behind_it}}
    boxes = [box.split(";") for box in bare_loops(LINEAR).both_steps(drawn)[f"{one_step.BOXES}, two streams"]]
    assert [int(kind) for kind, *_ in boxes].count(one_step.WEIGHT) == 1


def test_a_step_with_fused_updates_shows_them_behind_their_weight_gradients() -> None:
    step = one_step.middle_step({**LINEAR, "fuse_updates": True}, 0, 2, two=True)
    kinds = [
        kind for kind, *_ in sorted(step["boxes"], key=lambda box: box[2]) if kind in (one_step.WEIGHT, one_step.UPDATE)
    ]
    assert kinds.count(one_step.UPDATE) == 1 + kinds.count(one_step.WEIGHT), "optimizer.step() is the last"


def test_a_step_has_the_threads_and_the_fusion_of_the_setting_that_is_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    threads = list[int]()
    monkeypatch.setattr(one_step, "loss_of", lambda *both: (threads.append(torch.get_num_threads()), loss_of(*both))[1])
    one_step.middle_step(LINEAR, 0, 2, two=True, forward=2)
    assert threads == [1] + [2] * (one_step.WARM_UP_STEPS + one_step.STEPS - 1), "the first step has the main stream's"
    plain = one_step.middle_step(LINEAR, 0, 2, two=False, fused=True)
    assert [kind for kind, *_ in plain["boxes"]].count(one_step.UPDATE) > 1, "optimizer.step() is the last"


def test_a_main_thread_that_waits_is_drawn_white() -> None:
    loop = one_step.Loop(LINEAR, 0, 1, two=False)
    loop.boxes = [
        (one_step.OUTPUT, one_step.MAIN, 2.0, 3.0),
        (one_step.WEIGHT, one_step.SUB, 2.0, 6.0),
        (one_step.WEIGHT, one_step.MAIN, 4.0, 5.0),
    ]
    rest = [edges for kind, _, *edges in loop._all_boxes([0.0, 1.0, 7.0, 8.0]) if kind == one_step.REST]
    assert rest == [[1.0, 4.0], [6.0, 7.0]]


def test_bytes_at_the_peak_are_those_of_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    if not MemoryPool().install():
        pytest.skip("no pool")
    wide = {**LINEAR, "model": {**LINEAR["model"], "width": 256}, "data": {**LINEAR["data"], "features": 256}}
    weights = 3 * 4 * 256 * 256
    loops, which = bare_loops(wide), {"which": {"threads": 1, "two": False}}
    assert 2 * weights <= loops.peak_bytes(which) < 4 * weights, "weights and gradients"
    monkeypatch.setattr(MemoryPool, "install", lambda pool: False)
    with pytest.raises(RuntimeError):
        loops.peak_bytes(which)
