"""StepTimeline: spans and keys are counted, durations only compared with one another."""

import csv
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import CSVLogger
from torch import nn
from torch.utils.data import DataLoader

from retime.callbacks import MemoryTimeline
from retime.callbacks.peak_memory import PeakMemory
from retime.callbacks.step_timeline import StepTimeline
from retime.callbacks.support import phases
from retime.callbacks.support.phases import StrategyPhases
from retime.foundations.measure.timing import EXPOSED, StepTimer
from retime.foundations.messages import NoEffectWarning
from support.browser import CHROMIUM, NO_CHROMIUM, click_through
from support.step_timings import assert_consistent, count
from support.trainers import IGNORED_WARNINGS, quiet_trainer
from support.warm_start import run_program

pytestmark = [*IGNORED_WARNINGS, pytest.mark.filterwarnings("ignore:`training_step` returned `None`")]

KEYS = {f"timeline/{name}_ms" for name in ("forward", "backward", "update", "communication_exposed", "step")}


class Net(LightningModule):
    def __init__(self, optimizer: str = "adamw") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
        self.optimizer = optimizer

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor | None:
        loss = self.net(batch).square().mean()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        if self.optimizer == "lbfgs":
            return torch.optim.LBFGS(self.parameters(), max_iter=3)
        return torch.optim.AdamW(self.parameters(), lr=0.1)


class ManualNet(Net):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        for optimizer in self.optimizers():
            optimizer.zero_grad()
            self.manual_backward(self.net(batch).square().mean())
            optimizer.step()

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(layer.parameters(), lr=0.1) for layer in (self.net[0], self.net[2])]


class Failing(Net):
    def __init__(self, where: str) -> None:
        super().__init__()
        self.where = where

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor | None:
        if self.where == "forward":
            raise ZeroDivisionError
        return super().training_step(batch, batch_idx)

    def backward(self, loss: torch.Tensor) -> None:
        if self.where == "backward":
            raise ZeroDivisionError
        super().backward(loss)

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        if self.where == "update":

            def closure() -> None:
                optimizer_closure()
                raise ZeroDivisionError

            optimizer.step(closure)
        super().optimizer_step(epoch, batch_idx, optimizer, optimizer_closure)


class Spy(Callback):
    """Notes which of the strategy's attributes are set on the instance while a batch runs."""

    def __init__(self) -> None:
        self.stood_in: list[bool] = []

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: torch.Tensor) -> None:
        self.stood_in.append("backward" in vars(trainer.strategy))


def loader(batches: int) -> DataLoader[torch.Tensor]:
    data = torch.randn(batches * 2, 4, generator=torch.Generator().manual_seed(1))
    return DataLoader(data, batch_size=2)  # type: ignore[arg-type]


def fit(callbacks: list[Callback], model: Net | None = None, batches: int = 6, **options: Any) -> Trainer:
    trainer = quiet_trainer(**{"max_epochs": 1, **options}, callbacks=callbacks)
    trainer.fit(model or Net(), loader(batches))
    return trainer


def quiet(**options: Any) -> StepTimeline:
    return StepTimeline(**{"every_n_steps": 1, "warm_up": 0, "png": False, "trace": False, "page": False, **options})


def test_measures_every_nth_step_after_the_warm_up(tmp_path: Path) -> None:
    timeline = StepTimeline(every_n_steps=2, warm_up=1, dirpath=tmp_path)
    trainer = fit([timeline])
    assert len(timeline.timings) == 3
    for timing in timeline.timings:
        assert count(timing) == {"forward": 1, "backward": 1, "update": 1}
        assert_consistent(timing)
    names = {f"epoch-0-step-{step}.{suffix}" for step in (1, 3, 5) for suffix in ("png", "json", "html")}
    assert {path.name for path in tmp_path.iterdir()} == names == {path.name for path in timeline.files}
    assert {re.sub(r"\d+", "N", name) for name in names} == {
        re.sub("<.*?>", "N", name) for name in re.findall(r"``(epoch-.*?)``", StepTimeline.__doc__ or "")
    }
    assert (tmp_path / "epoch-0-step-1.png").read_bytes().startswith(b"\x89PNG")
    events = json.loads((tmp_path / "epoch-0-step-1.json").read_text())["traceEvents"]
    assert [e["name"] for e in events if e["ph"] == "X"] == ["forward", "backward", "update"]
    assert set(trainer.callback_metrics) >= KEYS
    assert timeline.report()["steps"] == 3
    assert timeline.report()["clock"] == "host clock"
    assert timeline.report()["mean_step_ms"] > 0


def test_accumulated_batches_have_no_update_of_their_own() -> None:
    timeline = quiet(every_n_steps=2)
    fit([timeline], batches=7, accumulate_grad_batches=3)  # windows of 3, 3 and 1 batches
    whole, short = timeline.timings
    assert count(whole) == {"forward": 3, "backward": 3, "update": 1}
    assert count(short) == {"forward": 1, "backward": 1, "update": 1}
    assert_consistent(whole)


