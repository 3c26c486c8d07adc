"""`modnn_targets`: every kind of case at a small size, and the report's lines from made-up points."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from retime.mechanisms.memory.host_memory import HostMemory
from retime.recipes import __main__ as command
from retime.recipes import modnn_claims as claims
from retime.recipes.build import CPU, build_model, loss_of
from retime.recipes.modnn_processes import WorkerError
from retime.recipes.modnn_side_by_side import BUDGET, DIFFERENCE, MEASURED, MOVED, PREDICTED, STEP, failure
from retime.recipes.modnn_target_kinds import EXTRA, OURS, PLANNING, VDNN
from retime.recipes.modnn_targets import Targets
from retime.recipes.modnn_vdnn import Vdnn
from retime.recipes.results import Point, Result, Row, load
from retime.recipes.schema import MemorySettings

MLP: dict[str, Any] = {
    "batch_size": 256,
    "model": {"_target_": "retime.recipes.models.mlp", "depth": 6, "width": 64},
    "data": {"_target_": "retime.recipes.batches.synthetic_vectors", "features": 64, "classes": 64},
}


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, Point]]:
    """Runs the command line with cases of its own; returns the points by case."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")

    def call(networks: str, cases: str, *more: str) -> dict[str, Point]:
        own = ["~networks", f"+networks={networks}", "~cases", f"+cases={cases}"]
        arguments = ["experiment=modnn_targets", "hardware.cores=null", "rounds=1", "steps=1", *own, *more]
        monkeypatch.setattr(sys, "argv", ["retime.recipes", *arguments])
        command.main()
        (path,) = (tmp_path / "results").rglob("result.json")
        return {point.at["case"]: point for point in load(path).points}

    return call


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs Linux's limits and /proc")
def test_small_cases_of_every_kind(run: Callable[..., dict[str, Point]]) -> None:
    mlp = (
        "{batch_size: 256, model: {_target_: retime.recipes.models.mlp, depth: 6, width: 64}, "
        "data: {_target_: retime.recipes.batches.synthetic_vectors, features: 64, classes: 64}}"
    )
    large = (
        "{batch_size: 256, image_size: 64, sub_batches: false, "
        "model: {_target_: retime.recipes.models.vgg, depth: 16, hidden: 0, image_size: 64}}"
    )
    points = run(
        f"{{MLP: {mlp}, VGG-16: {large}}}",
        "{below: {kind: refusal, networks: [MLP], share: 0.5}, "
        "drawn: {kind: random, networks: [MLP], batches: [1.0, 0.5], draws: 1, limit: planning, headroom_mb: 128}, "
        "traffic: {kind: traffic, networks: [MLP], rules: [all], headroom_mb: 64}, "
        "planning: {kind: planning, networks: [VGG-16], share: 0.9}}",
    )
    below = points["below"].facts
    assert below["steps before"] == 0
    assert below["weights unchanged"]
    assert all(below["said"].values())

    (label,) = points["drawn"].facts["outcomes"]
    assert points["drawn"].facts["outcomes"][label] == "trained"
    assert points["drawn"].values(label, MEASURED)[0] > 0

    theirs = points["traffic"].values(VDNN.format("all"), MOVED)[0]
    # the six layers' outputs of 256 x 64 numbers and their log-softmax, out and back; the last storage stays
    assert theirs == 2 * 7 * 256 * 64 * 4 / 2**20
    ours = OURS.format("all")  # so small a step may need more than that for what stays free
    if ours not in points["traffic"].facts["refused"]:
        assert points["traffic"].values(ours, MOVED)[0] < theirs

    assert points["planning"].facts["batch size"] == 256
    assert 1 < points["planning"].facts["peak GiB"] < 5


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
    settings = {"case": {"kind": kind, "budgets": [50, 25]}}
    return Point({"case": case, "network": "net"}, settings, rows, {"kind": kind, "batch size": 8, **facts})


def lines(*points: Point) -> dict[str, list[tuple[float | None, str]]]:
    result = Result("modnn_targets", "", "modnn", "Targets", "", list(points))
    found: dict[str, list[tuple[float | None, str]]] = {}
    for line in Targets().compare(result):
        value = None if line.measured is None else line.measured.median
        found.setdefault(line.against.what, []).append((value, line.note))
    return found


