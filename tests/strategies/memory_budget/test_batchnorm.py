"""BatchNorm under a memory budget: the whole batch, or statistics of sub-batches."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from retime.schedules.budget import BudgetError
from retime.strategies import MemoryBudgetStrategy
from support import memory_budget as support
from support.memory_budget import SMALL, Net, ShallowNet, assert_close, fit, fit_both, loader, norm, report_of

pytestmark = support.IGNORED


def test_batch_norm_offloads_only(splits: None) -> None:
    plain, ours, report = fit_both(lambda: Net(norm), SMALL)
    assert report.sub_batches == 3
    assert report.offload.storages > 0
    assert_close(plain, ours, 0)


GHOST = 22_000  # below the floor of whole batches of 67


def test_batch_norm_below_its_floor_is_refused_by_name(splits: None) -> None:
    with pytest.raises(BudgetError, match=r"BatchNorm in train mode takes its statistics .*: net\.2, net\.5") as caught:
        fit(ShallowNet(norm), MemoryBudgetStrategy(GHOST), data=loader(1, batch=67))
    assert "choose batchnorm='ghost', or a smaller batch" in str(caught.value)


class Sizes(ShallowNet):
    """Remembers the parts it was trained with; what dry runs leave is taken away."""

    def __init__(self) -> None:
        super().__init__(norm)
        self.sizes: list[tuple[int, int]] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.sizes.append((batch_idx, len(batch[0])))
        return self.loss(batch)


def test_ghost_batch_norm_runs_below_that_and_no_part_is_too_small_for_a_variance(splits: None) -> None:
    ours, (data,) = Sizes(), loader(1, batch=67)
    batches = [(data[0][:samples], data[1][:samples]) for samples in (67, 31, 10, 1 + 4 * 3)]
    done = fit(ours, MemoryBudgetStrategy(GHOST, batchnorm="ghost"), data=DataLoader(batches, batch_size=None))  # type: ignore[arg-type]
    sub_batch = report_of(done).shapes[0].choice.plan.sub_batch
    assert sub_batch == 3, "the smallest"
    for index, (inputs, _) in enumerate(batches):
        sizes = [size for number, size in ours.sizes if number == index]
        assert sum(sizes) == len(inputs)
        assert 2 <= min(sizes) <= max(sizes) <= sub_batch
    assert report_of(done).sub_batches == len(ours.sizes)
    assert all(torch.isfinite(value).all() for value in ours.state_dict().values())
