"""Names that a step binds anew are found in its code, wherever it reaches it, and bound as they were again."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
from torch import nn

from retime.foundations.preserve_state.outside import GlobalsSnapshot

number = 0


def count(batch: Any) -> None:
    global number
    number += 1


class Counter(nn.Module):
    total = 0

    def forward(self, batch: Any) -> None:
        Counter.total += 1
        count(batch)


class Plain:
    def __call__(self, batch: Any) -> None:
        count(batch)


def _new_global(batch: Any) -> None:
    global appeared
    appeared = 1


STEPS: dict[str, Callable[[Any], Any]] = {
    "function": count,
    "called": lambda batch: count(batch),
    "partial": functools.partial(lambda batch, more: count(batch), more=1),
    "object": lambda batch, one=None: Plain()(batch),
    "inner function": lambda batch: [count(one) for one in (batch,)],
}


@pytest.mark.parametrize("name", STEPS)
def test_globals_are_found(name: str) -> None:
    global number
    number = 3
    names = GlobalsSnapshot(STEPS[name], nn.Identity())
    STEPS[name](None)
    assert number == 4
    names.put_back()
    assert number == 3


def test_a_models_methods_and_classes_are_looked_into() -> None:
    global number
    number, Counter.total, model = 0, 5, nn.Sequential(Counter())
    names = GlobalsSnapshot(lambda batch: model(batch), model)
    model(None)
    names.put_back()
    assert (number, Counter.total) == (0, 5)


def test_variables_of_enclosing_functions_are_found() -> None:
    seen = 0

    def step(batch: Any) -> None:
        def more() -> None:
            nonlocal seen
            seen += 1

        more()

    names = GlobalsSnapshot(lambda batch: step(batch), nn.Identity())
    step(None)
    assert seen == 1
    assert [value for value in names.numbers().values() if value == 1]
    names.put_back()
    assert seen == 0


def test_a_name_that_was_not_there_goes() -> None:
    names = GlobalsSnapshot(_new_global, nn.Identity())
    _new_global(None)
    names.put_back()
    assert "appeared" not in globals()


class Lazy(dict[str, Any]):
    """Imports what it is asked for, as Transformers' mappings of models do."""

    def values(self) -> Any:
        raise AssertionError("asked for all of it")


LAZY = Lazy(known=1)


def test_mappings_that_import_what_they_are_asked_for_are_not_asked() -> None:
    GlobalsSnapshot(lambda batch: LAZY["known"], nn.Linear(1, 1))
