"""The peer that sends by priority: what is most urgent of what is there leaves next, partition by partition."""

import threading

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from retime.recipes.ooo import variants
from retime.recipes.ooo.variants import PriorityReducer


def test_the_most_urgent_partition_that_is_there_leaves_next(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[float] = []
    began, goes_on = threading.Event(), threading.Event()

    def all_reduce(part: Tensor, group: None) -> None:
        sent.append(part[0].item())
        began.set()
        assert goes_on.wait(30)
        part.add_(1)

    monkeypatch.setattr(variants, "own_group", lambda: None)
    monkeypatch.setattr(variants, "close_group", lambda group: None)
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    monkeypatch.setattr(dist, "broadcast", lambda choice, root, group: None)
    monkeypatch.setattr(dist, "all_reduce", all_reduce)
    reducer = PriorityReducer(partition_bytes=8)
    done = [reducer.start(0, torch.tensor([0.0, 0.0, 0.1, 0.1]))]
    assert began.wait(30), "the first leaves at once, as nothing else is there"
    done += [reducer.start(number, torch.tensor([0.0, 0.0, 0.5]) + number) for number in (1, 2)]
    goes_on.set()
    values = [one.wait().tolist() for one in done]
    reducer.close()
    assert sent == pytest.approx([0.0, 2.0, 2.5, 1.0, 1.5, 0.1])
    assert values == [pytest.approx([1.0, 1.0, 1.1, 1.1]), [2.0, 2.0, 2.5], [3.0, 3.0, 3.5]]
