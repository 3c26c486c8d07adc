"""`cpuacc_targets` in small: sums and fits on two ranks, what they are held against, and the picture.

And the form for GPUs that it shares with other recipes: one rank on a simulated device, and where ranks are placed.
"""

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist

from retime.recipes.core.build import build_model
from retime.recipes.core.schema import Hardware
from retime.recipes.core.trainer_loop import Training
from retime.recipes.cpuacc import targets, worker
from retime.recipes.cpuacc.naive import NAIVE, RANK_ORDERED
from retime.recipes.cpuacc.settings import AccumulationSettings
from retime.recipes.cpuacc.targets import STEP, SUM, WAITS, Targets, target
from retime.recipes.cpuacc.worker import ALONE, COPY, GLOO, HOST, PIECES
from support.recipes import ran, settings_for
from support.simulated_cuda import ORDERS, simulated_cuda

SMALL = (
    *("experiment=cpuacc_targets", "rank_counts=[2]", "sizes_mb=[1]", "rounds=1", "warmup_rounds=0", "steps=1"),
    *("repeats=3", "cases.VGG-like.batch_size=2", "cases.VGG-like.model.width=0.03125"),
    "cases.VGG-like.model.hidden=512",
)


@pytest.mark.skipif(sys.platform != "linux", reason="shared memory is for Linux")
def test_it_measures_and_reports(tmp_path: Path) -> None:
    settings = settings_for(*SMALL)
    few = ("ddp, 25 MiB", "cpu_accumulate_ddp, 25 MiB", "ooo_ddp on host")
    settings = replace(settings, variants={label: settings.variants[label] for label in few})
    recipe = Targets()
    result = ran(recipe, settings, tmp_path)
    sums, fit = result.points
    assert sums.variants(SUM) == [HOST, GLOO, GLOO + PIECES, COPY]
    assert sums.facts["same bits"] is True
    assert sums.facts["how"] == "2 ranks in shared memory"
    assert fit.variants(STEP) == [*settings.variants, ALONE]
    assert fit.facts["the same final weights"] == list(settings.variants)
    wanted = [line.against for line in recipe.compare(result)[:5]]
    assert wanted == [target(name) for name in ("over-gloo", "of-copy", "same", "in-fit", "out-of-order")]
    assert any("exposed communication" in note for note in recipe.notes(result))


CPU: dict[str, Any] = {"hardware": {"device": "cpu"}, "backend": "gloo", "seed": 0, "batch_size": 2}
DATA = {"_target_": "retime.recipes.data.synthetic_vectors", "features": 8, "classes": 8}
MODEL = {"_target_": "retime.recipes.models.mlp", "depth": 2, "width": 8}


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("order", ORDERS)
def test_sums_are_timed_when_the_device_is_done(order: str) -> None:
    with simulated_cuda(order) as device:
        answer = worker.sums({**CPU, "mib": 1, "steps": 1, "rounds": 1, "repeats": 2})
    assert list(answer["ms"]) == [HOST, GLOO, GLOO + PIECES, COPY]
    assert answer["same"] is True
    assert device.faults == []
    assert (device.deferred > 0) == (order != "eager")


@pytest.mark.usefixtures("one_rank")
def test_fits_on_a_device_end_with_the_same_weights() -> None:
    variants = settings_for("experiment=cpuacc_fig3").variants
    few = {name: variants[name] for name in ("ddp, 25 MiB", NAIVE)} | {"in order": RANK_ORDERED}
    with simulated_cuda("late") as device:
        batches = worker._batches({**CPU, "data": DATA}, 3)
        model = build_model(MODEL, torch.device("cpu"), 0)
        optimizer = {"_target_": "torch.optim.SGD", "lr": 0.1}
        done = {name: worker._fit(model, batches, optimizer, strategy) for name, strategy in {**few, "": None}.items()}
    assert len({one.weights for one in done.values()}) == 1
    assert all(len(one.step_ms) == 2 for one in done.values())
    assert device.faults == []


@pytest.mark.parametrize(
    ("gpus", "device", "by"),
    [(4, "cuda", "nccl, a GPU each"), (1, "cuda", "gloo, on GPUs that they share"), (4, "cpu", "gloo")],
)
def test_ranks_have_a_gpu_each_or_share_them(gpus: int, device: str, by: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(targets, "run_ranks", lambda network, server, request, **more: [request])
    settings = AccumulationSettings(hardware=Hardware("x", device, None))
    (request,) = targets.ask(settings, {"ranks": 4}, lambda text: None, "sums", mib=1)
    assert (request["backend"], request["mib"]) == (by.partition(",")[0], 1)
    assert targets.machine(settings, 4)["ranks joined by"] == by
    monkeypatch.setattr(dist, "get_rank", lambda: 3)
    assert str(worker._device(request)) == ("cpu" if device == "cpu" else f"cuda:{3 % gpus}")


@pytest.mark.usefixtures("one_rank")
def test_strategies_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    fit = Mock(return_value=Training([1.0] * 9, [], "digest", ""))
    monkeypatch.setattr(worker, "_fit", fit)
    monkeypatch.setattr(worker, "step_phases", lambda fit, warm_up: fit(None) and {"update": 1.0})
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    variants: dict[str, Any] = {name: {"name": name} for name in "abc"}
    request = {**CPU, "data": DATA, "model": MODEL, "optimizer": {}, "variants": variants}
    request |= {"rounds": 3, "warmup_rounds": 0, "steps": 1, "check_every": 1, "held_out": DATA, "held_out_size": 2}
    assert worker.fits(request)["phases"] == {name: [{"update": 1.0}] * 3 for name in "abc"}
    worker.outputs(request)
    order = "".join((call.args[3] or {}).get("name", "") for call in fit.mock_calls)
    assert order == 2 * "abcbcacab" + "abc" + "abcbcacab", "in a first seed each trains twice"


def test_phases_are_those_of_the_rank_that_waits_longest_in_each_round(monkeypatch: pytest.MonkeyPatch) -> None:
    def rank(*times: tuple[float, float]) -> dict[str, Any]:
        phases = {"ddp": [dict(zip(WAITS, time, strict=True)) for time in times]}
        return {"ms": {}, "weights": {"ddp": "w"}, "gradient_bytes": 4, "phases": phases}

    monkeypatch.setattr(targets, "ask", lambda *given: [rank((1, 1), (9, 3)), rank((3, 2), (5, 4))])
    settings = AccumulationSettings(hardware=Hardware("cpu", "cpu"), variants={"ddp": {}})
    rows = targets.measure_fits(settings, {"network": "AlexNet", "ranks": 2}, print).rows
    assert [(row.quantity, row.values) for row in rows] == [*zip(WAITS, ([3, 9], [2, 3]), strict=True)]
