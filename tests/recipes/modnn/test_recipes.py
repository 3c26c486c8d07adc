"""The recipes on moDNN, at small sizes, from the command line to the report."""

import resource
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from retime.foundations.measure import spread
from retime.foundations.workers import Worker, WorkerError
from retime.recipes.core.results import load
from retime.recipes.core.schema import Hardware
from retime.recipes.modnn import side_by_side as runs
from retime.recipes.modnn import simulated
from retime.recipes.modnn.budget_worker import Server
from retime.recipes.modnn.budgets import Budgets
from retime.recipes.modnn.floor import EQ_7, EQ_7_GRADIENTS, FLOOR, IDEAL, MEMORY, NO_WEIGHTS, PEAK, Floors
from retime.recipes.modnn.networks import Network as DryNetwork
from retime.recipes.modnn.networks import in_place, network_of, operation_of, separate_gradients, weight_gradients_pass
from retime.recipes.modnn.settings import MemorySettings, claim
from retime.recipes.modnn.side_by_side import BUDGET, DIFFERENCE, GIVING_BACK, MEASURED, POOLED, PREDICTED, UNLIMITED
from retime.recipes.modnn.side_by_side import MOVED as MOVED_A_STEP
from retime.recipes.modnn.simulated import BATCH, FASTEST, MODNN, MOVED, PAPERS_RULES, SLOWER, VDNN_ALL
from retime.recipes.modnn.simulated import IDEAL as IDEAL_TIME
from retime.recipes.modnn.simulated import MEMORY as SHARE
from retime.schedules.modnn import all_blocks_bytes, lower_bound, lower_bound_offloading_weights
from support.simulated_cuda import simulated_cuda

Command = Callable[..., Path]
SGD = {"_target_": "torch.optim.SGD", "lr": 0.01}


def small_vgg() -> DryNetwork:
    model = {
        "_target_": "retime.recipes.models.vgg",
        "depth": [1, 1, 1, 1, 1],
        "width": 0.125,
        "hidden": 0,
        "num_classes": 10,
        "image_size": 32,
        "batch_norm": True,
    }
    return DryNetwork("small", model, 8, SGD, image_size=32)


@pytest.mark.long
def test_figure_9(run: Command) -> None:
    few = "{VGG-101: {batch_size: 128, model: {_target_: retime.recipes.models.vgg, depth: 101}}}"
    result = load(run("experiment=modnn_fig9", "~cases", f"+cases={few}"))
    (point,) = result.points
    assert point.variants(MEMORY) == [IDEAL, PEAK, EQ_7, EQ_7_GRADIENTS, FLOOR, NO_WEIGHTS]
    # what section 7.1 states of this network
    assert point.values(IDEAL, MEMORY)[0] == pytest.approx(97.1, abs=0.1)
    assert point.values(EQ_7, MEMORY)[0] == pytest.approx(1.44, abs=0.005)
    assert point.values(NO_WEIGHTS, MEMORY)[0] < point.values(EQ_7, MEMORY)[0] < point.values(FLOOR, MEMORY)[0]
    published = [line for line in Floors().compare(result) if line.against == claim("vgg-101-floor")]
    assert len(published) == 1


def test_networks_are_counted_as_the_paper_counts_layers() -> None:
    """By hand: 5 convolutions with normalisation and ReLU are one output and one gradient each, in place."""
    network = small_vgg()
    graph = network.graph()
    merged = in_place(graph)
    outputs = [8 * 32**2, 16 * 16**2, 32 * 8**2, 64 * 4**2, 64 * 2**2]
    blocks = [block.sample_bytes / 4 for block in merged.blocks.values() if block.sample_bytes]
    for size in outputs:
        assert blocks.count(size) >= 2, "its output and its gradient"
        before = [block.sample_bytes / 4 for block in graph.blocks.values()].count(size)
        assert blocks.count(size) < before, "what lies between convolution, normalisation and ReLU is gone"
    as_paper = weight_gradients_pass(separate_gradients(merged))
    names = [operation_of(task) for task in as_paper.tasks]
    assert names.count("convolution") == 5
    assert names.count("convolution_backward") == 9, "two a convolution, one for the first"
    assert all_blocks_bytes(as_paper, 8) < all_blocks_bytes(graph, 8)
    assert lower_bound_offloading_weights(as_paper) < lower_bound(as_paper).bytes < lower_bound(graph).bytes


def test_an_unknown_key_of_a_network_is_refused() -> None:
    with pytest.raises(ValueError, match=r"cases\.mine=.*give model, batch_size, image_size, pixels or tokens"):
        network_of("mine", {"modell": {}}, SGD, 0)


