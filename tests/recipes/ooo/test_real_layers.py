"""`ooo_pipeline_compute` in small: ours and torch's own train the same step on two ranks."""

from pathlib import Path

import pytest
from hydra import compose, initialize_config_module
from rich.console import Console

from retime.recipes.core.results import Point, Result, Row
from retime.recipes.core.schema import register_all, settings_of
from retime.recipes.ooo.claims import target
from retime.recipes.ooo.pipeline import STEP, RealLayers
from retime.recipes.ooo.settings import PipelineSettings

SIZES = {"GPT-2": ("n_layer", "n_embd"), "BERT": ("num_hidden_layers", "hidden_size")}


def small(network: str) -> list[str]:
    layers, width = (f"cases.{network}.model.model.config.{name}" for name in SIZES[network])
    (other,) = set(SIZES) - {network}
    return [f"~cases.{other}", f"{layers}=4", f"{width}=48", "rounds=1", "warmup_rounds=0", "steps=1", "batch_size=4"]


@pytest.mark.parametrize("network", [pytest.param("BERT", marks=pytest.mark.long), "GPT-2"])
def test_all_of_them_train_the_same_step(network: str, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    register_all()
    few = ["schedules=[ooo2,gpipe]", "peers=[GPipe,InterleavedZeroBubble 2,ZBVZeroBubble]"]
    with initialize_config_module("retime.conf", version_base=None):
        settings = settings_of(compose("config", ["experiment=ooo_pipeline_compute", *small(network), *few]))
    assert isinstance(settings, PipelineSettings)
    recipe = RealLayers()
    result = recipe.run(settings, tmp_path, Console(quiet=True))
    (point,) = result.points
    assert point.variants(STEP) == [
        *("ooo2", "gpipe", "torch GPipe", "torch InterleavedZeroBubble 2", "torch ZBVZeroBubble", "one device")
    ]
    assert set(point.facts["apart"]) == set(point.variants(STEP)) - {"one device"}
    assert max(point.facts["apart"].values()) < 1e-4
    recipe.draw(result, tmp_path / "picture.png")
    assert (tmp_path / "picture.png").stat().st_size > 1000


def test_the_peer_is_the_fastest_of_torchs_own() -> None:
    took = {"ooo2": [100.0], "gpipe": [50.0], "torch GPipe": [130.0], "torch 1F1B": [90.0], "one device": [190.0]}
    facts = {"ranks": 2, "apart": {"ooo2": 1e-6, "torch 1F1B": 1e-3}}
    rows = [Row(name, STEP, "ms", values) for name, values in took.items()]
    point = Point({"network": "GPT-2"}, {}, rows, facts)
    result = Result("t", "recipe", "ooo-backprop", "where", "title", [point])
    lines = RealLayers().compare(result)
    assert [line.against for line in lines] == [target(name) for name in ("over-best", "over-gpipe", "apart")]
    assert [line.measured.median for line in lines if line.measured] == pytest.approx([0.9, 1.3, 1e-3])
    assert lines[0].note.endswith("torch 1F1B")
