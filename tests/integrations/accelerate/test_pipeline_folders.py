"""Folders of `accelerator.save_state()` of a pipeline are those of a script on one device, and the other way round."""

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("accelerate", reason="needs the extra lightning-retime[accelerate]")

from accelerate import Accelerator
from accelerate.utils import ProjectConfiguration
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils.data import DataLoader

from retime.foundations.messages import NoEffectWarning
from retime.integrations.accelerate import OutOfOrderPipeline
from support.accelerate_pipeline import (
    ACCUMULATED,
    BATCH,
    BATCHES,
    Net,
    close,
    data,
    forget_state,
    loss_of,
    optimizer_of,
    schedule_of,
)
from support.ranks import RANKS, SHARED, on_ranks, run_ranks, said_in

HALF = BATCHES // 2


class Dropped(Net):
    """With dropout behind the embedding and in each layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Sequential(self.embed, nn.Dropout(0.2))  # type: ignore[assignment]
        self.layers = nn.ModuleList(nn.Sequential(layer, nn.Dropout(0.2)) for layer in self.layers)


class Loop:
    """An Accelerate loop, over a pipeline or (on one process) without one.

    Args:
        seed: of the first values.
        kind: of the model.
        piped: whether there is a pipeline.
        options: of the pipeline.
    """

    def __init__(self, seed: int, kind: type[Net] = Net, *, piped: bool = True, **options: Any) -> None:
        self.accelerator = Accelerator(cpu=True, gradient_accumulation_steps=ACCUMULATED)
        torch.manual_seed(seed)
        self.model: nn.Module = kind()
        if not piped:
            self.model = self.accelerator.prepare(self.model)
        plain = optimizer_of(self.model)
        self.optimizer, self.scheduler = self.accelerator.prepare(plain, schedule_of(plain))
        self.pipeline = OutOfOrderPipeline(self.accelerator, self.model, self.optimizer, **options) if piped else None

    def run(self, start: int, end: int) -> list[float]:
        """The losses of these batches."""
        losses = []
        for batch in list(DataLoader(data(), BATCH))[start:end]:
            with self.accelerator.accumulate(self.model):
                losses.append(float(self._train(batch)))
                self.optimizer.step()
                self.scheduler.step()
                self.optimizer.zero_grad()
        return losses

    def _train(self, batch: Any) -> Tensor:
        if self.pipeline is not None:
            return self.pipeline.train_batch(batch, loss_of(self.model))
        loss: Tensor = loss_of(self.model)(batch)
        self.accelerator.backward(loss)
        return loss.detach()


def losses_of_one_device() -> list[float]:
    """All of them, in a plain loop that is not interrupted."""
    return Loop(0, piped=False).run(0, BATCHES)


def saves(folder: str) -> None:
    """A folder in mid-run, and a model as it is then."""
    loop = Loop(0, microbatches=4)
    loop.run(0, HALF)
    loop.accelerator.save_state(folder)
    loop.accelerator.save_model(loop.model, str(Path(folder, "model")))
    gradient = next(loop.model.parameters()).grad
    assert gradient is None


def loads(folder: str) -> None:
    """Training goes on from a folder, whoever wrote it; before the first batch and in mid-run."""
    loop = Loop(7, microbatches=2, pipeline_parallel_size=RANKS)
    for _ in range(2):
        loop.accelerator.load_state(folder)
        close(loop.run(HALF, BATCHES), losses_of_batches(folder))
    assert len(loop.optimizer.optimizer.state) < len(list(loop.model.parameters()))


def losses_of_batches(folder: str) -> list[float]:
    """Those that the other side noted beside the folder."""
    return torch.load(Path(folder).with_suffix(".losses"))


def test_a_folder_of_two_ranks_is_one_of_a_plain_script(tmp_path: Path) -> None:
    expected = losses_of_one_device()
    folder = tmp_path / "saves"
    for rank in run_ranks(2, __file__, case := f"saves|{folder}", joined=False):
        said_in(rank, case)
    plain = Loop(5, piped=False)
    plain.accelerator.save_state(str(tmp_path / "plain"))
    names = {path.name for path in folder.iterdir()} - {"model", "random_states_1.pkl"}
    assert names == {path.name for path in (tmp_path / "plain").iterdir()}
    plain.accelerator.load_state(str(folder))
    weights = load_file(folder / "model" / "model.safetensors")
    torch.testing.assert_close(weights, {key: plain.model.state_dict()[key] for key in weights}, rtol=0, atol=0)
    close(plain.run(HALF, BATCHES), expected[HALF:])
    alone = _with_warning(5)
    alone.accelerator.load_state(str(folder))
    close(alone.run(HALF, BATCHES), expected[HALF:])


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.long)])
def test_a_folder_of_a_plain_script_is_loaded_by_a_pipeline(ranks: int, tmp_path: Path) -> None:
    plain = Loop(0, piped=False)
    plain.run(0, HALF)
    plain.accelerator.save_state(str(tmp_path / "folder"))
    torch.save(plain.run(HALF, BATCHES), tmp_path / "folder.losses")
    for rank in run_ranks(ranks, __file__, case := f"loads|{tmp_path / 'folder'}", joined=False):
        said_in(rank, case)


def test_a_model_is_in_a_folder_once(tmp_path: Path) -> None:
    loop = Loop(0, piped=False)
    for number in range(2):  # the model is prepared; and a pipeline comes after another
        pipeline = _alone(loop)
        loop.accelerator.save_state(str(tmp_path / f"prepared {number}"))
        pipeline.restore()
    other = _with_warning()
    other.pipeline.restore()
    _alone(other)
    other.accelerator.save_state(str(tmp_path / "other"))
    assert {path.name for path in tmp_path.glob("*/model*")} == {"model.safetensors"}
    other.accelerator.load_state(str(tmp_path / "other"))


def _alone(loop: Loop) -> OutOfOrderPipeline:
    with pytest.warns(NoEffectWarning, match="a pipeline needs two"):
        return OutOfOrderPipeline(loop.accelerator, loop.model, loop.optimizer)


def _with_warning(seed: int = 0) -> Loop:
    with pytest.warns(NoEffectWarning, match="a pipeline needs two"):
        return Loop(seed)


@on_ranks(2, joined=False, before=forget_state)
def test_training_goes_on_bit_by_bit() -> None:
    """Bit by bit what would have come without the interruption, dropout and optimizer included."""
    loop = Loop(0, Dropped, microbatches=4)
    loop.run(0, HALF)
    loop.accelerator.save_state(str(SHARED / "resumes"), safe_serialization=False)
    losses = loop.run(HALF, BATCHES)
    weights, optimizer_state = loop.pipeline.state_dict(), loop.pipeline.optimizer_state_dict()
    again = Loop(3, Dropped, microbatches=4)
    again.accelerator.load_state(str(SHARED / "resumes"))
    assert again.run(HALF, BATCHES) == losses
    torch.testing.assert_close(again.pipeline.state_dict(), weights, rtol=0, atol=0)
    torch.testing.assert_close(again.pipeline.optimizer_state_dict(), optimizer_state, rtol=0, atol=0)


@on_ranks(2, joined=False, before=forget_state)
def test_folders_with_a_part_are_refused() -> None:
    """Folders that would hold a part for the whole; nothing is written."""
    folder = SHARED / "refuses"
    loop = Loop(0, microbatches=2)
    loop.run(0, ACCUMULATED)
    loop.accelerator.project_configuration = ProjectConfiguration(save_on_each_node=True)
    with pytest.raises(RuntimeError, match="save_on_each_node=True writes folders on machines"):
        loop.accelerator.save_state(str(folder))
    loop.accelerator.project_configuration = ProjectConfiguration()
    assert not folder.exists()
    loop.accelerator.wait_for_everyone()
    loop.pipeline.restore()
    with pytest.raises(RuntimeError, match=r"call save_state\(\) before restore\(\)"):
        loop.accelerator.save_state(str(folder))
    assert not list(folder.iterdir())
    loop.optimizer.optimizer.state.clear()
    loop.accelerator.wait_for_everyone()
    loop.accelerator.save_state(str(folder))
    if loop.accelerator.is_main_process:
        assert (folder / "model.safetensors").exists()
