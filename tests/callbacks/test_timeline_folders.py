"""A timeline that could not be written is refused before training, and none is written before there is something."""

from pathlib import Path

import pytest
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.demos.boring_classes import BoringModel

from retime.callbacks import MemoryTimeline, StepTimeline
from support.trainers import quiet_trainer

TIMELINES = (MemoryTimeline, StepTimeline)


class Batches(Callback):
    """Counts those that were begun."""

    begun = 0

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: object, batch_idx: int) -> None:
        self.begun += 1


@pytest.mark.filterwarnings("ignore:The 'train_dataloader' does not have many workers")
@pytest.mark.parametrize("kind", TIMELINES)
def test_a_folder_that_cannot_be_is_refused_before_training(kind: type, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    batches = Batches()
    timeline = kind(dirpath=tmp_path / "file" / "folder")
    trainer = quiet_trainer(default_root_dir=tmp_path, max_steps=1, callbacks=[timeline, batches])
    with pytest.raises(NotADirectoryError, match=f"{kind.__name__} cannot write into .*give another dirpath"):
        trainer.fit(BoringModel(), BoringModel().train_dataloader())
    assert batches.begun == 0


@pytest.mark.parametrize("kind", TIMELINES)
def test_nothing_is_made_before_there_is_something(kind: type, tmp_path: Path) -> None:
    timeline = kind(dirpath=tmp_path / "new" / "folder")
    trainer = Trainer(default_root_dir=tmp_path, accelerator="cpu", logger=False, enable_checkpointing=False)
    timeline.setup(trainer, BoringModel(), "fit")
    assert list(tmp_path.iterdir()) == []
