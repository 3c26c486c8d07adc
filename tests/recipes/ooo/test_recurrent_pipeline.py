"""The RNN of Figure 11 (a) on paper: steps counted by hand, and what micro-batches cost."""

from pathlib import Path

import pytest
from hydra import compose, initialize_config_module
from rich.console import Console

from retime.recipes.core.schema import register_all, settings_of
from retime.recipes.ooo.pipeline_scaling import GPIPE, MODEL_PARALLEL, ONE, PAPERS1, PAPERS2, STEP
from retime.recipes.ooo.recurrent_pipeline import STATE_FIRST, Cells, RecurrentPipeline
from retime.recipes.ooo.settings import PaperPipelineSettings


def test_a_recurrent_network_by_hand() -> None:
    """Two cells on two GPUs: I1, F1, F2 with I2 beside, then O2 and W2 as one, and W1 when both are done."""
    cells = Cells(cells=2, ranks=2, micro_batches=2, independent=1.0, ratio=0.0)
    assert cells.units(ONE) == 2 + 2 + 3 + 2
    # first GPU: I1 F1 .. .. .. W1 V1; second: I2 .. F2 B2 B2 V2
    assert cells.units(MODEL_PARALLEL) == 7
    assert cells.units(STATE_FIRST) == 7
    # O2 first, so that W1 begins a unit sooner
    assert cells.units(PAPERS1) == cells.units(PAPERS2) == 6
    far = Cells(cells=2, ranks=2, micro_batches=2, independent=1.0, ratio=0.5)
    assert far.units(PAPERS1) == 7
    with pytest.raises(ValueError, match="'zbv' is unknown here"):
        cells.units("zbv")


def test_micro_batches_of_a_recurrent_network_cost_what_is_fixed(tmp_path: Path) -> None:
    register_all()
    with initialize_config_module("retime.conf", version_base=None):
        settings = settings_of(compose("config", ["experiment=ooo_fig11_rnn"]))
    assert isinstance(settings, PaperPipelineSettings)
    recipe = RecurrentPipeline()
    result = recipe.run(settings, tmp_path, Console(quiet=True))
    plain, *_, fixed = result.points
    assert plain.values(GPIPE, STEP)[0] < plain.values(MODEL_PARALLEL, STEP)[0] < fixed.values(GPIPE, STEP)[0]
    assert plain.values(PAPERS2, STEP)[0] < plain.values(STATE_FIRST, STEP)[0] < plain.values(MODEL_PARALLEL, STEP)[0]
    assert plain.values(PAPERS2, STEP) == fixed.values(PAPERS2, STEP)  # the batch is whole
    assert [line.note.split(":")[0] for line in recipe.compare(result)] == ["RNN", "RNN"]
    recipe.draw(result, tmp_path / "picture.png")
    assert (tmp_path / "picture.png").stat().st_size > 1000
