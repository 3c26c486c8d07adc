"""`retime advise` as a user runs it: its own processes, real models; hangs, Ctrl-C, and what is left behind."""

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import psutil
import pytest

from retime.commands import advise_turns
from retime.commands.advise_turns import Limit, MethodError, Running
from retime.commands.advise_worker import METHODS, PLAIN, methods_for, serve
from retime.commands.main import main
from support.time_limits import limit_s

MODELS = """
import os
import time
import torch
from lightning.pytorch import LightningDataModule, LightningModule
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn

BATCH = torch.randn(8, 16), torch.zeros(8, dtype=torch.long)

class Small(LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 4))

    def training_step(self, batch, batch_idx):
        loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters())
        steps = self.trainer.estimated_stepping_batches
        return [optimizer], [torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=int(steps))]

class Loads(Small):
    def train_dataloader(self):
        return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(*BATCH), batch_size=8)

class Awkward(Small):
    def __init__(self):
        super().__init__()
        torch.set_num_threads(2)
        self.frozen = nn.BatchNorm1d(16).requires_grad_(False).eval()
        self.phase = nn.Parameter(torch.ones(1, dtype=torch.complex64))

    def prepare_data(self):
        self.rows = torch.utils.data.TensorDataset(*BATCH)

    def setup(self, stage):
        self.scale = len(self.rows)

    def train_dataloader(self):
        return {"a": torch.utils.data.DataLoader(self.rows, batch_size=8, num_workers=1)}

    def training_step(self, batch, batch_idx):
        assert not self.frozen.training
        assert torch.get_num_threads() == 1
        inputs, labels = batch["a"]
        return self.scale * nn.functional.cross_entropy(self.net(self.frozen(inputs)), labels) + self.phase.abs().sum()

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters())
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=3)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def configure_callbacks(self):
        return ModelCheckpoint(every_n_train_steps=1)

class Rows(LightningDataModule):
    def train_dataloader(self):
        return {"a": torch.utils.data.DataLoader(torch.utils.data.TensorDataset(*BATCH), batch_size=8)}

    def on_after_batch_transfer(self, batch, dataloader_idx):
        assert self.trainer.training
        batch["b"] = batch.pop("a")
        return batch

class Hooked(Small):
    def training_step(self, batch, batch_idx):
        assert self.trainer.datamodule is not None
        self.lr_schedulers().get_last_lr()
        return super().training_step(batch["b"], batch_idx)

class Fails(Small):
    def training_step(self, batch, batch_idx):
        raise ZeroDivisionError("not this step's fault")

class Hangs(Small):
    def training_step(self, batch, batch_idx):
        open(f"{os.getpid()}.hangs", "w").close()
        time.sleep(1000)

def small():
    return Small(), BATCH

def hooked():
    return Hooked(), Rows()

def fails():
    return Fails(), BATCH

def hangs():
    return Hangs(), BATCH

def plain():
    return Small().net, BATCH
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "advised_models.py").write_text(MODELS)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))  # of processes that are started
    monkeypatch.syspath_prepend(tmp_path)  # and of those that are forked
    monkeypatch.chdir(tmp_path)
    return tmp_path


def request_of(name: str, method: Any = PLAIN, ranks: int = 1) -> dict[str, Any]:
    job = {"config": None, "batch": None, "optimizer": None, "device": "cpu"}
    how = {"method": method, "threads": 1, "fused": True, "devices": ranks, "facts": True, "trainer": {}}
    return {"job": job, "words": [f"advised_models:{name}"], "keep_heap": True, **how}


@pytest.mark.long
def test_a_process_trains_in_turns(folder: Path) -> None:
    limit = Limit(limit_s(60))
    with closing(Running(serve, request_of("small", METHODS["fused_optimizer"]), {}, 1, limit)) as running:
        first = running.first
        assert (first["model"], first["is_lightning"], first["optimizers"]) == ("Small", True, ["AdamW"])
        assert "no torch.nn.RNN, GRU or LSTM" in first["no_scan"]
        answer = running.steps(limit, 5)
        assert len(answer["ms"]) == 5
        assert answer["peak_bytes"] > 0
        assert "backward fusion: " in answer["report"]
        (lane,) = running.steps(limit, 2, spans=True)["spans"]
        assert [[name for name, _, _ in step] for step in lane][-1][:2] == ["forward", "backward"]
        assert len(running.steps(limit, 3, threads=2, fused=False)["ms"]) == 3


@pytest.mark.parametrize("name", ["Awkward", "hooked"])
def test_modules_as_lightning_takes_them(folder: Path, name: str) -> None:
    """Loaders by name with workers, hooks, schedules of few steps, frozen parts, threads of its own, checkpoints."""
    request, limit = request_of(name) | {"fused": False}, Limit(limit_s(60))
    with closing(Running(serve, request, None, 1, limit)) as running:
        assert running.first["has_fused"] == (name == "hooked")  # torch's kernel takes no complex numbers
        assert len(running.steps(limit, 5)["ms"]) == 5
    assert not [*folder.rglob("*.ckpt")]


def test_layers_of_a_class_are_timed_alone(folder: Path) -> None:
    with closing(Running(serve, request_of("Loads") | {"layers": True}, None, 1, Limit(limit_s(60)))) as running:
        assert [size for *_, size in running.first["layers"]] == [4 * 17 * 32, 0, 4 * 33 * 4]


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("fails", r"advised_models\.py, line \d+, in training_step: ZeroDivisionError: not"),
        ("plain", "Sequential has no optimizer: give --optimizer"),
    ],
)
def test_an_error_is_a_reason_and_says_where(folder: Path, name: str, said: str) -> None:
    running = Running(serve, request_of(name), None, 1, Limit(limit_s(60)))
    with closing(running), pytest.raises(MethodError, match=said):
        _ = running.first


class UntilBothHang(Limit):
    """Ends as soon as two ranks are in the middle of a step."""

    def left_s(self) -> float:
        while len([*Path().glob("*.hangs")]) < 2 and (left_s := super().left_s()):
            time.sleep(min(0.05, left_s))
        return 0.0


@pytest.mark.long
def test_ranks_that_hang_are_ended(folder: Path) -> None:
    before = {process.pid for process in psutil.Process().children(recursive=True)}
    limit = UntilBothHang(limit_s(60))
    with closing(Running(serve, request_of("hangs", METHODS["ooo_ddp"], 2), {}, 2, limit)) as running:
        with pytest.raises(MethodError, match=r"it took longer than --seconds [\d.]+: give more"):
            _ = running.first
        assert len([*folder.glob("*.hangs")]) == 2, "they had not begun to train"
    assert {process.pid for process in psutil.Process().children(recursive=True)} <= before


@pytest.mark.long
@pytest.mark.parametrize("name", ["cpu_accumulate_ddp + updates", "memory_budget_ddp, --memory"])
def test_two_ranks(folder: Path, name: str) -> None:
    limit, method = Limit(limit_s(120)), methods_for(0, 2**20, [])[name]
    with closing(Running(serve, request_of("small", method, 2), {}, 2, limit)) as running:
        answer = running.steps(limit, 3)
        assert len(answer["ms"]) == 3
        assert len(answer["spans"]) == 2


@pytest.mark.long
def test_a_whole_run(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(advise_turns, "_BLOCK_MS", 30.0)
    tried = ("fused_optimizer", "convert (scan modules)", "memory_budget", "ScanSequential")
    only = [word for name in tried for word in ("--only", name)]
    files = ("--json", "advice.json", "--html", "advice.html")
    options = ("--seconds", str(limit_s(120)), "--memory", "1GiB")  # one budget, and not two by the plain step's peak
    status = main(["advise", "advised_models:small", *options, *only, *files])
    out, errors = capsys.readouterr()
    assert status == 0, errors
    whole = json.loads((folder / "advice.json").read_text())
    assert {row["name"].partition(",")[0] for row in whole["methods"]} == set(tried)
    assert {row["verdict"] for row in whole["methods"]} >= {"does not apply"}
    assert next(row["gain"] for row in whole["methods"] if row["name"] == "fused_optimizer")
    (scans,) = [row for row in whole["methods"] if row["name"] == "ScanSequential"]
    assert scans["report"].startswith("parallel-scan backward: 3 layers in 1 scans")
    assert scans["trainer"].startswith("model.set_submodule('net', retime.ScanSequential.of(")
    assert out.splitlines()[-1].startswith("Trainer(")
    assert max(map(len, out.splitlines())) <= 100
    assert sorted(path.name for path in folder.iterdir() if path.name != "__pycache__") == [
        *("advice.html", "advice.json", "advised_models.py")
    ]


SHORT_BLOCKS = """
import sys
from retime.commands import advise_turns, main
advise_turns._BLOCK_MS = 30.0
sys.exit(main.main())
"""


@pytest.mark.long
def test_ctrl_c(folder: Path) -> None:
    """In the middle of the methods: what is known is printed and written, and no process is left."""
    options = ["--json", "advice.json", "--seconds", str(limit_s(60))]
    with subprocess.Popen(
        [sys.executable, "-c", SHORT_BLOCKS, "advise", "advised_models:small", *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a shell's background job begins without
    ) as process:
        said = ""
        while "fused_optimizer: " not in said:  # all other methods follow
            line = process.stderr.readline()
            assert line, said
            said += line
        children = psutil.Process(process.pid).children(recursive=True)  # the plain step waits beside all methods
        assert children
        os.kill(process.pid, signal.SIGINT)
        out, _ = process.communicate(timeout=limit_s(60))
    assert process.returncode == 130
    assert "the strongest plain step" in out
    whole = json.loads((folder / "advice.json").read_text())
    assert whole["interrupted"]
    assert "fused_optimizer" in [row["name"] for row in whole["methods"]]
    _, alive = psutil.wait_procs(children, timeout=limit_s(20))
    assert not alive
