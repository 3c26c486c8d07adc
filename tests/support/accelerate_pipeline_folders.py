"""Folders of `accelerator.save_state()` of a pipeline and of a plain loop; run by itself, one rank of their tests."""

from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.utils import ProjectConfiguration
from torch import Tensor, nn
from torch.utils.data import DataLoader

from retime.integrations.accelerate import OutOfOrderPipeline
from support.accelerate_pipeline_worker import (
    ACCUMULATED,
    BATCH,
    BATCHES,
    Net,
    data,
    loss_of,
    main,
    optimizer_of,
    schedule_of,
)

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
    print("saved")


def loads(folder: str, ranks: str) -> None:
    """Training goes on from a folder, whoever wrote it; before the first batch and in mid-run."""
    loop = Loop(7, microbatches=2, pipeline_parallel_size=int(ranks))
    for _ in range(2):
        loop.accelerator.load_state(folder)
        torch.testing.assert_close(loop.run(HALF, BATCHES), losses_of_batches(folder), rtol=2e-4, atol=2e-5)
    assert len(loop.optimizer.optimizer.state) < len(list(loop.model.parameters()))
    print("went on")


def losses_of_batches(folder: str) -> list[float]:
    """Those that the other side noted beside the folder."""
    expected: list[float] = torch.load(Path(folder).with_suffix(".losses"))
    return expected


def resumes(folder: str) -> None:
    """Bit by bit what would have come without the interruption, dropout and optimizer included."""
    loop = Loop(0, Dropped, microbatches=4)
    loop.run(0, HALF)
    loop.accelerator.save_state(folder, safe_serialization=False)
    losses = loop.run(HALF, BATCHES)
    assert loop.pipeline is not None
    weights, optimizer_state = loop.pipeline.state_dict(), loop.pipeline.optimizer_state_dict()
    again = Loop(3, Dropped, microbatches=4)
    again.accelerator.load_state(folder)
    assert again.run(HALF, BATCHES) == losses
    assert again.pipeline is not None
    torch.testing.assert_close(again.pipeline.state_dict(), weights, rtol=0, atol=0)
    torch.testing.assert_close(again.pipeline.optimizer_state_dict(), optimizer_state, rtol=0, atol=0)
    print("resumed")


def refuses(folder: str) -> None:
    """Folders that would hold a part for the whole; nothing is written."""
    loop = Loop(0, microbatches=2)
    loop.run(0, ACCUMULATED)
    loop.accelerator.project_configuration = ProjectConfiguration(save_on_each_node=True)
    with pytest.raises(RuntimeError, match="save_on_each_node=True writes folders on machines"):
        loop.accelerator.save_state(folder)
    loop.accelerator.project_configuration = ProjectConfiguration()
    assert not Path(folder).exists()
    loop.accelerator.wait_for_everyone()
    assert loop.pipeline is not None
    loop.pipeline.restore()
    with pytest.raises(RuntimeError, match=r"call save_state\(\) before restore\(\)"):
        loop.accelerator.save_state(folder)
    assert not list(Path(folder).iterdir())
    loop.optimizer.optimizer.state.clear()
    loop.accelerator.wait_for_everyone()
    loop.accelerator.save_state(folder)
    if loop.accelerator.is_main_process:
        assert Path(folder, "model.safetensors").exists()
    print("refused")


if __name__ == "__main__":
    main(globals())
