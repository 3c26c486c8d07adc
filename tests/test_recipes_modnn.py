"""The recipes on moDNN, at small sizes, from the command line to the report."""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from retime.recipes import __main__ as command
from retime.recipes import modnn_claims as claims
from retime.recipes.modnn_floor import EQ_7, EQ_7_GRADIENTS, FLOOR, IDEAL, MEMORY, NO_WEIGHTS, PEAK, Floors
from retime.recipes.modnn_networks import (
    Network,
    in_place,
    network_of,
    operation_of,
    separate_gradients,
    weight_gradients_pass,
)
from retime.recipes.results import load
from retime.schedules.memory import all_blocks_bytes, lower_bound, lower_bound_offloading_weights

Command = Callable[..., Path]
SGD = {"_target_": "torch.optim.SGD", "lr": 0.01}


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Command:
    """Runs the command line in an empty folder; returns the only result."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")

    def call(*arguments: str) -> Path:
        monkeypatch.setattr(sys, "argv", ["retime.recipes", "hardware.cores=null", *arguments])
        command.main()
        (path,) = (tmp_path / "results").rglob("result.json")
        assert {each.name for each in path.parent.iterdir()} >= {"result.csv", "result.md", "result.png"}
        return path

    return call


def small_vgg() -> Network:
    model = {
        "_target_": "retime.recipes.models.vgg",
        "depth": [1, 1, 1, 1, 1],
        "width": 0.125,
        "hidden": 0,
        "num_classes": 10,
        "image_size": 32,
        "batch_norm": True,
    }
    return Network("small", model, 8, SGD, image_size=32)


def test_figure_9(run: Command) -> None:
    few = "{VGG-101: {batch_size: 128, model: {_target_: retime.recipes.models.vgg, depth: 101}}}"
    result = load(run("experiment=modnn_fig9", "~cases", f"+cases={few}"))
    (point,) = result.points
    assert point.variants(MEMORY) == [IDEAL, PEAK, EQ_7, EQ_7_GRADIENTS, FLOOR, NO_WEIGHTS]
    # what section 7.1 states of this network
    assert point.values(IDEAL, MEMORY)[0] == pytest.approx(97.1, abs=0.1)
    assert point.values(EQ_7, MEMORY)[0] == pytest.approx(1.44, abs=0.005)
    assert point.values(NO_WEIGHTS, MEMORY)[0] < point.values(EQ_7, MEMORY)[0] < point.values(FLOOR, MEMORY)[0]
    published = [line for line in Floors().compare(result) if line.against is claims.VGG_101_FLOOR]
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
    with pytest.raises(ValueError, match=r"cases\.mine=.*give model, batch_size, image_size, pixels"):
        network_of("mine", {"modell": {}}, SGD, 0)
