"""Canaries: tests that say which feature breaks when a private name of another library no longer does what we need."""

import functools
from collections.abc import Callable
from typing import Any

import pytest

from retime.foundations.torch_private import engine


def canary(*names: str, breaks: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """A test of accessors; its failure names the feature.

    Args:
        names: of the accessors, as the package shows them.
        breaks: the feature that would break.
    """

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(test)
        def tell(*args: Any, **kwargs: Any) -> None:
            try:
                test(*args, **kwargs)
            except Exception as error:
                pytest.fail(f"{breaks} breaks: {', '.join(names)} is not what it was ({type(error).__name__}: {error})")

        return tell

    return decorate


def dies(test: Callable[..., None], *args: Any) -> None:
    """Hold a canary to what it is for: with a library that behaves otherwise, it must fail."""
    with pytest.raises(pytest.fail.Exception, match=r" breaks: .* is not what it was"):
        test(*args)


class Operations(engine.TorchDispatchMode):
    """Notes the operations that run."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(func)
        return func(*args, **(kwargs or {}))
