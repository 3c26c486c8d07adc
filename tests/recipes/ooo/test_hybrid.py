"""Reverse first-k inside pipelines that are data parallel, on paper."""

from pathlib import Path

from hydra import compose, initialize_config_module
from rich.console import Console

from retime.recipes.core.schema import register_all, settings_of
from retime.recipes.ooo.pipeline_scaling import BOTH, FIRST_K, FORWARDED, PLAIN, STEP, Hybrid, Hybrids
from retime.recipes.ooo.settings import PaperPipelineSettings


def test_reverse_first_k_inside_a_pipeline(tmp_path: Path) -> None:
    small = "{layers: 8, ranks: 2, micro_batches: 2, ratio: 0.0, synchronisation: 3.0}"
    register_all()
    overrides = ["experiment=ooo_hybrid", "~cases", f"+cases={{small: {small}}}"]
    with initialize_config_module("retime.conf", version_base=None):
        settings = settings_of(compose("config", overrides))
    assert isinstance(settings, PaperPipelineSettings)
    recipe = Hybrids()
    result = recipe.run(settings, tmp_path, Console(quiet=True))
    (point,) = result.points
    assert len(point.facts["GPipe: units by k"]) == 9
    assert point.values(BOTH, STEP)[0] < point.values(FORWARDED, STEP)[0] < point.values(PLAIN, STEP)[0]
    assert point.values(BOTH, STEP)[0] < point.values(FIRST_K, STEP)[0]
    recipe.draw(result, tmp_path / "picture.png")
    assert (tmp_path / "picture.png").stat().st_size > 1000


def test_without_synchronisation_a_steady_step_is_its_makespan() -> None:
    case = Hybrid(layers=8, ranks=2, micro_batches=2, ratio=0.0, synchronisation=0.0)
    assert case.units(*case.plans[PLAIN], 0) <= 35  # Figure 6 (a); the next step may begin before it ends
    assert case.units(*case.plans[FORWARDED], 0) <= 25  # (c)
