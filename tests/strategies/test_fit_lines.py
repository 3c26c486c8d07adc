"""One line at a fit's start says what will be done, one at its end what was, and nothing is said of other runs."""

import logging
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.demos.boring_classes import BoringModel

import retime
from contract.models import Net, sines
from support.ranks import SHARED, run_ranks, said_in
from support.trainers import IGNORED_WARNINGS, quiet_trainer

pytestmark = [*IGNORED_WARNINGS, pytest.mark.filterwarnings("ignore:two streams have no effect")]
ONE_DEVICE = {
    "fused_optimizer": ("backward fusion of 1 of 1 optimizers", "backward fusion: "),
    "fused_optimizer_forward": ("forward fusion of 1 of 1 optimizers", "forward fusion: "),
    "memory_budget": ("memory budget ", "memory budget "),
    "ooo_single_device": ("two streams for weight gradients of 1 layers", "two streams: "),
}


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture) -> Any:
    for name in ("lightning.pytorch", "lightning.fabric"):
        caplog.set_level(logging.INFO, logger=name)
    caplog.clear()
    return lambda: [line for line in caplog.messages if line.startswith("retime: ")]


def trainer(folder: Path, strategy: Any, **options: Any) -> Trainer:
    given = {"max_steps": 3, "limit_val_batches": 1, "num_sanity_val_steps": 0}
    return quiet_trainer(default_root_dir=folder, strategy=strategy, **given | options)


@pytest.mark.parametrize("name", ONE_DEVICE)
def test_a_fit_says_what_it_will_do_and_did(name: str, tmp_path: Path, said: Any) -> None:
    begin, end = ONE_DEVICE[name]
    fit = trainer(tmp_path, name)
    fit.validate(BoringModel(), verbose=False)
    assert said() == []
    fit.fit(BoringModel())
    first, *_, last = said()  # between them others tell of searches and plans
    assert first.startswith(f"retime: {begin}")
    assert last == f"retime: {fit.strategy.report().headline}"  # type: ignore[attr-defined]
    assert last.startswith(f"retime: {end}")


@pytest.mark.usefixtures("pool")
@pytest.mark.parametrize(
    ("kind", "begin"),
    [
        (retime.FuseOptimizer, "backward fusion of 1 of 1 optimizers"),
        (retime.ParallelScanBackward, "1 of 1 recurrent modules converted"),
        (retime.CPUMemoryPool, "CPU memory pool of at most 1.1 times the peak of live bytes"),
    ],
)
def test_callbacks_say_so_too(kind: Any, begin: str, tmp_path: Path, said: Any) -> None:
    model = BoringModel()
    model.rnn = torch.nn.RNN(32, 32)
    fit = trainer(tmp_path, "auto", callbacks=[kind()])
    fit.validate(model, verbose=False)
    assert said() == []
    fit.fit(model)
    end = fit.callbacks[0].report().headline  # type: ignore[attr-defined]
    assert said() == [f"retime: {begin}", f"retime: {end}"]


@pytest.mark.parametrize("name", ONE_DEVICE)
def test_a_fit_that_fails_says_how_far_it_came(name: str, tmp_path: Path, said: Any) -> None:
    class Failing(Callback):
        def on_train_batch_end(self, *arguments: Any) -> None:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        trainer(tmp_path, name, callbacks=[Failing()]).fit(BoringModel())
    assert said()[0] != said()[-1]
    assert said()[-1].startswith(f"retime: {ONE_DEVICE[name][1]}")


class Ours(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if (text := record.getMessage()).startswith("retime: "):
            self.lines.append(text)


def fits_that_log() -> None:
    """A strategy after the other; prints the first and the last line of each that is ours."""
    warnings.simplefilter("ignore")
    ours = Ours()
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).addHandler(ours)
    for name in ("fused_optimizer_ddp", "ooo_ddp", "cpu_accumulate_ddp", "memory_budget_ddp", "ooo_pipeline"):
        fit = quiet_trainer(strategy=name, devices=2, max_epochs=1, default_root_dir=SHARED)
        fit.fit(Net(), sines(16, batch_size=4))
        for line in ours.lines[:1] + ours.lines[1:][-1:]:  # between them others tell of searches and plans
            print(line, flush=True)
        ours.lines.clear()


@pytest.mark.long
def test_several_ranks_say_so_once() -> None:
    first, second = (
        said_in(run, "fits_that_log").splitlines() for run in run_ranks(2, __file__, "fits_that_log", joined=False)
    )
    assert second == []
    for begin, end in zip(first[::2], first[1::2], strict=True):
        kind = begin.removeprefix("retime: ").split()[0]
        assert kind in end
    assert [line.removeprefix("retime: ").split(" ")[0] for line in first[::2]] == [
        *("backward", "out-of-order", "gradients", "memory", "pipeline")
    ]
