"""ParallelScanBackward inside Lightning's Trainer: when it converts, what it reports, checkpoints both ways."""

from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from retime.callbacks import ParallelScanBackward
from retime.foundations.messages import NoEffectWarning
from retime.modules import ScanGRU, convert
from support.trainers import IGNORED_WARNINGS, quiet_trainer

pytestmark = [*IGNORED_WARNINGS, pytest.mark.filterwarnings("ignore:`training_step` returned `None`")]
FEATURES, HIDDEN = 4, 5


class Sequences(LightningModule):
    """A recurrent network, built in the constructor or, with `late`, in `setup` or `configure_model`."""

    def __init__(self, late: str = "", kind: type[nn.Module] = nn.GRU) -> None:
        super().__init__()
        self.late, self.kind = late, kind
        self.seen: list[str] = []
        self.rnn: nn.Module | None = None
        if not late:
            self.build()
        self.head = nn.Linear(HIDDEN, 2)

    def build(self) -> None:
        if self.rnn is None:
            torch.manual_seed(0)
            self.rnn = self.kind(FEATURES, HIDDEN, batch_first=True)

    def setup(self, stage: str) -> None:
        if self.late == "setup":
            self.build()

    def configure_model(self) -> None:
        if self.late == "configure_model":
            self.build()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        self.seen.append(type(self.rnn).__name__)
        return torch.optim.Adam(self.parameters(), lr=0.01)

    def training_step(self, batch: Any, index: int) -> Tensor:
        assert self.rnn is not None
        if not index:
            self.seen.append(type(self.rnn).__name__)
        return self.head(self.rnn(batch[0])[0]).square().mean()


def loader() -> DataLoader[Any]:
    torch.manual_seed(1)
    return DataLoader(TensorDataset(torch.randn(8, 6, FEATURES)), batch_size=4)


def trainer(*callbacks: Any, folder: Any = None, **options: Any) -> Trainer:
    kept = {"enable_checkpointing": folder is not None, "default_root_dir": folder}
    return quiet_trainer(**{**kept, "max_epochs": 2, "callbacks": list(callbacks), **options})


class TestFit:
    def test_trains_as_without(self) -> None:
        plain, scan = Sequences(), Sequences()
        scan.head.load_state_dict(plain.head.state_dict())
        trainer().fit(plain, loader())
        callback = ParallelScanBackward(solver="chunk")
        trainer(callback).fit(scan, loader())
        assert plain.seen[0] == "GRU"
        assert set(scan.seen) == {"ScanGRU"}
        for mine, theirs in zip(scan.parameters(), plain.parameters(), strict=True):
            assert torch.allclose(mine, theirs, atol=1e-6)
        assert callback.report().swapped == {"rnn": "GRU -> ScanGRU"}
        assert type(scan.rnn) is nn.GRU

    @pytest.mark.parametrize("late", ["setup", "configure_model"])
    @pytest.mark.parametrize("names", [None, ["rnn"]])
    def test_modules_that_are_built_late(self, late: str, names: list[str] | None) -> None:
        module = Sequences(late)
        optimizers = []
        callback = ParallelScanBackward(names=names)
        fit = trainer(callback)
        fit.fit(module, loader())
        optimizers = fit.optimizers
        assert module.seen[-1] == "ScanGRU"
        assert module.rnn is not None
        trained = {id(p) for group in optimizers[0].param_groups for p in group["params"]}
        assert {id(p) for p in module.parameters()} == trained
        assert callback.report().swapped == {"rnn": "GRU -> ScanGRU"}

    @pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`")
    def test_checkpoints_load_without_it_and_the_reverse(self, tmp_path: Any) -> None:
        saver = ModelCheckpoint(save_last=True, dirpath=tmp_path / "scan")
        first = Sequences()
        trainer(ParallelScanBackward(), saver, folder=tmp_path).fit(first, loader())
        plain = Sequences()
        resumed = trainer(max_epochs=3)
        resumed.fit(plain, loader(), ckpt_path=saver.last_model_path)
        assert resumed.current_epoch == 3
        second = ModelCheckpoint(save_last=True, dirpath=tmp_path / "plain")
        trainer(second, folder=tmp_path).fit(Sequences(), loader())
        scan = Sequences()
        callback = ParallelScanBackward()
        trainer(callback, max_epochs=3).fit(scan, loader(), ckpt_path=second.last_model_path)
        assert callback.report().swapped
        for mine, theirs in zip(scan.parameters(), plain.parameters(), strict=True):
            assert mine.shape == theirs.shape
        loaded = Sequences.load_from_checkpoint(saver.last_model_path)
        for mine, theirs in zip(loaded.parameters(), first.parameters(), strict=True):
            assert torch.equal(mine, theirs)

    def test_what_the_user_converted_stays(self) -> None:
        module = Sequences()
        convert(module, solver="sequential")
        with pytest.warns(NoEffectWarning, match=r"already ScanGRU\(solver='sequential'\)"):
            trainer(ParallelScanBackward()).fit(module, loader())
        assert type(module.rnn) is ScanGRU
        assert module.rnn.solver == "sequential"

    def test_no_recurrent_module(self) -> None:
        class Flat(Sequences):
            def build(self) -> None:
                self.rnn = None

            def training_step(self, batch: Any, index: int) -> Tensor:
                return self.head(batch[0][..., :1].expand(-1, -1, HIDDEN)).square().mean()

        with pytest.warns(NoEffectWarning, match="Flat has no torch.nn.RNN, GRU or LSTM"):
            trainer(ParallelScanBackward()).fit(Flat(), loader())

    def test_wrong_name_is_refused_before_the_first_step(self) -> None:
        module = Sequences()
        with pytest.raises(ValueError, match="no such module 'rnm'; there are 'rnn'"):
            trainer(ParallelScanBackward(names="rnm")).fit(module, loader())
        assert len(module.seen) == 1

    def test_undone_after_an_exception(self) -> None:
        class Failing(Sequences):
            def on_train_batch_end(self, *_: Any) -> None:
                raise RuntimeError("stop")

        module = Failing()
        with pytest.raises(RuntimeError, match="stop"):
            trainer(ParallelScanBackward()).fit(module, loader())
        assert type(module.rnn) is nn.GRU

    def test_evaluation_converts_nothing(self) -> None:
        class Evaluated(Sequences):
            validation_step = Sequences.training_step

        module = Evaluated()
        trainer(ParallelScanBackward()).validate(module, loader(), verbose=False)
        assert module.seen == ["GRU"]
