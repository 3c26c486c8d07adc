"""What a step leaves in its modules while it is only tried out is taken away again."""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from typing import Any

import pytest
import torch

from retime.foundations.preserve_state.state import preserve_state
from support import memory_budget as support

pytestmark = support.IGNORED


def change_deep(kept: dict[str, Any]) -> None:
    kept["by name"]["loss"].append(1)
    kept["by name"]["new"] = []


KEPT: dict[str, tuple[Any, Callable[[Any], Any]]] = {
    "list": ([1], lambda kept: kept.append(2)),
    "dict in a dict": ({"by name": {"loss": []}}, change_deep),
    "list in a tuple": (([1], {"a": [2]}), lambda kept: kept[1]["a"].clear()),
    "set in a list": ([{1, 2}], lambda kept: kept[0].discard(2)),
    "deque": (deque([1, 2], maxlen=2), lambda kept: kept.append(3)),
    "list in a deque": (deque([[1]]), lambda kept: kept[0].append(3)),
    "counter": (Counter(a=2), lambda kept: kept.update(a=3)),
    "default": (defaultdict(list, a=[1]), lambda kept: (kept["a"].append(2), kept["b"].append(3))),
    "ordered": (OrderedDict(a=[1], b=2), lambda kept: (kept["a"].append(2), kept.move_to_end("a"))),
}


@pytest.mark.parametrize("kind", list(KEPT))
def test_containers(kind: str) -> None:
    module = torch.nn.Sequential(torch.nn.Linear(1, 1))
    kept, change = KEPT[kind]
    module[0].kept = kept
    before, bound = repr(kept), getattr(kept, "maxlen", None)
    with preserve_state(module):
        change(module[0].kept)
        assert repr(kept) != before
        module[0].kept = None
    assert module[0].kept is kept
    assert repr(kept) == before
    assert getattr(kept, "maxlen", None) == bound


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
