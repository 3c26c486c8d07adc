"""BatchNorm under a memory budget: the whole batch, or statistics of sub-batches."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from retime.schedules.budget import BudgetError
from retime.strategies import MemoryBudgetStrategy
from support import memory_budget as support
from support.memory_budget import SMALL, TINY, Net, assert_close, fit, fit_both, loader, norm, report_of

pytestmark = support.IGNORED


def test_batch_norm_offloads_only(splits: None) -> None:
    plain, ours, report = fit_both(lambda: Net(norm), SMALL)
    assert report.sub_batches == 3
    assert report.offload.storages > 0
    assert_close(plain, ours, 0)


def test_batch_norm_below_its_floor_is_refused_by_name(splits: None) -> None:
    with pytest.raises(BudgetError, match=r"BatchNorm in train mode takes its statistics .*: net\.2, net\.5") as caught:
        fit(Net(norm), MemoryBudgetStrategy(TINY))
    assert "choose batchnorm='ghost', or a smaller batch" in str(caught.value)


def test_ghost_batch_norm_runs_below_that(splits: None) -> None:
    ours = Net(norm)
    done = fit(ours, MemoryBudgetStrategy(TINY, batchnorm="ghost"))
    assert report_of(done).sub_batches > 3
    assert all(torch.isfinite(value).all() for value in ours.state_dict().values())


class Sizes(Net):
    """Remembers the parts it was trained with; what dry runs leave is taken away."""

    def __init__(self) -> None:
        super().__init__(norm)
        self.sizes: list[tuple[int, int]] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.sizes.append((batch_idx, len(batch[0])))
        return self.loss(batch)


@pytest.mark.parametrize("extra", [31, 10, 1 + 4 * 3])
def test_no_ghost_part_is_too_small_for_a_variance(splits: None, extra: int) -> None:
    batch = 67
    ours = Sizes()
    done = fit(ours, MemoryBudgetStrategy(34_000, batchnorm="ghost"), data=loader(2, extra=extra, batch=batch))
    sub_batch = report_of(done).shapes[0].choice.plan.sub_batch
    assert sub_batch == 3, "the smallest"
    for index, samples in enumerate((batch, batch, extra)):
        sizes = [size for number, size in ours.sizes if number == index]
        assert sum(sizes) == samples
        assert 2 <= min(sizes) <= max(sizes) <= sub_batch
    assert report_of(done).sub_batches == len(ours.sizes)
