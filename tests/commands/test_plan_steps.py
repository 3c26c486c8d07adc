"""`retime plan` for steps as people write them: arguments by position, a trainer, a batch that is a dict."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from retime.commands.main import main
from support import memory_budget as support
from support.memory_budget import Net

pytestmark = support.IGNORED


class ByPosition(Net):
    def training_step(self, b: Any, i: int) -> Tensor:  # type: ignore[override]
        assert i == 0
        return self.loss(b)

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        steps = self.trainer.estimated_stepping_batches
        return [optimizer], [torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=int(steps))]


def by_position() -> Any:
    return ByPosition(), next(iter(support.loader(1)))


class Language(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(20, 8)
        self.out = nn.Linear(8, 20)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Any:
        logits = self.out(self.words(input_ids))
        return SimpleNamespace(loss=F.cross_entropy(logits.flatten(0, 1), labels.flatten()), logits=logits)


def language() -> Any:
    ids = torch.randint(20, (16, 5))
    return Language(), {"input_ids": ids, "labels": ids}


@pytest.mark.parametrize(("name", "more"), [("by_position", ()), ("language", ("--optimizer", "torch.optim.SGD"))])
def test_is_planned(capsys: pytest.CaptureFixture[str], name: str, more: tuple[str, ...]) -> None:
    status = main(["plan", f"{__name__}:{name}", "--budget", "1GiB", *more])
    told = capsys.readouterr()
    assert status == 0, told.err
    assert "none: the step fits" in told.out