def few(*sizes: int) -> str:
    model = "{_target_: retime.recipes.models.vgg, depth: [1, 1, 1, 1, 1], width: 0.25, image_size: 64}"
    cases = (f"VGG-{size}: {{batch_size: {size}, image_size: 64, model: {model}}}" for size in sizes)
    return f"+cases={{{', '.join(cases)}}}"


def test_figures_10_and_11(run: Command) -> None:
    path = run("experiment=modnn_fig10_simulated", "~cases", few(16, 64), "budget_gb=0.06")
    result = load(path)
    assert result.simulated
    assert "**Simulated, not measured.**" in path.with_name("result.md").read_text()
    for point in result.points:
        ideal = point.values(IDEAL_TIME, BATCH)[0]
        for name in (MODNN, PAPERS_RULES):
            assert point.values(name, SLOWER)[0] == pytest.approx(point.values(name, BATCH)[0] / ideal, abs=1e-3)
            assert point.values(name, SLOWER)[0] >= 1
        assert point.values(MODNN, BATCH)[0] <= 1.005 * point.values(PAPERS_RULES, BATCH)[0]
    small, large = result.points
    vdnn = {VDNN_ALL, simulated.VDNN_CONV, simulated.VDNN_LEAST}
    assert vdnn < set(small.variants(BATCH))
    assert small.facts["does not fit"] == {}
    assert small.values(simulated.VDNN_CONV, MOVED)[0] < small.values(VDNN_ALL, MOVED)[0]
    assert set(large.facts["does not fit"]) == vdnn, "whole batches are too large for the budget"
    assert not vdnn & set(large.variants(BATCH))


@pytest.mark.long
def test_figure_12(run: Command) -> None:
    result = load(run("experiment=modnn_fig12_simulated", "~cases", few(16), "budgets=[0.2,0.08,0.01]"))
    roomy, tight, _ = result.points
    assert roomy.values(MODNN, SLOWER)[0] <= tight.values(MODNN, SLOWER)[0]
    impossible = result.points[2].facts["does not fit"]
    assert len(impossible) == 5, "below the floor nothing fits"
    assert tight.values(FASTEST, BATCH) == tight.values(PAPERS_RULES, BATCH), "workspaces fit beside a sub-batch"


def test_figures_13_and_14(run: Command) -> None:
    path = run("experiment=modnn_fig13_simulated", "~cases", few(32), "budget_gb=0.5")
    assert "keeps the batch whole, in 0.5 GB" in path.with_name("result.md").read_text()
    (point,) = load(path).points
    alone = (simulated.SUB_BATCHES, simulated.OFFLOADING, simulated.ALGORITHMS)
    sub_batches, offloading, algorithms = (point.values(name, SHARE)[0] for name in alone)
    assert sub_batches < offloading < 100
    assert algorithms < 100
    assert 1 < point.values(simulated.ALGORITHMS, SLOWER)[0] <= 2.7
    together, vdnn = (point.values(name, SHARE)[0] for name in (simulated.TOGETHER, simulated.VDNN_AT_LEAST))
    assert together < sub_batches
    assert together < vdnn <= offloading
    *_, least, slower, faster = (line.measured for line in simulated.Alone().compare(load(path)))
    assert least == spread([vdnn / together])
    assert [slower, faster] == [spread([end(point.facts[simulated.BY_GAIN])]) for end in (min, max)]


def test_k40_times_by_hand() -> None:
    """The small network's first convolution: 2 * 27 * 8 * 32 * 32 operations a sample, at a quarter of the peak."""
    settings = MemorySettings()
    graph = simulated.k40_graph(small_vgg(), settings)
    first = next(task for task in graph.tasks if operation_of(task) == "convolution")
    slow, fast = first.algorithms
    arithmetic_ms = 2 * 27 * 8 * 32**2 / (4.29e12 * 0.25) * 1e3
    traffic_ms = 4 * (3 + 8) * 32**2 / (288e9 * 0.75) * 1e3
    assert slow.sample_ms == pytest.approx(max(arithmetic_ms, traffic_ms))
    assert fast.sample_ms == pytest.approx(max(arithmetic_ms / 2.7, traffic_ms))
    assert fast.sample_workspace_bytes == 0.5 * 4 * (3 + 8) * 32**2
    assert slow.sample_workspace_bytes == 0


def test_budgets_that_mean_nothing_are_refused() -> None:
    with pytest.raises(ValueError, match=r"budgets has 'half': give percents of the ideal peak, or 'floor'"):
        Budgets().points(MemorySettings(budgets=[100, "half"]))
    with pytest.raises(ValueError, match="peers has 'luck': choose parts, checkpoint, save_on_cpu"):
        runs.side_by_side(MemorySettings(peers=["luck"]), {}, [], print)


