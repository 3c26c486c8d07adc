"""What torch alone adds up: the naive way, at rank 0, whose weights all ranks get, and in the order of the ranks."""

from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue
from threading import local
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from retime.recipes.cpuacc.naive import RootUpdate, rank_ordered


def of(layer: nn.Module) -> RootUpdate:
    model: Any = SimpleNamespace(parameters=layer.parameters, register_comm_hook=lambda state, hook: None)
    return RootUpdate(model)


@pytest.mark.parametrize("ranks", [2, 3, 4, 5])
def test_the_root_gets_the_mean_of_all_gradients(ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    here, sent = local(), {(to, by): SimpleQueue[Tensor]() for to in range(ranks) for by in range(ranks)}
    monkeypatch.setattr(dist, "get_rank", lambda: here.rank)
    monkeypatch.setattr(dist, "get_world_size", lambda: ranks)
    monkeypatch.setattr(dist, "send", lambda values, to: sent[to, here.rank].put(values.clone()))
    monkeypatch.setattr(dist, "recv", lambda into, by: into.copy_(sent[here.rank, by].get(timeout=30)))

    def collected(rank: int) -> Tensor:
        here.rank = rank
        values = torch.tensor([float(2**rank), 1.0]) * ranks
        bucket: Any = SimpleNamespace(buffer=lambda: values)
        return of(nn.Linear(2, 2)).collect(None, bucket).wait()

    with ThreadPoolExecutor(ranks) as threads:
        root, *_ = threads.map(collected, range(ranks))
    assert root.tolist() == [2**ranks - 1, ranks]


def test_parameters_are_parts_of_what_is_broadcast(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = nn.Linear(5, 3)
    before = [parameter.detach().clone() for parameter in layer.parameters()]
    root = of(layer)
    assert all(torch.equal(*pair) for pair in zip(before, layer.parameters(), strict=True))
    assert all(parameter.data_ptr() % 64 == 0 for parameter in layer.parameters())
    monkeypatch.setattr(dist, "broadcast", lambda values, source: values.fill_(source + 7.0))
    root.broadcast_weights()
    assert all(bool((parameter == 7).all()) for parameter in layer.parameters())


def test_gradients_are_divided_and_added_one_rank_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """With these values another order gives other sums."""
    values = [torch.tensor([value]) for value in (1.0, 1e8, -1e8, 2.0)]

    def gathered(into: list[Tensor], mine: Tensor) -> None:
        assert mine.item() == 0.25
        for one, other in zip(into, values, strict=True):
            one.copy_(other / 4)

    monkeypatch.setattr(dist, "get_world_size", lambda: 4)
    monkeypatch.setattr(dist, "all_gather", gathered)
    buffer = values[0].clone()
    bucket: Any = SimpleNamespace(buffer=lambda: buffer)
    assert rank_ordered(None, bucket).wait() is buffer
    assert buffer.item() == 0.5
