"""`ooo_pipeline`: a plain LightningModule does not notice, whatever the Trainer is asked for."""

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import Callback, StochasticWeightAveraging
from torch import nn

from retime import DifferenceWarning, NoEffectWarning, OOOPipelineStrategy, PipelineTimeline
from retime.mechanisms.pipeline import warn_of_parts
from support.browser import CHROMIUM, click_through
from support.pipeline_counting import shown
from support.pipeline_fits import FITS, Classifier, OnMeta, loader, trainer
from support.ranks import run_ranks
from support.trainers import IGNORED_WARNINGS

pytestmark = [*IGNORED_WARNINGS, pytest.mark.filterwarnings("ignore:.*sync_dist")]  # one process
NEAR = 1e-4


@pytest.fixture(scope="module")
def fits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with both ranks' outcomes of all fits."""
    folder = tmp_path_factory.mktemp("fits")
    for one in run_ranks(2, "pipeline_fits.py", str(folder), *FITS, timeout_s=200):
        assert one.returncode == 0, one.stderr[-4000:]
    return folder


@pytest.mark.parametrize("name", FITS)
def test_equals_one_device(name: str, fits: Path, tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = FITS[name]("auto", tmp_path, 1)
    for rank in (0, 1):
        saved = torch.load(fits / f"{name}.{rank}.pt", weights_only=False)
        assert saved["steps"] == expected["steps"]
        assert saved["metrics"].keys() == expected["metrics"].keys()
        for key, value in expected["metrics"].items():
            assert saved["metrics"][key] == pytest.approx(value, rel=NEAR, abs=NEAR), key
        assert saved["seen"] == pytest.approx(expected["seen"], rel=NEAR, abs=NEAR)
        for key, value in expected["weights"].items():
            torch.testing.assert_close(saved["weights"][key], value, rtol=NEAR, atol=NEAR, msg=key)
        for key in ("best", "epochs", "tested"):
            if key in expected:
                assert saved[key] == pytest.approx(expected[key], rel=NEAR), key
        if "predicted" in expected:
            torch.testing.assert_close(saved["predicted"], expected["predicted"], rtol=NEAR, atol=NEAR)


def test_on_the_meta_device_only_a_fit_gives_values(tmp_path: Path) -> None:
    module = OnMeta()
    fit = trainer("ooo_pipeline", tmp_path, devices=1)
    with pytest.raises(ValueError, match="only a fit gives them values: give a ckpt_path"):
        fit.validate(module, loader("tokens"), verbose=False)


def test_one_process_trains_as_ever(tmp_path: Path) -> None:
    module = Classifier()
    fit = trainer("ooo_pipeline", tmp_path, devices=1, max_steps=2)
    with pytest.warns(NoEffectWarning, match="a pipeline needs two"):
        fit.fit(module, loader(), loader())
    assert fit.global_step == 2
    assert "no step yet" in str(fit.strategy.report())


def test_an_unknown_schedule() -> None:
    with pytest.raises(ValueError, match=r"schedule='2f2b' is unknown: choose from ooo2,"):
        OOOPipelineStrategy(schedule="2f2b")


class Manual(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


@pytest.mark.parametrize(
    ("module", "options", "why"),
    [
        (Manual(), {}, "needs automatic optimization"),
        (Classifier(), {"callbacks": [StochasticWeightAveraging(0.1)]}, "averages all weights"),
    ],
)
def test_what_cannot_go_together_is_refused(module, options, why, monkeypatch) -> None:
    from retime.strategies.support import pipeline_hooks

    fit = Trainer(accelerator="cpu", logger=False, enable_checkpointing=False, **options)
    with pytest.raises(ValueError, match=why):
        pipeline_hooks.check_pipeline_fit(module, fit, fit.precision_plugin)


class _LooksAtGradients(Callback):
    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        """A norm, for one."""


def test_hooks_that_see_one_ranks_gradients_are_named(recwarn: pytest.WarningsRecorder) -> None:
    from retime.strategies.support import pipeline_hooks

    def warned(*callbacks: Callback) -> list[str]:
        fit = Trainer(accelerator="cpu", logger=False, enable_checkpointing=False, callbacks=[*callbacks])
        recwarn.clear()
        pipeline_hooks.warn_of_gradient_hooks(Classifier(), fit)
        return [str(one.message) for one in recwarn if one.category is DifferenceWarning]

    assert warned() == []
    (text,) = warned(_LooksAtGradients())
    assert "_LooksAtGradients.on_before_optimizer_step sees the gradients of one rank's layers" in text
    assert "gradient_clip_val" in text


def test_what_micro_batches_change_is_said() -> None:

    with pytest.warns(DifferenceWarning, match=r"'net.1' and other BatchNorm layers"):
        warn_of_parts(Classifier(batch_norm=True), 2)
    with pytest.warns(DifferenceWarning, match=r"'0' divides gradients by how often a row was read"):
        warn_of_parts(nn.Sequential(nn.Embedding(3, 3, scale_grad_by_freq=True), nn.Embedding(3, 3)), 2)


TOLD = {
    "perplexity": "it goes through `exp` (pipeline_counting.py:",
    "read perplexity": "where outputs of layers are others, sample by sample",
    "root": "it goes through `sqrt`",
    "ratio": "divides by what is computed from the batch",
    "mean of largest": "it goes through `max`",
    "of the right": "divides by what is computed from the batch",
}
"""Of what `Perplexity` logs."""


def test_numbers_that_micro_batches_change_are_named(tmp_path: Path) -> None:
    """Once, by the first rank, although in the first batch all micro-batches are alike; all others are as they were."""
    done = run_ranks(2, "pipeline_counting.py", str(tmp_path), timeout_s=100)
    for one in done:
        assert one.returncode == 0, one.stderr[-3000:]
    first, last = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1))
    assert last["said"] == {"counting": [], "perplexity": []}
    spread, recent, mean = first["said"]["counting"]
    assert mean.startswith("MeanMetric 'recent' takes a value from each micro-batch")
    assert spread.startswith("the logged value 'spread' is combined from micro-batches")
    assert "it goes through `std`" in spread
    assert recent.startswith("the metric 'recent' is logged in each step: under a pipeline that is the value of the")
    said = dict(zip(TOLD, first["said"]["perplexity"], strict=True))
    for name, text in said.items():
        assert text.startswith(f"the logged value {name!r} is combined from micro-batches under a pipeline")
        assert TOLD[name] in text, (name, text)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = shown("auto", tmp_path, 1)
    for rank in (first, last):
        differ = {
            name
            for there, here in zip(expected, rank["shown"], strict=True)
            for name in there
            if here[name] != pytest.approx(there[name], rel=1e-4, abs=1e-5)
        }
        assert differ == set(TOLD)
    assert (tmp_path / "drawn" / "2.png").stat().st_size > 1000
    events = json.loads((tmp_path / "drawn" / "2.json").read_text())["traceEvents"]
    tasks = [event for event in events if event["ph"] == "X"]
    assert {event["args"]["name"] for event in events if event["name"] == "thread_name"} == {"rank0", "rank1"}
    stages, micro_batches = len({event["name"][1] for event in tasks}), 4
    assert len({event["name"] for event in tasks}) == len(tasks)
    gradients = {"O": 1, "W": 1, "B": 2}  # B is both
    for stage in range(1, stages + 1):
        here = [event["name"][0] for event in tasks if event["name"][1] == str(stage)]
        assert here.count("F") == micro_batches
        assert sum(gradients.get(kind, 0) for kind in here) == 2 * micro_batches
    assert min(event["ts"] for event in tasks) == 0
    page = (tmp_path / "drawn" / "2.html").read_text()
    assert "forward of stage 1, micro-batch 0" in page
    assert ": bubble " in page
    if CHROMIUM is not None:
        assert click_through(tmp_path / "drawn" / "2.html", tmp_path / "browser") == []


def test_timelines_are_of_pipelines(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="use StepTimeline"):
        trainer("auto", tmp_path, devices=1, callbacks=[PipelineTimeline()]).fit(Classifier(), loader(), loader())