def test_lines_of_training() -> None:
    rows = [
        Row("unlimited", STEP, "ms", [10.0, 20.0]),
        Row("50 %", STEP, "ms", [11.0, 24.0]),
        *(Row("50 %", *rest) for rest in ((BUDGET, "MiB", [50.0]), (PREDICTED, "MiB", [40.0]))),
        *(Row("50 %", *rest) for rest in ((MEASURED, "MiB", [41.0]), (DIFFERENCE, "ppm", [0.5]))),
    ]
    plans = {"50 %": {"sub_batch": 4}}
    nothing: dict[str, str] = {}
    found = lines(
        point(
            "a", "training", rows, plans=plans, refused={"25 %": "too small"}, failed=nothing, **{"out of memory": {}}
        )
    )
    assert found[claims.SLOWDOWN_50.what] == [(pytest.approx(1.15), "net")]
    assert found[claims.SLOWDOWN_25.what] == [(None, "net: refused")]
    assert found[claims.PREDICTION_ERROR.what] == [(pytest.approx(2.5), "net (a) 2.5 %")]
    assert found[claims.SPLIT_DIFFERENCE.what] == [(0.5, "net at 50 %")]
    assert claims.OFFLOAD_DIFFERENCE.what not in found


def test_lines_of_the_other_kinds() -> None:
    drawn = point(
        "b",
        "random",
        [*(Row("1: net", *rest) for rest in ((BUDGET, "MiB", [50.0]), (MEASURED, "MiB", [45.0])))],
        outcomes={"1: net": "trained", "2: net": "out of memory: MemoryError", "3: net": "refused: BudgetError"},
        **{"limit from": "planning"},
    )
    said = dict.fromkeys(("floor", "task"), True)
    refused = [
        point("c", "refusal", [], said={**said, "layer": layer}, **{"weights unchanged": True, "steps before": 0})
        for layer in (True, False)
    ]
    moving = [Row(name.format("all"), MOVED, "MiB", [value]) for name, value in ((OURS, 5.0), (VDNN, 40.0))]
    traffic = point("d", "traffic", [*moving, Row(VDNN.format("all"), MEASURED, "MiB", [100.0])])
    planned = point(
        "e", "planning", [Row("x", PLANNING, "s", [3.0]), Row("x", EXTRA, "MiB", [2.0])], **{"peak GiB": 1.0}
    )
    found = lines(drawn, *refused, traffic, planned)
    assert found["runs inside a random budget that trained"] == [(1, "limit from planning on")]
    assert found[claims.OUT_OF_MEMORY.what] == [(1, "limit from planning on")]
    assert found[claims.WITHIN_BUDGET.what][0][0] == pytest.approx(0.9)
    assert found[claims.REFUSALS.what] == [(50, "net lacks layer")]
    assert found[claims.MOVED_SHARE.what][0][0] == pytest.approx(12.5)
    assert found[claims.PLANNING_TIME.what] == [(3, "net, batch 8")]
    assert found[claims.PLANNING_MEMORY.what][0][0] == pytest.approx(100 * 2 / 1024)


def test_cases_that_mean_nothing_are_refused() -> None:
    with pytest.raises(ValueError, match=r"cases\.a\.kind='x' is unknown: choose training, smallest, random"):
        Targets().points(MemorySettings(cases={"a": {"kind": "x"}}))
    with pytest.raises(ValueError, match=r"cases\.a\.networks has 'y', but networks has no such entry"):
        Targets().points(MemorySettings(cases={"a": {"kind": "training", "networks": ["y"]}}))


@pytest.mark.parametrize(
    ("message", "kind"),
    [
        ("BudgetError: a budget of 3 bytes is below", "refused"),
        ("RuntimeError: DefaultCPUAllocator: can't allocate memory", "out of memory"),
        ("the process ended (exit status -9)", "out of memory"),
        ("ValueError: no such setting", "failed"),
    ],
)
def test_what_became_of_a_process(message: str, kind: str) -> None:
    assert failure(WorkerError(message)) == kind
