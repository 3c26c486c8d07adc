"""Variables outside of the model that a step changes are found in its code, wherever it reaches it, before it runs."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from retime.foundations.preserve_state import ExternalWriteError, external_write
from retime.mechanisms.memory_budget import TrainingStep, certify, profile_step

number = 0
counts: dict[str, int] = {"calls": 0}
seen: list[int] = []
state = SimpleNamespace(calls=0)


def count(batch: Any) -> None:
    global number
    number += 1


class Counter(nn.Module):
    total = 0

    def forward(self, batch: Any) -> None:
        Counter.total += 1


class OfType(nn.Module):
    total = 0

    def forward(self, batch: Any) -> None:
        self.add(batch)

    def add(self, batch: Any) -> None:
        type(self).total += 1


class OfItsClass(OfType):
    def add(self, batch: Any) -> None:
        self.__class__.total += 1


class Classmethod(OfType):
    @classmethod
    def add(cls, batch: Any) -> None:
        cls.total = 1


class ByText(nn.Module):
    def training_step(self, batch: Any) -> None:
        getattr(self, "other")(batch)  # noqa: B009

    def other(self, batch: Any) -> None:
        count(batch)


class Calling:
    def __call__(self, batch: Any) -> None:
        count(batch)


def entry(batch: Any) -> None:
    counts["calls"] += 1


def item(batch: Any) -> None:
    counts["calls"] = 2


def appended(batch: Any) -> None:
    seen.append(1)


def attribute(batch: Any) -> None:
    state.calls += 1


def enclosing() -> Callable[[Any], None]:
    calls = 0

    def step(batch: Any) -> None:
        def more() -> None:
            nonlocal calls
            calls += 1

        more()

    return lambda batch: step(batch)


WRITES: dict[str, Any] = {
    "function": count,
    "called": lambda batch: count(batch),
    "partial": functools.partial(lambda batch, more: count(batch), more=1),
    "object": lambda batch, one=None: Calling()(batch),
    "decorated": torch.no_grad()(count),
    "inner function": lambda batch: [count(one) for one in (batch,)],
    "enclosing function": enclosing(),
    "entry of a dict": entry,
    "new entry of a dict": item,
    "list": appended,
    "attribute of an object": attribute,
    "attribute of a class": Counter(),
    "attribute of its type": OfType(),
    "attribute of its class": OfItsClass(),
    "attribute in a class method": Classmethod(),
    "method by text": ByText(),
}


@pytest.mark.parametrize("name", WRITES)
def test_what_is_changed_is_named_with_its_line(name: str) -> None:
    step, batch = WRITES[name], torch.ones(4, 1)
    model = nn.Sequential(step) if isinstance(step, nn.Module) else nn.Identity()
    with pytest.raises(ExternalWriteError) as refused:
        profile_step(TrainingStep(model, batch, 4, step))
    said = str(refused.value)
    assert said in certify(step, batch, model).reason
    assert "test_external_names.py:" in said
    assert "keep it in an attribute of the model, or give dry_run='off'" in said
    assert any(word in said for word in ("number", "calls", "counts", "seen", "state", "Counter", "a class"))


@dataclass
class Shown:
    """Python's own code for its text keeps which are under way."""

    one: int


class Own(nn.Module):
    """Keeps all in itself, and hooks that no step calls keep something elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        count(self)
        self.calls, self.history, self.by_name = 0, list[int](), {"calls": 0}

    def forward(self, batch: Any) -> int:
        self.calls += 1
        self.history.append(number)
        self.by_name["calls"] += 1
        here: list[int] = []
        total = len(repr(Shown(1))) and Shown.__repr__(Shown(1)).find("x")

        def add(one: int) -> None:
            nonlocal total
            total += one
            here.append(total)

        add(counts["calls"])
        return total + len(seen)

    def on_validation_end(self) -> None:
        count(self)


def through_a_closure() -> tuple[Own, Callable[[Any], Any]]:
    model = Own()

    def step(batch: Any) -> Any:
        model.calls += 1
        model.training = True
        return model(batch)

    return model, step


class Lazy(dict[str, Any]):
    """Imports what it is asked for, as Transformers' mappings of models do."""

    values = None  # type: ignore[assignment]


LAZY = Lazy(known=1)


@pytest.mark.parametrize("step", [through_a_closure, lambda: (nn.Linear(1, 1), lambda batch: LAZY["known"])])
def test_reads_and_what_the_model_keeps_are_no_matter(step: Callable[[], tuple[nn.Module, Any]]) -> None:
    model, loss = step()
    assert external_write(loss, model) is None