def test_processes_answer_in_turn_and_say_what_went_wrong() -> None:
    with pytest.raises(WorkerError, match="no attribute 'ready'"):
        Worker(Server, {"do": "ready"})


@pytest.mark.parametrize(
    "more", [pytest.param({"budget_bytes": "floor"}, marks=pytest.mark.long), {"budget_bytes": None, "rule": "all"}]
)
def test_a_process_offloads_on_a_device(more: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a simulated one, with the weights of the plain step; no kernel limits it, and a step more warms each turn."""
    monkeypatch.setattr(torch, "set_num_threads", lambda threads: None)
    data = {"_target_": "retime.recipes.data.synthetic_vectors", "features": 64, "classes": 64, "length": 256}
    model = {"_target_": "retime.recipes.models.mlp", "depth": 4, "width": 64}
    case = {"batch_size": 256, "model": model, "data": data, "sub_batches": False}
    settings = MemorySettings(hardware=Hardware("cpu", "cpu", None), optimizer=SGD)
    request = runs.Network(settings, case, tmp_path).request | {"host": None, "give_back": False}
    limits, trained = resource.getrlimit(resource.RLIMIT_DATA), []
    for steps, streams in ((3, nullcontext()), (2, simulated_cuda("late"))):
        with streams as device:
            server = Server()
            server.train({**request, **(more if device else {"budget_bytes": None})})
            assert resource.getrlimit(resource.RLIMIT_DATA) == limits
            assert len(server.block({"steps": steps})["ms"]) == steps
            answer = server.end({"weights": tmp_path / "weights.pt"})
        trained.append(torch.load(tmp_path / "weights.pt"))
    assert device.faults == []
    assert device.deferred > 0
    assert answer["moved_bytes"] > 0
    assert all(torch.equal(*pair) for pair in zip(*trained, strict=True))


@pytest.mark.long
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs Linux's limits and /proc")
def test_budget_sweep(run: Command) -> None:
    model = "{_target_: retime.recipes.models.vgg, depth: [2, 1, 1, 1, 1], width: 0.25, hidden: 0, image_size: 64}"
    data = "{_target_: retime.recipes.data.digits, image_size: 64, channels: 3}"
    small = f"+cases={{VGG-like: {{batch_size: 16, model: {model}, data: {data}}}}}"
    few = ("rounds=1", "warmup_rounds=1", "budgets=[50]", "headroom_mb=8", "allocators=[kept_heap]")
    (point,) = load(run("experiment=modnn_budget_sweep", "~cases", small, *few, "in_sub_batches=true")).points
    assert point.facts["out of memory"] == point.facts["refused"] == {}
    theirs, kept = runs.VDNN_PLUS.format("all", "50 %"), runs.OTHER_ALLOCATOR.format("glibc, heap kept")
    size = point.facts["plans"]["50 %"]["sub_batch"]
    cut, conv = runs.IN_SUB_BATCHES.format(size), runs.VDNN_PLUS.format("conv", "50 %")
    by_hand = [runs.BY_HAND.format(peer) for peer in ("checkpoint", "save_on_cpu")]
    parts = [runs.IN_SUB_BATCHES.format(samples) for samples in sorted({1, 2, 4, 8, size})]
    plain = [UNLIMITED, GIVING_BACK, POOLED, *by_hand]
    assert point.variants(runs.STEP) == [*plain, "50 %", theirs, conv, kept, *parts]
    assert [point.values(name, DIFFERENCE) for name in (*by_hand, kept, POOLED)] == [[0.0]] * 4
    peer = runs.best_peer(point, "50 %")
    assert peer is not None
    assert point.values(peer, MEASURED)[0] <= point.values("50 %", BUDGET)[0]
    in_another_order = [point.values(name, DIFFERENCE)[0] for name in (cut, GIVING_BACK)]
    assert all(0 < ppm < 10 for ppm in in_another_order), "it adds up part by part, or other samples first"
    assert runs.budgets_of(point) == ["50 %"]
    assert runs.fastest_plain(point) in (UNLIMITED, POOLED, kept)
    assert point.values(theirs, MEASURED)[0] <= point.values("50 %", BUDGET)[0]
    assert point.values(theirs, MOVED_A_STEP)[0] > point.values("50 %", MOVED_A_STEP)[0]
    assert max(point.values(name, DIFFERENCE)[0] for name in (theirs, "50 %")) < 10  # ppm
    assert point.values("50 %", PREDICTED)[0] <= point.values("50 %", BUDGET)[0]
    assert point.values(POOLED, MEASURED)[0] < 1.1 * point.values(POOLED, PREDICTED)[0] + 2
    assert point.values("50 %", MEASURED)[0] < point.values(GIVING_BACK, MEASURED)[0]
