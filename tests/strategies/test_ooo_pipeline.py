"""`ooo_pipeline`: a plain LightningModule does not notice, whatever the Trainer is asked for."""

import json
import math
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torchmetrics
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback, StochasticWeightAveraging
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from retime import DifferenceWarning, NoEffectWarning, OOOPipelineStrategy, PipelineTimeline
from retime.mechanisms.pipeline import warn_of_parts
from retime.schedules import Span
from support.browser import CHROMIUM, NO_CHROMIUM, click_through
from support.pipeline_fits import FITS, Classifier, OnMeta, again, loader, trainer
from support.ranks import RANK, RANKS, run_ranks, said_in
from support.trainers import IGNORED_WARNINGS

pytestmark = [*IGNORED_WARNINGS, pytest.mark.filterwarnings("ignore:.*sync_dist")]  # one process
NEAR = 1e-4


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """The folder with both ranks' outcomes of all fits, and what they printed of counts, which come first."""
    folder = tmp_path_factory.mktemp("fits")
    cases = [f"counts|{folder}", *(f"fits_on_ranks|{name}|{folder}" for name in FITS)]
    ranks = run_ranks(2, __file__, *cases, timeout_s=280, joined=False)
    said = [[said_in(rank, case) for case in cases] for rank in ranks]
    return folder, [first for first, *_ in said]


def fits_on_ranks(name: str, folder: str) -> None:
    warnings.simplefilter("ignore")
    strategy: Any = "ooo_pipeline" if name == "plain_fit" else again(None)
    torch.save(FITS[name](strategy, Path(folder), RANKS), Path(folder) / f"{name}.{RANK}.pt")


@pytest.mark.parametrize("name", FITS)
def test_equals_one_device(name: str, ran: tuple[Path, list[str]], tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = FITS[name]("auto", tmp_path, 1)
    for rank in (0, 1):
        saved = torch.load(ran[0] / f"{name}.{rank}.pt", weights_only=False)
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


SAMPLES, CLASSES = 32, 8


class Counting(Classifier):
    """Logs a count, a standard deviation, and a metric in each step."""

    def __init__(self) -> None:
        super().__init__()
        self.recent = torchmetrics.MeanMetric()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("samples", float(len(batch[1])))
        self.log("spread", batch[0].std())
        self.recent(batch[0].mean())
        self.log("recent", self.recent)
        return super().training_step(batch, batch_idx)


class Perplexity(LightningModule):
    """Begins with outputs near 0, where micro-batches are alike, whatever is made of their losses."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        last = nn.Linear(32, CLASSES)
        nn.init.normal_(last.weight, std=0.02)
        nn.init.zeros_(last.bias)
        self.net = nn.Sequential(nn.Embedding(20, 32), nn.Linear(32, 32), nn.Tanh(), last)
        self.shown: list[dict[str, float]] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        logits = self.net(batch[0])
        loss = nn.functional.cross_entropy(logits, batch[1])
        right = (logits.argmax(-1) == batch[1]).float()
        self.log_dict({"loss": loss, "twice": 2 * loss.detach(), "read": loss.item()})
        self.log_dict({"right": right.mean(), "how many": right.sum(), "samples": float(len(right)), "rate": 0.5})
        self.log("largest", logits.max(), reduce_fx="max")
        self.log("summed", right.sum(), reduce_fx="sum")
        self.log("perplexity", loss.exp())
        self.log("read perplexity", math.exp(loss.item()))
        self.log("root", logits.square().mean().sqrt())
        self.log("ratio", logits.square().sum() / logits.abs().sum())
        self.log("mean of largest", logits.max())
        self.log("of the right", logits[right > 0].sum() / right.sum().clamp(min=1))
        return loss

    def on_train_batch_end(self, *_: Any) -> None:
        self.shown.append({name: float(value) for name, value in self.trainer.callback_metrics.items()})

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.5)


def shown(strategy: Any, folder: Path, devices: int) -> list[dict[str, float]]:
    """What is logged in each of 20 steps; half of the labels are random."""
    drawn = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, 20, (SAMPLES,), generator=drawn)
    labels = tokens % CLASSES
    labels[SAMPLES // 2 :] = torch.randint(0, CLASSES, (SAMPLES // 2,), generator=drawn)
    module = Perplexity()
    fit = trainer(strategy, folder, devices=devices, max_epochs=20)
    fit.fit(module, DataLoader(TensorDataset(tokens, labels), batch_size=SAMPLES))
    return module.shown


def counts(given: str) -> None:
    folder = Path(given)
    draws = PipelineTimeline(2, folder / "drawn")
    said = {}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit = trainer("ooo_pipeline", folder, devices=2, max_steps=2, callbacks=[draws])
        fit.fit(Counting(), loader(), loader())
        said["counting"] = [str(one.message) for one in caught if one.category is DifferenceWarning]
        caught.clear()
        values = shown(OOOPipelineStrategy(microbatches=4), folder, 2)
        said["perplexity"] = [str(one.message) for one in caught if one.category is DifferenceWarning]
    print(json.dumps({"said": said, "shown": values}))


TOLD = {
    "perplexity": "it goes through `exp` (test_ooo_pipeline.py:",
    "read perplexity": "where outputs of layers are others, sample by sample",
    "root": "it goes through `sqrt`",
    "ratio": "divides by what is computed from the batch",
    "mean of largest": "it goes through `max`",
    "of the right": "divides by what is computed from the batch",
}
"""Of what `Perplexity` logs."""


def test_numbers_that_micro_batches_change_are_named(ran: tuple[Path, list[str]], tmp_path: Path) -> None:
    """Once, by the first rank, although in the first batch all micro-batches are alike; all others are as they were."""
    drawn, (first, last) = ran[0] / "drawn", (json.loads(one.splitlines()[-1]) for one in ran[1])
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
    assert (drawn / "2.png").stat().st_size > 1000
    events = json.loads((drawn / "2.json").read_text())["traceEvents"]
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
    page = (drawn / "2.html").read_text()
    assert "forward of stage 1, micro-batch 0" in page
    assert ": bubble " in page


@pytest.mark.skipif(CHROMIUM is None, reason=NO_CHROMIUM)
def test_a_page_of_a_pipeline_can_be_clicked_through(ran: tuple[Path, list[str]], tmp_path: Path) -> None:
    assert click_through(ran[0] / "drawn" / "2.html", tmp_path / "browser") == []


def test_timelines_count_the_batches_of_all_epochs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    strategy: Any = object.__new__(OOOPipelineStrategy)
    monkeypatch.setattr(strategy, "timeline", lambda: [Span("F1", "rank 0", 0.0, 1.0, "forward")], raising=False)
    monkeypatch.setattr(strategy, "report", lambda: SimpleNamespace(schedule="1f1b"), raising=False)
    fit: Any = SimpleNamespace(strategy=strategy, is_global_zero=True, global_step=0)
    draws, module = PipelineTimeline(5, tmp_path, png=False, trace=False), Classifier()
    draws._folder = tmp_path
    draws.on_train_start(fit, module)
    for fit.global_step in range(1, 7):  # two epochs
        if fit.global_step == 5:
            with pytest.warns(NoEffectWarning, match="drew none of 4 batches, since it draws one in 5"):
                draws.on_train_end(fit, module)
        draws.on_train_batch_end(fit, module, None, None, (fit.global_step - 1) % 3)
    assert draws.files == [tmp_path / "5.html"]


def test_timelines_are_of_pipelines(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="use StepTimeline"):
        trainer("auto", tmp_path, devices=1, callbacks=[PipelineTimeline()]).fit(Classifier(), loader(), loader())
