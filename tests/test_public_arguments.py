"""Every argument of every public constructor refuses what cannot be meant, by name, before anything is done.

What an annotation tells is tried without being listed; the table has what makes a valid call, and values of the right
type that cannot be meant.
"""

import inspect
import math
import typing
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
from torch import nn

import retime
from retime import callbacks
from retime.mechanisms import arguments

NEGATIVE = (-1, -(10**9))
NOT_POSITIVE = (0, *NEGATIVE)
NO_CHOICE = ("nonsense", "")
ODD: tuple[Any, ...] = (
    object(),
    7,
    1.5,
    math.nan,
    True,
    "nonsense",
    b"bytes",
    [],
    [7],
    {},
    (),
    nn.Linear,
    lambda: None,
)
"""Of most types that somebody may pass by mistake."""


@dataclass(frozen=True)
class Case:
    """A public callable, the arguments of a valid call, and values of the right type that cannot be meant.

    Attributes:
        free: arguments that may be anything, each because another library checks it.
    """

    of: Callable[..., Any]
    valid: Callable[[], dict[str, Any]] = dict
    wrong: dict[str, tuple[Any, ...]] = field(default_factory=dict)
    free: tuple[str, ...] = ()

    @property
    def hints(self) -> dict[str, Any]:
        function: Any = self.of.__init__ if isinstance(self.of, type) else self.of
        hints = typing.get_type_hints(function, include_extras=True)
        return {name: hints[name] for name in inspect.signature(self.of).parameters if name not in self.free}


def _recurrent() -> dict[str, Any]:
    return {"model": nn.GRU(2, 2)}


def _sizes() -> dict[str, Any]:
    return {"input_size": 2, "hidden_size": 2}


SCAN = {"solver": NO_CHOICE, "dropout": (-0.5, 1.5), "hidden_size": NOT_POSITIVE, "num_layers": NOT_POSITIVE}
MEASURING = {"every_n_steps": NOT_POSITIVE, "warm_up": NEGATIVE}

CASES = [
    Case(retime.FuseOptimizer, wrong={"mode": NO_CHOICE, "bucket_bytes": NOT_POSITIVE}),
    Case(retime.MemoryTimeline, wrong=MEASURING),
    Case(retime.ParallelScanBackward, wrong={"solver": NO_CHOICE}),
    Case(retime.PeakMemory, wrong={"every_n_steps": NOT_POSITIVE}),
    Case(retime.ReverseFirstK, wrong={"k": (*NEGATIVE, *NO_CHOICE), "search_every_n_epochs": NOT_POSITIVE}),
    Case(retime.StepTimeline, wrong=MEASURING),
    Case(retime.ScanRNN, _sizes, wrong={**SCAN, "nonlinearity": NO_CHOICE}, free=("device", "dtype")),
    Case(retime.ScanGRU, _sizes, wrong=SCAN, free=("device", "dtype")),
    Case(retime.ScanLSTM, _sizes, wrong={**SCAN, "proj_size": (1,)}, free=("device", "dtype")),
    Case(retime.ScanSequential, wrong={"levels": NEGATIVE}, free=("args",)),
    Case(retime.convert, _recurrent, wrong={"solver": NO_CHOICE, "names": (["absent"],)}),
    Case(retime.convert_back, _recurrent, wrong={"names": (["absent"],)}),
]


@pytest.mark.parametrize(
    ("case", "name"),
    [pytest.param(case, name, id=f"{case.of.__name__}-{name}") for case in CASES for name in case.hints],
)
def test_what_cannot_be_meant_is_refused_by_name(case: Case, name: str) -> None:
    other_types = [odd for odd in ODD if not arguments.accepts(odd, case.hints[name], bounds=False)]
    for value in (*other_types, *case.wrong.get(name, ())):
        with pytest.raises((TypeError, ValueError), match=name):  # fails with what was taken without a word
            pytest.fail(f"{name}={value!r} was taken: {case.of(**{**case.valid(), name: value})}")


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.of.__name__)
def test_the_call_that_everything_else_is_a_change_of_is_valid(case: Case) -> None:
    case.of(**case.valid())


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.of.__name__)
def test_every_argument_can_be_judged_or_says_who_does(case: Case) -> None:
    for name, hint in case.hints.items():
        assert arguments.is_checkable(hint), f"{name}: {hint} tells nothing"


def test_every_public_constructor_is_in_the_table() -> None:
    tested = {case.of for case in CASES}
    public = {
        getattr(retime, name) for name in (*callbacks.__all__, "ScanGRU", "ScanLSTM", "ScanRNN", "ScanSequential")
    }
    assert public <= tested, f"without a case: {sorted(one.__name__ for one in public - tested)}"
