"""Storages that are watched to their end: users notice nothing, and Ctrl-C is not lost."""

import copy
import ctypes
import gc
import io
import operator
import pickle
import signal
from collections import deque
from collections.abc import Callable
from functools import partial
from multiprocessing.reduction import ForkingPickler
from pathlib import Path

import pytest
import torch
from torch import Tensor

from retime.mechanisms.memory_budget.offload.hosts import HostDisk, HostMemory
from support.memory_budget import offload_all

pytestmark = pytest.mark.usefixtures("interrupts")


@pytest.fixture
def leaf() -> Tensor:
    return torch.linspace(0, 1, 1000, requires_grad=True)


def saved(value: Tensor) -> Tensor:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file)  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    "take",
    [
        copy.deepcopy,
        copy.copy,
        saved,
        lambda value: pickle.loads(pickle.dumps(value)),
        lambda value: ForkingPickler.loads(ForkingPickler.dumps(value)),
        lambda value: torch.tensor([]).set_(value.untyped_storage().clone().untyped()),
        lambda value: torch.tensor([]).set_(value.storage()),
        lambda value: torch.tensor(value.numpy()),
    ],
    ids=["deepcopy", "copy", "save", "pickle", "process", "clone", "typed", "numpy"],
)
@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")
def test_saved_tensors_can_be_copied_and_sent(take: Callable[[Tensor], Tensor], leaf: Tensor) -> None:
    with offload_all(HostMemory("cpu"), [leaf]):
        value = leaf.exp()
    assert torch.equal(take(value.detach()), value.detach())
    value.sum().backward()
    assert torch.equal(leaf.grad, value.detach())


def interrupted_in(call: Callable[[], object]) -> None:
    """Ctrl-C arrives right before the first step of Python's own in ``call``."""
    interrupt = partial(getattr(ctypes.CDLL(None), "raise"), int(signal.SIGINT))
    deque(map(operator.call, [interrupt, call]), maxlen=0)


@pytest.mark.parametrize("tier", ["memory", "disk"])
def test_an_interruption_at_a_graphs_end_is_not_lost(tier: str, tmp_path: Path, leaf: Tensor) -> None:
    host = HostMemory("cpu") if tier == "memory" else HostDisk(tmp_path)
    with offload_all(host, [leaf]):
        graphs = [leaf.exp().sum()]
    with pytest.raises(KeyboardInterrupt):
        interrupted_in(graphs.clear)
    assert host.live_bytes() == 0
    host.close()


@pytest.mark.parametrize("tier", ["memory", "disk"])
def test_an_interruption_where_a_storage_leaves_is_not_lost(tier: str, tmp_path: Path, leaf: Tensor) -> None:
    host = HostMemory("cpu") if tier == "memory" else HostDisk(tmp_path)
    offload = offload_all(host, [leaf])

    def forward() -> list[Tensor]:
        with offload:
            values = [leaf.exp()]
            values.append(values[0].sum())
            if not whole:
                interrupted_in(partial(values.pop, 0))
            return values

    whole = False
    with pytest.raises(KeyboardInterrupt):
        forward()
    assert host.live_bytes() == 0
    whole = True
    values = forward()
    interrupted_in(partial(values.pop, 0))
    assert host.live_bytes() == leaf.nbytes  # it left all the same
    with pytest.raises(KeyboardInterrupt):
        values[0].backward()
    host.close()


@pytest.mark.parametrize("in_flight_bytes", [0, 10**6])
def test_storages_that_end_while_the_host_is_busy_wait_their_turn(
    in_flight_bytes: int, tmp_path: Path, leaf: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Garbage may be collected in the middle of anything that the host does, on the thread that copies too."""
    host = HostDisk(tmp_path)
    waiting: list[list[Tensor]] = []
    take = host._extents.take

    def collected(nbytes: int) -> int:
        if waiting:
            waiting.pop().clear()
        return take(nbytes)

    monkeypatch.setattr(host._extents, "take", collected)
    with offload_all(host, [leaf], in_flight_bytes):
        first, second = leaf.exp(), leaf.sin().exp()
        loss = first.sum() + second.sum()
        waiting.append([second])
        del second
        del first
        third = leaf.cos().exp()
        loss = loss + third.sum()
        host._pool.submit([third].clear).result()
        del third
    loss.backward()
    expected = leaf.detach().requires_grad_()
    (expected.exp().sum() + expected.sin().exp().sum() + expected.cos().exp().sum()).backward()
    assert torch.equal(leaf.grad, expected.grad)
    host.close()


def test_a_storage_that_others_keep_never_leaves(leaf: Tensor) -> None:
    offload = offload_all(HostMemory("cpu"), [leaf])
    with offload:
        value = leaf.exp()
    value.sum().backward()
    assert offload.report().bytes_out == 0
    del value
    gc.collect()
    assert offload.report().bytes_out == 0
