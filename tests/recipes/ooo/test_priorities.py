"""The peer that sends by priority: what is most urgent of what is there leaves next, partition by partition."""

import threading
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from retime.recipes.ooo import variants
from retime.recipes.ooo.variants import PriorityReducer


@pytest.mark.parametrize("credit", [1, 2, 3])
def test_the_most_urgent_partition_leaves_as_soon_as_another_has_arrived(monkeypatch, credit: int) -> None:
    sent: list[tuple[Tensor, Future]] = []
    left = threading.Semaphore(0)

    def all_reduce(part: Tensor, group: None, async_op: bool) -> SimpleNamespace:
        sent.append((part, Future()))
        left.release()
        return SimpleNamespace(get_future=lambda work=sent[-1][1]: work)

    monkeypatch.setattr(variants, "own_group", lambda: None)
    monkeypatch.setattr(variants, "close_group", lambda group: None)
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    monkeypatch.setattr(dist, "broadcast", lambda choice, root, group: None)
    monkeypatch.setattr(dist, "all_reduce", all_reduce)
    reducer = PriorityReducer(credit, partition_bytes=8)
    done = [reducer.start(0, torch.tensor([0.0, 0.0, 0.1, 0.1, 0.2, 0.2, 0.3, 0.3]))]
    assert all(left.acquire(timeout=30) for _ in range(credit)), "what is there leaves, up to the credit"
    done += [reducer.start(number, torch.tensor([0.0, 0.0, 0.5]) + number) for number in (1, 2)]
    for number in range(8):
        assert not left.acquire(blocking=False), "no more than the credit is on its way"
        part, work = sent[number]
        part.add_(1)
        work.set_result([part])
        assert number >= 8 - credit or left.acquire(timeout=30)
    assert done[0].wait().tolist() == pytest.approx([1.0, 1.0, 1.1, 1.1, 1.2, 1.2, 1.3, 1.3])
    assert [one.wait().tolist() for one in done[1:]] == [[2.0, 2.0, 2.5], [3.0, 3.0, 3.5]]
    order = [0.0, 0.1, 0.2, 0.3]
    order[credit:credit] = [2.0, 2.5, 1.0, 1.5]
    assert [part[0].item() - 1 for part, _ in sent] == pytest.approx(order, abs=1e-6)
    failed = reducer.start(0, torch.zeros(2))
    assert left.acquire(timeout=30)
    sent[-1][1].set_exception(RuntimeError("another rank is gone"))
    with pytest.raises(RuntimeError, match="another rank is gone"):
        failed.wait()
    reducer.close()
