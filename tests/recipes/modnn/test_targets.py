"""`modnn_targets`: every kind of case at a small size, and the report's lines from made-up points."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from retime.foundations.workers import WorkerError
from retime.mechanisms.memory_budget.offload.hosts import HostMemory
from retime.recipes.core.build import CPU, build_model, loss_of
from retime.recipes.core.results import Point, Result, Row, load
from retime.recipes.core.schema import Hardware
from retime.recipes.modnn.budget_worker import FLOOR as FLOOR_THAT_TRAINS
from retime.recipes.modnn.budget_worker import HINT, LAYER, TASK, check
from retime.recipes.modnn.settings import MemorySettings, claim, target
from retime.recipes.modnn.side_by_side import (
    BUDGET,
    BY_HAND,
    DIFFERENCE,
    FLOOR,
    GIVING_BACK,
    IN_SUB_BATCHES,
    MEASURED,
    MOVED,
    POOLED,
    PREDICTED,
    STEP,
    Network,
    failure,
)
from retime.recipes.modnn.targets import AGAIN, FIRST, KINDS, OURS, PLANNING, VDNN, Targets
from retime.recipes.modnn.vdnn import Vdnn
from retime.schedules.budget import BudgetError

SGD = {"_target_": "torch.optim.SGD", "lr": 0.01}
MLP: dict[str, Any] = {
    "batch_size": 256,
    "model": {"_target_": "retime.recipes.models.mlp", "depth": 6, "width": 64},
    "data": {"_target_": "retime.recipes.data.synthetic_vectors", "features": 64, "classes": 64, "length": 8192},
}
PLAN = {"plan": "sub-batch 4", "sub_batch": 4, "predicted_slowdown": 1.0, "planning_s": 1.0}


def block(network: dict[str, Any]) -> str:
    """A network as Hydra's command line spells it."""
    return json.dumps(network).replace('"', "")


@pytest.fixture
def run(run: Callable[..., Path]) -> Callable[..., dict[str, Point]]:
    """Runs the command line with cases of its own; returns the points by case."""

    def call(networks: str, cases: str, *more: str) -> dict[str, Point]:
        own = ["~networks", f"+networks={networks}", "~cases", f"+cases={cases}"]
        path = run("experiment=modnn_targets", "rounds=1", "steps=1", *own, *more)
        return {point.at["case"]: point for point in load(path).points}

    return call


@pytest.mark.long
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs Linux's limits and /proc")
def test_small_cases_of_every_kind(run: Callable[..., dict[str, Point]]) -> None:
    large = (
        "{batch_size: 256, image_size: 64, sub_batches: false, "
        "model: {_target_: retime.recipes.models.vgg, depth: 16, hidden: 0, image_size: 64}}"
    )
    points = run(
        f"{{MLP: {block(MLP)}, large MLP: {block({**MLP, 'batch_size': 8192})}, VGG-16: {large}}}",
        "{below: {kind: refusal, networks: [MLP], share: 0.5}, "
        "drawn: {kind: random, networks: [large MLP], batches: [1.0, 0.5], draws: 1, limit: planning, "
        "headroom_mb: 128}, "
        "traffic: {kind: traffic, networks: [large MLP], rules: [all], headroom_mb: 64}, "
        "planning: {kind: planning, networks: [VGG-16], share: 0.9}}",
        "seed=10",  # draws a budget halfway from the floor to the ideal peak
    )
    below = points["below"].facts
    assert below["steps before"] == 0
    assert below["weights unchanged"]
    assert below["said"].keys() == {FLOOR_THAT_TRAINS, TASK, LAYER, HINT}
    assert all(below["said"][part] for part in (TASK, LAYER, HINT))
    # two calibrations may differ by more than the share that is added
    assert below["said"][FLOOR_THAT_TRAINS] or "below this step's floor" in below["at the floor it names"]

    (label,) = points["drawn"].facts["outcomes"]
    assert points["drawn"].facts["outcomes"][label] == "trained"
    assert points["drawn"].values(label, MEASURED)[0] > 0

    theirs, ours = VDNN.format("all"), OURS.format("all")
    # the six layers' outputs of 8192 x 64 numbers and their log-softmax, out and back; the last storage stays
    assert points["traffic"].values(theirs, MOVED)[0] == 2 * 7 * 8192 * 64 * 4 / 2**20
    assert points["traffic"].values(ours, MOVED)[0] < points["traffic"].values(theirs, MOVED)[0]

    assert points["planning"].facts["batch size"] == 256
    assert 1 < points["planning"].facts["peak GiB"] < 5
    first, again = (points["planning"].values("this machine", which)[0] for which in (FIRST, AGAIN))
    assert first > again, "it loads code"


