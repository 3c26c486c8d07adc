"""What modules hold is found wherever it is, and put back; what is none of the model's own state is left alone."""

import random
import threading
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import nn

from retime.foundations.preserve_state.state import LARGE_BYTES, ReachableState, lazy_copy, preserve_state, replaced


class Pair(NamedTuple):
    one: Any
    two: Any


@dataclass(slots=True)
class Slotted:
    count: int = 0
    kept: Any = None


class Stats:
    """Such as a user's own meter."""

    def __init__(self, kept: Any = None) -> None:
        self.count = 0
        self.by_name: dict[str, list[int]] = {"seen": []}
        self.kept = kept


class Called(Stats):
    def __call__(self) -> None:
        self.count += 1


def holder(kept: Any) -> nn.Module:
    module = nn.Sequential(nn.Linear(1, 1))
    module[0].kept = kept
    return module


WEIGHT = torch.ones(2)
PLACES: dict[str, Callable[[Any], Any]] = {
    "attribute": lambda tensor: tensor,
    "list": lambda tensor: [tensor],
    "deque": lambda tensor: deque([tensor]),
    "dict in a list": lambda tensor: [{"w": tensor}],
    "tuple in a tuple": lambda tensor: (1, (tensor,)),
    "named tuple": lambda tensor: Pair(0, tensor),
    "partial": lambda tensor: partial(torch.add, tensor),
    "partial by name": lambda tensor: partial(torch.add, other=tensor),
    "object": Stats,
    "namespace": lambda tensor: SimpleNamespace(kept=tensor),
    "slots": lambda tensor: Slotted(kept=tensor),
    "list in an object in a list": lambda tensor: [Stats([tensor])],
    "hidden module": lambda tensor: [holder(tensor)],
    "module in an object": lambda tensor: Stats(holder(tensor)),
}


@pytest.mark.parametrize("place", list(PLACES))
def test_tensors_are_found_and_can_be_replaced(place: str) -> None:
    module = holder(PLACES[place](WEIGHT))
    other = torch.zeros(2)
    seen: list[int] = []

    def change(tensor: torch.Tensor) -> torch.Tensor:
        seen.append(id(tensor))
        return other if tensor is WEIGHT else tensor

    for container, key in ReachableState(module.modules()).places:
        container[key] = replaced(container[key], change)
    assert id(WEIGHT) in seen
    again = [container[key] for container, key in ReachableState(module.modules()).places]
    assert len(again) == len(seen), "each of them once"
    seen.clear()
    for value in again:
        replaced(value, change)
    assert id(WEIGHT) not in seen
    assert id(other) in seen


def counted(stats: Any) -> None:
    stats.count += 1


def changed_deep(stats: Stats) -> None:
    stats.by_name["seen"].append(1)
    stats.by_name["new"] = []
    stats.new = 1
    del stats.kept


CHANGED: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "list": (lambda: [1], lambda kept: kept.append(2)),
    "dict in a dict": (
        lambda: {"by name": {"loss": []}},
        lambda kept: (kept["by name"]["loss"].append(1), kept["by name"].update(new=[])),
    ),
    "list in a tuple": (lambda: ([1], {"a": [2]}), lambda kept: kept[1]["a"].clear()),
    "set in a list": (lambda: [{1, 2}], lambda kept: kept[0].discard(2)),
    "deque": (lambda: deque([1, 2], maxlen=2), lambda kept: kept.append(3)),
    "list in a deque": (lambda: deque([[1]]), lambda kept: kept[0].append(3)),
    "counter": (lambda: Counter(a=2), lambda kept: kept.update(a=3)),
    "default": (lambda: defaultdict(list, a=[1]), lambda kept: (kept["a"].append(2), kept["b"].append(3))),
    "ordered": (lambda: OrderedDict(a=[1], b=2), lambda kept: (kept["a"].append(2), kept.move_to_end("a"))),
    "attribute of an object": (Stats, counted),
    "containers of an object": (Stats, changed_deep),
    "slot": (Slotted, counted),
    "object in a dict": (lambda: {"a": Stats()}, lambda kept: counted(kept["a"])),
    "object that is called": (Called, lambda kept: kept()),
    "namespace": (lambda: SimpleNamespace(count=0), counted),
    "hidden module": (lambda: [holder(0)], lambda kept: setattr(kept[0][0], "kept", 1)),
    "array": (lambda: np.zeros(3), lambda kept: kept.__iadd__(1)),
    "array in an object": (lambda: Stats(np.zeros(3)), lambda kept: kept.kept.__iadd__(1)),
    "torch": (lambda: torch.Generator().manual_seed(1), lambda kept: torch.rand(2, generator=kept)),
    "numpy": (lambda: np.random.default_rng(1), lambda kept: kept.random()),
    "old numpy": (lambda: np.random.RandomState(1), lambda kept: kept.rand()),
    "bits of numpy": (lambda: np.random.PCG64(1), lambda kept: kept.random_raw()),
    "python": (lambda: random.Random(1), lambda kept: kept.random()),
    "generator in an object": (lambda: Stats(random.Random(1)), lambda kept: kept.kept.random()),
    "generator in a partial": (
        lambda: partial(torch.rand, 2, generator=torch.Generator().manual_seed(1)),
        lambda kept: kept(),
    ),
}


