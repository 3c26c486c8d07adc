"""Warnings of this package stand at the user's line, and come from the first rank."""

from __future__ import annotations

import linecache
import types
import warnings
from collections.abc import Callable

import pytest
import torch.distributed as dist

from retime import DifferenceWarning, NoEffectWarning
from retime.mechanisms import no_effect
from retime.mechanisms.no_effect import warn_difference, warn_no_effect


def _in_the_package(call: Callable[[str], None]) -> Callable[[str], None]:
    """Return a function of a module of the package's that calls it."""
    inner = types.ModuleType("retime.inner")
    inner.__dict__["call"] = call
    exec("def relay(text):\n    call(text)\n", inner.__dict__)
    relay: Callable[[str], None] = inner.relay
    return relay


@pytest.mark.parametrize(
    ("warn", "category"), [(warn_difference, DifferenceWarning), (warn_no_effect, NoEffectWarning)]
)
def test_the_line_is_the_users(warn: Callable[[str], None], category: type[UserWarning]) -> None:
    relay = _in_the_package(_in_the_package(warn))
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
