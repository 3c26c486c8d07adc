"""Warnings stand at the user's line and come from the first rank; numbers of bytes and counts as people write them."""

import linecache
import types
import warnings
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist

import retime
from retime import DifferenceWarning, NoEffectWarning
from retime.foundations import messages as no_effect
from retime.foundations.messages import format_counts, parse_bytes, warn_difference, warn_no_effect


def _relayed(call: Callable[[str], None], module: str = "retime.inner") -> types.FunctionType:
    """Return a function of this module that calls it."""
    inner = types.ModuleType(module)
    inner.__dict__["call"] = call
    exec(compile("def relay(text):\n    call(text)\n", f"{module}.py", "exec"), inner.__dict__)
    return inner.relay


@pytest.mark.parametrize(
    ("warn", "category"), [(warn_difference, DifferenceWarning), (warn_no_effect, NoEffectWarning)]
)
def test_the_line_is_the_users(warn: Callable[[str], None], category: type[UserWarning]) -> None:
    relay = _relayed(_relayed(warn))
    with pytest.warns(category, match="another result") as caught:
        relay("another result")
    assert [one.filename for one in caught] == [__file__]
    assert linecache.getline(__file__, caught[0].lineno).strip() == 'relay("another result")'


def test_the_first_rank_tells(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(no_effect.dist, "get_rank", lambda: 1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warn_difference("on the second rank")
        warn_difference("on the second rank, which alone knows", every_rank=True)
    assert [str(one.message) for one in caught] == ["on the second rank, which alone knows"]


@pytest.mark.parametrize("start", ["spawn", "forkserver", "popen_fork"])
def test_a_rank_that_another_process_started_names_its_own_lines(start: str) -> None:
    """A forked rank has the user's line in its stack, and a spawned one a command line of Python's."""
    in_order = ("lightning.pytorch.trainer", "lightning.launchers.multiprocessing", f"multiprocessing.{start}")
    rank: Callable[[str], None] = warn_difference
    for module in in_order:
        rank = _relayed(rank, module)
    with pytest.warns(DifferenceWarning, match="another result") as caught:
        rank("another result")
    assert caught[0].filename == (__file__ if start == "popen_fork" else "lightning.pytorch.trainer.py")


@pytest.mark.parametrize(("module", "filename"), [("pytest.__main__", __file__), ("my.train", "__main__.py")])
def test_a_module_that_python_runs_is_known_by_its_name(module: str, filename: str) -> None:
    main = _relayed(warn_difference, "__main__")
    main.__globals__["__spec__"] = ModuleSpec(module, None)
    with pytest.warns(DifferenceWarning, match="another result") as caught:
        main("another result")
    assert caught[0].filename == filename


@pytest.mark.parametrize(
    ("size", "count"),
    [
        (1, 1),
        (np.int32(2**30), 2**30),
        ("1", 1),
        ("1MiB", 2**20),
        (" 500 MB ", 500 * 10**6),
        ("1.5gib", 3 * 2**29),
        ("9" * 30, int("9" * 30)),
    ],
)
def test_reads(size: int | str, count: int) -> None:
    assert parse_bytes("bucket_bytes", size) == count


@pytest.mark.parametrize(
    ("size", "error"),
    [(0, ValueError), (-1, ValueError), ("0MiB", ValueError), ("lots", ValueError), ("90%", ValueError),
     ("-1MiB", ValueError), (True, TypeError), (1.5, TypeError), (float("nan"), TypeError), (None, TypeError)],
)  # fmt: skip
def test_refuses_by_the_arguments_name(size: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match=r"bucket_bytes="):
        parse_bytes("bucket_bytes", size)


def test_budgets_may_be_numpys() -> None:
    assert retime.MemoryBudgetStrategy(budget=np.int64(2**20))._budget == 2**20


def test_reasons_are_joined_in_the_order_in_which_they_came_up() -> None:
    assert format_counts({"it froze": 2, "it rained": 1}) == "2 because it froze; 1 because it rained"
    assert format_counts({"it froze": 2, "it rained": 1}, "left") == "2 left because it froze; 1 left because it rained"
    assert format_counts({}) == ""