def state_of(kept: Any) -> str:
    """All of it, as text."""
    if isinstance(kept, torch.Generator):
        return str(kept.get_state().tolist())
    if isinstance(kept, random.Random):
        return str(kept.getstate())
    if isinstance(kept, np.random.RandomState):
        return str(kept.get_state())
    if isinstance(kept, np.random.Generator):
        return str(kept.bit_generator.state)
    if isinstance(kept, np.random.BitGenerator):
        return str(kept.state)
    if isinstance(kept, partial):
        return state_of(kept.keywords["generator"])
    if isinstance(kept, dict):
        return str({key: state_of(value) for key, value in kept.items()})
    if isinstance(kept, list):
        return str([state_of(value) for value in kept])
    if isinstance(kept, nn.Module):
        return str([state_of(module.__dict__.get("kept")) for module in kept.modules()])
    return state_of(vars(kept)) if hasattr(kept, "__dict__") and not isinstance(kept, Slotted) else repr(kept)


@pytest.mark.parametrize("kind", list(CHANGED))
def test_what_a_step_changes_comes_back(kind: str) -> None:
    make, change = CHANGED[kind]
    kept = make()
    module = holder(kept)
    before = state_of(kept)
    with preserve_state(module):
        change(kept)
        assert state_of(kept) != before
        module[0].kept = None
    assert module[0].kept is kept
    assert state_of(kept) == before


def test_containers_that_hold_themselves() -> None:
    module = torch.nn.Linear(1, 1)
    module.kept = [1]
    module.kept.append(module.kept)
    with preserve_state(module):
        module.kept.append(2)
    assert len(module.kept) == 2


def test_buffers_that_a_step_adds() -> None:
    module = torch.nn.Linear(1, 1)
    with preserve_state(module):
        module.register_buffer("mean", torch.zeros(1))
    assert not hasattr(module, "mean")


class Fetcher:
    """Fills its list from a thread, which goes on while a step is tried out."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.ready: list[int] = []


@pytest.mark.parametrize("kept", [Fetcher(), torch.optim.SGD([torch.ones(1)])], ids=["of a thread", "optimizer"])
def test_what_belongs_to_somebody_else_is_left_alone(kept: Any) -> None:
    module = holder(kept)
    with preserve_state(module):
        kept.ready = [1]
    assert kept.ready == [1]


def test_attributes_that_did_not_change_are_not_written() -> None:
    """Another thread may be reading them, and containers may count their changes."""

    class Watched(dict[str, int]):
        def clear(self) -> None:
            raise AssertionError

        def __setitem__(self, key: str, value: int) -> None:
            raise AssertionError

    with preserve_state(holder(Watched(a=1))):
        pass


@pytest.mark.parametrize("entries", [4, LARGE_BYTES])
def test_copies_are_apart_from_what_they_were_made_of(entries: int) -> None:
    tensor = torch.zeros(entries)
    copy = lazy_copy(tensor)
    copy.add_(1)
    assert tensor.count_nonzero() == 0
    tensor.add_(2)
    assert bool((copy == 1).all())


def test_memory_that_is_not_torchs_own_is_copied_at_once() -> None:
    array = np.zeros(LARGE_BYTES, dtype=np.float32)
    lazy_copy(torch.from_numpy(array)).add_(1)
    assert not array.any()


def test_a_large_table_is_not_copied_until_it_is_written_into() -> None:
    table = torch.zeros(LARGE_BYTES)
    copy = lazy_copy(table)
    assert float((copy * 2).sum()) == 0
    assert torch._C._is_cow_tensor(copy)
    copy.add_(1)
    assert not torch._C._is_cow_tensor(copy)
