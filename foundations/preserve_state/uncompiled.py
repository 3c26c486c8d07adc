"""Code under ``torch.compile`` runs as it was written, where compiled code would be lost or is not what was planned.

Under a mode that sees each operation, as in a dry run, ``torch.compile`` gives a function up for good; and what
compiled code saves for its backward pass is none of what a plan was made for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from retime.foundations.no_effect import warn_difference
from retime.foundations.torch_private import compiled_backends, stance_callback_replaced

__all__ = ["CompiledCode", "nothing_compiled", "uncompiled"]


def nothing_compiled() -> bool:
    """Whether this process has put nothing under ``torch.compile`` so far."""
    return all(backend is None for backend in compiled_backends().values())  # None: torch.compiler.disable's


@contextmanager
def uncompiled(met: Callable[[], object] = lambda: None) -> Iterator[None]:
    """Nothing is compiled and nothing compiled runs; ``torch.compile``'s caches stay as they are.

    Args:
        met: called whenever something would have run compiled.
    """

    def noting(chosen: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def choose(callback: Any) -> Any:
            if callback not in (None, False):  # torch.compiler.disable has these two
                met()
            return chosen(callback)

        return choose

    with torch.compiler.set_stance("force_eager"), stance_callback_replaced(noting):
        yield


class CompiledCode:
    """Where the compiled code of a training step runs, and the warning where it does not."""

    def __init__(self) -> None:
        self._met = self._warned = False

    @contextmanager
    def looked_for(self) -> Iterator[None]:
        """Around runs of the step that only try something out."""
        with uncompiled(self._note):
            yield

    @contextmanager
    def under(self, plain: bool) -> Iterator[None]:
        """Around a forward or backward pass: plain ones run compiled code, all others warn once that they do not."""
        if plain:
            yield
            return
        self.warn()
        with uncompiled(self._note):
            yield
        self.warn()  # code that no dry run has met

    def warn(self) -> None:
        """Once, if there is compiled code."""
        if self._met and not self._warned:
            self._warned = True
            warn_difference(
                "code under torch.compile runs uncompiled in steps that the budget splits or offloads: what it saves "
                "for its backward pass is not known to a plan. So weights are the uncompiled model's, and differ from "
                "the compiled one's as far as compiling rounds differently. Give a budget that the plain step fits "
                "into, or leave out torch.compile"
            )

    def _note(self) -> None:
        self._met = True