def test_manual_optimization_has_a_span_for_each_backward_and_update() -> None:
    timeline = quiet(every_n_steps=4)
    fit([timeline], ManualNet())
    assert len(timeline.timings) == 2
    for timing in timeline.timings:
        spans = count(timing)
        assert spans["backward"] == spans["update"] == 2
        assert spans["forward"] >= 2
        assert_consistent(timing)


def test_every_closure_call_is_drawn() -> None:
    timeline = quiet(every_n_steps=None)
    fit([timeline], Net("lbfgs"))
    spans = count(timeline.timings[0])
    assert spans["forward"] == spans["backward"] > 1
    assert spans["update"] == spans["forward"]  # LBFGS works after every evaluation


def test_a_skipped_step_has_no_backward() -> None:
    class Skipping(Net):
        def training_step(self, batch: torch.Tensor, batch_idx: int) -> None:
            return None

    timeline = quiet(every_n_steps=None)
    fit([timeline], Skipping())
    assert count(timeline.timings[0]) == {"forward": 1, "update": 1}


def test_one_step_a_fit_and_several_fits() -> None:
    timeline = quiet(every_n_steps=None, warm_up=2)
    model = Net()
    trainer = fit([timeline], model)
    assert len(timeline.timings) == 1
    trainer.fit_loop.max_epochs = 2
    trainer.fit(model, loader(6))
    fit([timeline])
    assert len(timeline.timings) == 3


def test_says_when_nothing_was_measured() -> None:
    with pytest.warns(NoEffectWarning, match="measured 0 of 6 steps.*warm_up=9"):
        fit([quiet(warm_up=9)])


def test_user_metrics_are_not_disturbed(tmp_path: Path) -> None:
    def user_rows(name: str, callbacks: list[Callback]) -> tuple[list[tuple[str, str]], int]:
        logger = CSVLogger(tmp_path, name=name)
        fit(callbacks, logger=logger, log_every_n_steps=2)
        with open(Path(logger.log_dir) / "metrics.csv", newline="") as file:
            rows = list(csv.DictReader(file))
        ours = [row for row in rows if row.get("timeline/step_ms")]
        assert all(row[key] for row in ours for key in KEYS)
        return [(row["step"], row["loss"]) for row in rows if row["loss"]], len(ours)

    plain, none = user_rows("plain", [])
    assert none == 0
    assert user_rows("timed", [StepTimeline(every_n_steps=3, warm_up=0)]) == (plain, 2)
    assert user_rows("silent", [quiet(log=False)]) == (plain, 0)
    drawn = sorted((tmp_path / "timed" / "version_0" / "timeline").iterdir())  # the default folder
    assert len(drawn) == 6


@pytest.mark.parametrize("options", [{}, {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1}])
@pytest.mark.parametrize("reverse", [False, True])
def test_weights_are_bit_identical_and_the_strategy_is_left_as_found(options: dict[str, Any], reverse: bool) -> None:
    reference, measured, spy = Net(), Net(), Spy()
    fit([], reference, **options)
    callbacks: list[Callback] = [quiet(every_n_steps=2, warm_up=1), spy, PeakMemory(every_n_steps=3)]
    trainer = fit(callbacks[::-1] if reverse else callbacks, measured, **options)
    for name, weight in reference.state_dict().items():
        assert torch.equal(weight, measured.state_dict()[name]), name
    assert set(spy.stood_in) == {True, False} if options else all(spy.stood_in[::3])
    assert_untouched(trainer)


def assert_untouched(trainer: Trainer) -> None:
    assert not {"training_step", "backward", "optimizer_step"} & set(vars(trainer.strategy))


@pytest.mark.parametrize("where", ["forward", "backward", "update"])
def test_an_exception_leaves_nothing_behind(where: str) -> None:
    timeline, memory, model = quiet(), PeakMemory(), Failing(where)
    trainer = quiet_trainer(max_epochs=1, callbacks=[timeline, memory])
    with pytest.raises(ZeroDivisionError):
        trainer.fit(model, loader(2))
    assert_untouched(trainer)
    assert not timeline.timings
    fit([timeline, memory])
    assert len(timeline.timings) == len(memory.peaks) == 6


def test_an_epoch_cut_short_by_a_hook_leaves_nothing_behind() -> None:
    class Cutting(Net):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
            return -1 if batch_idx == 1 else None

    timeline = quiet()
    assert_untouched(fit([timeline], Cutting(), accumulate_grad_batches=1))
    assert len(timeline.timings) == 1


