"""Gradients that are accumulated over batches, when batches run in parts or plans have to change."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.data import DataLoader

import memory_budget_support as support
from memory_budget_support import BATCH, CLASSES, FEATURES, SPLITS, Net, assert_close, fit, report_of, use_costs
from retime.strategies import MemoryBudgetStrategy

pytestmark = support.IGNORED
SMALL = 120_000


class Skips(Net):
    """A mean over the samples that count; notes how many graphs are still there when a part begins."""

    def __init__(self) -> None:
        super().__init__()
        self.saved: list[StorageWeakRef] = []
        self.graphs: list[int] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.graphs.append(sum(not saved.expired() for saved in self.saved))
        output = self.net(batch[0]).tanh()  # tanh saves it
        self.saved.append(StorageWeakRef(output.untyped_storage()))
        return F.cross_entropy(output + 0, batch[1], ignore_index=-100)


def late() -> DataLoader[Any]:
    """After the batch that is probed only the last samples count: a first part has nothing to learn from."""
    torch.manual_seed(0)
    batches = []
    for ignored in (slice(1, None, 3), slice(0, -40), slice(0, -20)):
        labels = torch.randint(CLASSES, (BATCH,))
        labels[ignored] = -100
        batches.append((torch.randn(BATCH, FEATURES), labels))
    return DataLoader(batches, batch_size=None)  # type: ignore[arg-type]


@pytest.mark.parametrize("accumulated", [1, 3])
def test_a_first_part_without_a_loss(monkeypatch: pytest.MonkeyPatch, accumulated: int) -> None:
    use_costs(monkeypatch, SPLITS)
    plain, ours = Skips(), Skips()
    fit(plain, data=late(), accumulate_grad_batches=accumulated)
    done = fit(ours, MemoryBudgetStrategy(SMALL), data=late(), accumulate_grad_batches=accumulated)
    assert report_of(done).sub_batches > report_of(done).steps == 3
    assert_close(plain, ours)
    assert not any(ours.graphs)