def test_vdnn_offloads_what_its_rule_says() -> None:
    block = {"_target_": "retime.recipes.models.vgg", "depth": [1, 1, 1, 1, 1], "width": 0.125, "hidden": 0}
    model = build_model({**block, "image_size": 32, "num_classes": 10}, CPU, 0)
    batch = (torch.randn(4, 3, 32, 32), torch.randint(10, (4,)))

    def loss(given: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return loss_of(model(given[0]), given[1])

    def gradients() -> list[torch.Tensor]:
        found = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
        model.zero_grad()
        return found

    loss(batch).backward()
    plain = gradients()

    def moved(rule: str) -> float:
        vdnn = Vdnn(model, loss, batch, HostMemory("cpu"), rule)
        for _ in range(2):
            vdnn.run()
            assert all(torch.equal(*pair) for pair in zip(plain, gradients(), strict=True))
        vdnn.remove()
        return vdnn.moved_bytes()

    # convolutions read the pooled outputs of the four stages before theirs, and the images, which are the batch's own
    pooled = sum(4 * channels * size**2 * 4 for channels, size in ((8, 16), (16, 8), (32, 4), (64, 2)))
    assert moved("conv") == 2 * pooled
    assert moved("all") > 4 * pooled
    with pytest.raises(ValueError, match="'most': choose 'all' or 'conv'"):
        moved("most")


def test_vdnn_without_convolutions_is_refused() -> None:
    model = build_model(MLP["model"], CPU, 0)
    with pytest.raises(ValueError, match="'conv' finds nothing to offload in Sequential"):
        Vdnn(model, lambda given: model(given).sum(), torch.ones(2, 64), HostMemory("cpu"), "conv")


def point(case: str, kind: str, rows: list[Row], **facts: Any) -> Point:
    settings = {"case": {"kind": kind, "budgets": [50, 25], "rules": ["all", "conv"]}}
    failures: dict[str, dict[str, str]] = {"refused": {}, "out of memory": {}, "failed": {}}
    return Point({"case": case, "network": "net"}, settings, rows, {"kind": kind, "batch size": 8, **failures, **facts})


def lines(*points: Point) -> dict[str, list[tuple[float | None, str]]]:
    result = Result("modnn_targets", "", "modnn", "Targets", "", list(points))
    found: dict[str, list[tuple[float | None, str]]] = {}
    for line in Targets().compare(result):
        value = None if line.measured is None else line.measured.median
        found.setdefault(line.against.what, []).append((value, line.note))
    return found


def memory(name: str, **mib: float) -> list[Row]:
    quantities = {"budget": BUDGET, "predicted": PREDICTED, "measured": MEASURED, "moved": MOVED}
    return [Row(name, quantities[key], "MiB", [value]) for key, value in mib.items()]


def test_lines_of_training() -> None:
    rows = [
        Row("unlimited", STEP, "ms", [10.0, 20.0]),
        Row("50 %", STEP, "ms", [11.0, 24.0]),
        Row("50 %", DIFFERENCE, "ppm", [0.5]),
        *memory("50 %", budget=50.0, predicted=40.0, measured=41.0),
        *memory(GIVING_BACK, predicted=100.0, measured=98.0),
    ]
    found = lines(point("a", "training", rows, plans={"50 %": PLAN}, refused={"25 %": "too small"}))
    assert found[target("slowdown-50").what] == [(pytest.approx(1.15), "net, over unlimited")]
    assert found[target("slowdown-25").what] == [(None, "net: refused")]
    assert found[target("prediction-error").what] == [
        (pytest.approx(2.5), "net: 50 % (a) 2.50 %; not trained: net at 25 %: refused"),
        (pytest.approx(2.0), f"{GIVING_BACK}, no plan: net (a) -2.00 %"),
    ]
    assert found[target("within-budget").what] == [
        (pytest.approx(0.82), "training, 1 of 1 that trained are inside; most: net, 50 %")
    ]
    split = (0.5, "net at 50 % 0.500 ppm; not trained: net at 25 %: refused")
    assert found[target("split-difference").what] == [split]
    assert found[target("offload-difference").what] == [(None, "not trained: net at 25 %: refused")]


def test_the_fastest_allocator_of_the_plain_step_counts() -> None:
    rows = [
        Row("unlimited", STEP, "ms", [10.0, 20.0]),
        Row("unlimited, tcmalloc", STEP, "ms", [5.0, 10.0]),
        Row(GIVING_BACK, STEP, "ms", [1.0, 1.0]),  # its samples are in another order
        Row("50 %", STEP, "ms", [11.0, 24.0]),
        Row("50 %", DIFFERENCE, "ppm", [0.5]),
        *memory("50 %", budget=50.0, predicted=40.0, measured=41.0),
    ]
    trained = point("a", "training", rows, plans={"50 %": PLAN}, refused={"25 %": "too small"})
    remark = "net, over unlimited, tcmalloc; 1.150 x over unlimited"
    assert lines(trained)[target("slowdown-50").what] == [(pytest.approx(2.3), remark)]


def test_the_best_peer_is_the_fastest_that_fits_in_the_same_bytes() -> None:
    held = {"unlimited": (9.0, 80.0), POOLED: (8.0, 60.0), IN_SUB_BATCHES.format(4): (11.0, 30.0)}
    held |= {BY_HAND.format("checkpoint"): (10.0, 50.0), "unlimited, tcmalloc": (1.0, 1.0)}
    rows = [Row(name, STEP, "ms", [ms]) for name, (ms, _) in held.items()]
    rows += [line for name, (_, mib) in held.items() for line in memory(name, measured=mib)]
    for name, mib in (("50 %", 50.0), ("25 %", 25.0)):
        rows += [Row(name, STEP, "ms", [5.0]), Row(name, DIFFERENCE, "ppm", [0.5])]
        rows += memory(name, budget=mib, predicted=20.0, measured=20.0)
    found = lines(point("a", "training", rows, plans={"50 %": PLAN, "25 %": PLAN}))
    assert found[target("over-best-peer").what] == [
        (2.0, f"net, 50 %: over {BY_HAND.format('checkpoint')}, 50.00 MiB of 50.00 MiB"),
        (None, "net, 25 %: no peer fits"),
    ]


def test_each_technique_alone_is_held_against_figures_13_and_14() -> None:
    one = IN_SUB_BATCHES.format(1)
    rows = [Row(name, STEP, "ms", ms) for name, ms in (("unlimited", [10.0, 20.0]), (one, [30.0, 60.0]))]
    rows += memory(one, measured=5.0)
    cut = point("a", "training", rows, plans={}, **{"ideal peak MiB": 100.0})
    rows = [Row(name, STEP, "ms", [ms]) for name, ms in (("unlimited", 10.0), (FLOOR, 15.0))]
    rows += [Row(FLOOR, DIFFERENCE, "ppm", [0.0]), *memory(FLOOR, budget=50.0, predicted=40.0, measured=40.0)]
    whole = point("b", "training", rows, plans={FLOOR: {**PLAN, "sub_batch": 8}}, **{"ideal peak MiB": 100.0})
    whole.settings["case"]["network"] = {"sub_batches": False}
    found = lines(cut, whole)
    for name, value, note in (
        ("figure-13-sub-batches", 20.0, f"{one}: net 20.00 x"),
        ("figure-14-sub-batches", 3.0, f"{one}: net 3.000 x"),
        ("figure-13-offloading", 2.5, "floor: net 2.500 x"),
        ("figure-14-offloading", 50.0, "floor: net 1.500 x"),
    ):
        assert found[claim(name).what] == [(pytest.approx(value), note)]


def test_notes_and_figure(tmp_path: Path) -> None:
    """Every run that did not train is told, and so is every plan."""
    plan = {**PLAN, "predicted_slowdown": 1.5, "planning_s": 2.0}
    rows = [
        Row("unlimited", STEP, "ms", [10.0]),
        Row("50 %", STEP, "ms", [11.0]),
        *memory("50 %", budget=50.0, predicted=40.0, measured=41.0),
        *memory(GIVING_BACK, predicted=100.0, measured=98.0),
    ]
    result = Result(
        *("modnn_targets", "", "modnn", "Targets", "targets"),
        [
            point("a", "training", rows, plans={"50 %": plan}, failed={"25 %": "ValueError: no"}),
            point("b", "traffic", [], plans={VDNN.format("all"): "whole batch, all"}),
            point("c", "smallest", [], refused={"1 x the floor": "BudgetError: no"}),
            point("d", "random", [], outcomes={"1: net": "trained", "2: net": "refused: no"}),
            point("e", "refusal", [], message="too small", **{"at the floor it names": "trained"}),
        ],
    )
    told = Targets().notes(result)
    for line in (
        "- a, net, 50 %: sub-batch 4; predicted 1.50 x the unlimited time; peak 2.50 % from the predicted one; planned "
        "in 2.0 s",
        "- a, net, 25 %: failed: ValueError: no",
        "- b, net, vDNN (all): whole batch, all",
        "- c, net, 1 x the floor: refused: BudgetError: no",
        "- d, 2: net: refused: no",
        "- net below its floor: too small",
        "- net at the floor that this names: trained",
    ):
        assert line in told
    assert not any("1: net" in line for line in told)
    Targets().draw(result, tmp_path / "result.png")
    assert (tmp_path / "result.png").stat().st_size > 0


def test_a_network_that_trained_nowhere_has_a_line() -> None:
    found = lines(point("a", "training", [], plans={}, refused={"50 %": "too small", "25 %": "too small"}))
    assert found[target("prediction-error").what] == [
        (None, "net: not trained: net at 50 %: refused, net at 25 %: refused")
    ]
    assert target("within-budget").what not in found


def test_lines_of_random_budgets() -> None:
    drawn = point(
        "b",
        "random",
        [
            *memory("1: net", budget=50.0, predicted=44.0, measured=45.0),
            *memory("4: net", budget=50.0, predicted=40.0, measured=55.0),
        ],
        outcomes={
            **{"1: net": "trained", "2: net": "out of memory: MemoryError"},
            **{"3: net": "refused: BudgetError", "4: net": "trained"},
        },
        **{"limit from": "planning"},
    )
    found = lines(drawn)
    assert found["runs at a random budget that trained"] == [(2, "limit from planning on")]
    assert found["runs at a random budget that trained with a measured peak inside it"] == [
        (1, "2 trained; over their budgets: 4: net")
    ]
    assert found[target("out-of-memory").what] == [(1, "limit from planning on")]
    drawn.facts["limit from"] = None
    assert lines(drawn)[target("out-of-memory").what] == [(None, "no limit of memory on a GPU")]
    assert found[target("within-budget").what] == [
        (pytest.approx(1.1), "random, 1 of 2 that trained are inside; most: net, 4: net")
    ]
    assert found[target("prediction-error").what] == [
        (pytest.approx(37.5), "b, 1 of 2 that trained within 5.00 %; most: 4: net 37.50 %")
    ]


def test_lines_of_the_smallest_budget() -> None:
    facts = {"ideal peak MiB": 300.0, "plan": "sub-batch 1"}
    found = lines(point("f", "smallest", memory(FLOOR, budget=10.0, predicted=9.0, measured=12.0), **facts))
    ((ratio, remark),) = found[target("smallest-budget").what]
    assert ratio == pytest.approx(25.0), "what it held, not what it was given"
    assert "trained in 10.00 MiB, of which it held 12.00 MiB" in remark
    assert found[target("prediction-error").what] == [(pytest.approx(100 / 3), "net (f): floor 33.33 %")]
    assert found[target("within-budget").what][0][0] == pytest.approx(1.2)
    dead = point("f", "smallest", [], failed={"1 x the floor": "ValueError"}, **{"ideal peak MiB": 300.0})
    assert lines(dead)[target("smallest-budget").what] == [(None, "net: did not train near its floor")]


def test_lines_of_the_other_kinds() -> None:
    said = dict.fromkeys((FLOOR_THAT_TRAINS, TASK, HINT), True)
    refused = [
        point("c", "refusal", [], said={**said, LAYER: there}, **{"weights unchanged": True, "steps before": steps})
        for there, steps in ((True, 0), (False, 0), (True, 1))
    ]
    rows = [
        *memory(OURS.format("all"), moved=5.0, measured=90.0),
        *memory(VDNN.format("all"), moved=40.0, measured=100.0),
        *memory(VDNN.format("conv"), moved=30.0, measured=80.0),
    ]
    traffic = point("d", "traffic", rows, refused={OURS.format("conv"): "BudgetError"})
    mib = {FIRST: 20.0, AGAIN: 2.0}
    planned = [Row("x", PLANNING, "s", [3.0]), *(Row("x", which, "MiB", [value]) for which, value in mib.items())]
    found = lines(*refused, traffic, point("e", "planning", planned, **{"peak GiB": 1.0}))
    assert found[target("refusals").what] == [
        (pytest.approx(100 / 3), f"net lacks {LAYER}; net was trained before the refusal")
    ]
    assert found[target("moved-share").what] == [
        (pytest.approx(12.5), "net, vDNN (all): 5.00 MiB in 90.00 MiB against 40.00 MiB in 100.0 MiB"),
        (None, f"net, {OURS.format('conv')}: refused"),
    ]
    assert found[target("planning-time").what] == [(3, "net, batch 8")]
    assert [value for value, _ in found[target("planning-memory").what]] == pytest.approx(
        [100 * 20 / 1024, 100 * 2 / 1024]
    )


def test_a_run_that_dies_in_its_block_leaves_no_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    class Dying:
        def __init__(self, budget: int | None) -> None:
            self.budget, self.ready = budget, {"budget_bytes": budget}

        def ask(self, request: dict[str, Any]) -> dict[str, Any]:
            if request["do"] == "block" and self.budget is not None:
                raise WorkerError("RuntimeError: DefaultCPUAllocator: can't allocate memory")
            return {"ms": [1.0], "moved_bytes": 2**20, "measured_bytes": 2**20}

        def close(self) -> None:
            pass

    monkeypatch.setattr(Network, "process", lambda self, budget, **more: Dying(budget))
    measured = KINDS["traffic"](
        MemorySettings(hardware=Hardware("cpu", "cpu", None), optimizer=SGD),
        {"network": dict(MLP), "rules": ["all"]},
        lambda text: None,
    )
    assert {row.variant for row in measured.rows} == {VDNN.format("all")}
    assert measured.facts["out of memory"].keys() == {OURS.format("all")}


class Accepting:
    """Trains in budgets from one on; what :func:`check` asks of a training."""

    def __init__(self, least: int) -> None:
        self.model, self.least = torch.nn.Sequential(torch.nn.Linear(2, 2)), least

    def limit(self, budget: int) -> None:
        if budget < self.least:
            raise BudgetError("too small", floor_bytes=self.least, task="", layer="", hint="None would help")

    def step(self) -> None:
        pass

    def close(self) -> None:
        pass


@pytest.mark.parametrize(
    ("least", "task", "layer", "hint", "lacks"),
    [
        (1000, "addmm.default (forward)", "0", "A smaller batch would help", set()),
        (1031, "addmm.default (forward)", "0", "A smaller batch would help", {FLOOR_THAT_TRAINS}),
        (1000, "addmn.default (forward)", "0", "A smaller batch would help", {TASK}),
        (1000, "addmm.default (forward)", "1", "A smaller batch would help", {LAYER}),
        (1000, "addmm.default (forward)", "0", "No luck", {HINT}),
    ],
)
def test_what_a_refusal_says_is_tried(least: int, task: str, layer: str, hint: str, lacks: set[str]) -> None:
    refusal = BudgetError("a budget of 3 bytes is too small", floor_bytes=1000, task=task, layer=layer, hint=hint)
    said, at_floor = check(str(refusal), Accepting(least))
    assert {part for part, good in said.items() if not good} == lacks
    assert ("at least 1031 bytes" in at_floor) is (FLOOR_THAT_TRAINS in lacks)


def test_a_refusal_without_a_floor_says_nothing() -> None:
    said, _ = check("no", Accepting(0))
    assert not any(said.values())


def test_cases_that_mean_nothing_are_refused() -> None:
    with pytest.raises(ValueError, match=r"cases\.a\.kind='x' is unknown: choose training, smallest, random"):
        Targets().points(MemorySettings(cases={"a": {"kind": "x"}}))
    with pytest.raises(ValueError, match=r"cases\.a\.networks has 'y', but networks has no such entry"):
        Targets().points(MemorySettings(cases={"a": {"kind": "training", "networks": ["y"]}}))
    on_gpu: dict[str, Any] = {"hardware": Hardware("cuda", "cuda", None), "networks": {"y": {}}}
    assert Targets().points(MemorySettings(**on_gpu, cases={"a": {"kind": "planning", "networks": ["y"]}})) == []


@pytest.mark.parametrize(
    ("message", "kind"),
    [
        ("BudgetError: a budget of 3 bytes is below", "refused"),
        ("RuntimeError: DefaultCPUAllocator: can't allocate memory", "out of memory"),
        ("the process ended (exit status -9)", "out of memory"),
        ("OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB", "out of memory"),
        ("ValueError: no such setting", "failed"),
    ],
)
def test_what_became_of_a_process(message: str, kind: str) -> None:
    assert failure(WorkerError(message)) == kind