def test_another_stand_in_on_the_strategy_survives() -> None:
    calls = []

    class Patching(Callback):
        def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
            backward = trainer.strategy.backward

            def patched(*args: Any, **kwargs: Any) -> Any:
                calls.append(1)
                return backward(*args, **kwargs)

            trainer.strategy.backward = patched  # type: ignore[method-assign]
            self.patched = patched

    patching, timeline = Patching(), quiet()
    trainer = fit([patching, timeline])
    assert len(calls) == len(timeline.timings) == 6
    assert vars(trainer.strategy)["backward"] is patching.patched


def test_a_stand_in_put_over_ours_meanwhile_is_kept() -> None:
    class Strategy:
        def training_step(self) -> str:
            return "step"

        backward = optimizer_step = training_step

    strategy: Any = Strategy()
    timer = StepTimer()
    phases = StrategyPhases(strategy, timer)
    ours = strategy.training_step
    strategy.training_step = theirs = lambda: ours()
    phases.detach()
    assert vars(strategy) == {"training_step": theirs}
    assert strategy.training_step() == "step"


def test_measured_steps_of_a_fused_optimizer_are_fused() -> None:
    timeline, memory = quiet(), PeakMemory()
    trainer = fit([timeline, memory], strategy="fused_optimizer")
    report = trainer.strategy.report()  # type: ignore[attr-defined]
    assert (report.steps, report.plain_steps) == (6, {}), "a hook that reads gradients would make steps plain"
    assert len(timeline.timings) == len(memory.peaks) == 6
    assert all(count(timing) == {"forward": 1, "backward": 1, "update": 1} for timing in timeline.timings)


def test_drawing_needs_matplotlib(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(phases, "find_spec", lambda name: None)
    with pytest.raises(ModuleNotFoundError, match="or give png=False"):
        StepTimeline()
    StepTimeline(png=False)


DDP_SCRIPT = """
import sys, torch
from lightning.pytorch import LightningModule, Trainer
from torch.utils.data import DataLoader
from retime.callbacks.step_timeline import StepTimeline

class Net(LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(4, 1)
    def training_step(self, batch, batch_idx):
        return self.net(batch).sum()
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)
    def on_train_end(self):
        (timeline,) = [c for c in self.trainer.callbacks if isinstance(c, StepTimeline)]
        timing = timeline.timings[-1]
        names = ",".join(span.name for span in timing.spans)
        is_measured = timing.communication_exposed_ms is not None
        print(f"\\nrank {self.global_rank}: {names}; {is_measured}; {len(timeline.files)} files", flush=True)

timeline = StepTimeline(every_n_steps=2, warm_up=1, dirpath=sys.argv[1], png=False)
trainer = Trainer(accelerator="cpu", devices=2, strategy="ddp_fork", max_epochs=1, logger=False,
                  enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
                  accumulate_grad_batches=2, callbacks=[timeline])
trainer.fit(Net(), DataLoader(torch.randn(16, 4), batch_size=2))
"""


def test_two_processes_report_exposed_communication(tmp_path: Path) -> None:
    said = run_program(DDP_SCRIPT, str(tmp_path), OMP_NUM_THREADS="1")
    spans = f"forward,backward,{EXPOSED},forward,backward,{EXPOSED},update"
    lines = {line for line in said.splitlines() if line.startswith("rank ")}
    assert lines == {f"rank 0: {spans}; True; 2 files", f"rank 1: {spans}; True; 0 files"}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["epoch-0-step-1.html", "epoch-0-step-1.json"]


@pytest.mark.skipif(CHROMIUM is None, reason=NO_CHROMIUM)
@pytest.mark.long
def test_its_page_opens_in_a_browser(tmp_path: Path) -> None:
    fit([quiet(every_n_steps=None, page=True, dirpath=tmp_path)])
    assert click_through(tmp_path / "epoch-0-step-0.html", tmp_path / "browser") == []


@pytest.mark.parametrize("kind", [MemoryTimeline, StepTimeline])
def test_a_folder_that_cannot_be_is_refused_before_training(kind: type, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    timeline = kind(dirpath=tmp_path / "file" / "folder")
    trainer = quiet_trainer(default_root_dir=tmp_path, max_steps=1, callbacks=[timeline])
    with pytest.raises(NotADirectoryError, match=f"{kind.__name__} cannot write into .*give another dirpath"):
        trainer.fit(Net(), loader(1))
    assert trainer.fit_loop.epoch_loop.batch_progress.total.ready == 0


@pytest.mark.parametrize("kind", [MemoryTimeline, StepTimeline])
def test_nothing_is_made_before_there_is_something(kind: type, tmp_path: Path) -> None:
    timeline = kind(dirpath=tmp_path / "new" / "folder")
    timeline.setup(quiet_trainer(default_root_dir=tmp_path), Net(), "fit")
    assert list(tmp_path.iterdir()) == []
