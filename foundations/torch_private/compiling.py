"""Private names of ``torch.compile``.

All of them were seen to do this in torch 2.11, 2.13 and 2.14 (2.11 is the oldest that is supported).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from retime.foundations.torch_private.missing import attribute, needed_by

__all__ = [
    "calls_compiled",
    "compilation_callbacks",
    "compiled_backends",
    "has_compile_mark",
    "stance_callback_replaced",
]

_UNCOMPILED = "the memory budget, which runs compiled code uncompiled where a step is split or offloaded,"
with needed_by(_UNCOMPILED):
    from torch._dynamo import eval_frame

    eval_frame._callback_from_stance, eval_frame.cached_backends  # noqa: B018

_PENDING = "forward fusion, whose updates cannot wait in compiled code,"
with needed_by(_PENDING):
    from torch._dynamo.callback import callback_handler as compilation_callbacks

    _OptimizedModule = torch._dynamo.OptimizedModule
"""Where functions are registered that are called when something is about to be compiled."""

_compiled_call = attribute(nn.Module(), "_compiled_call_impl", _PENDING)
_MARKS = ("_torchdynamo_orig_callable", "_compiler_ctx")
"""Of a callable that ``torch.compile`` made, and of a LightningModule that Lightning compiled."""


def calls_compiled(module: nn.Module) -> bool:
    """Whether ``module.compile()`` was called."""
    return _compiled_call(module) is not None


def has_compile_mark(module: nn.Module) -> bool:
    """Whether the module is compiled, in itself or wrapped, or is one that Lightning compiled."""
    return (
        calls_compiled(module)
        or isinstance(module, _OptimizedModule)
        or any(getattr(module, mark, None) is not None for mark in _MARKS)
    )


def compiled_backends() -> dict[int, Any]:
    """The backends that ``torch.compile`` was asked for so far, by number; None: ``torch.compiler.disable``'s."""
    return eval_frame.cached_backends


@contextmanager
def stance_callback_replaced(replacement: Callable[[Callable[[Any], Any]], Callable[[Any], Any]]) -> Iterator[None]:
    """Replace the function that says, whenever compiled code is met, what runs in its place.

    Args:
        replacement: makes the new function from torch's own, which takes and returns what compiles a frame
            (None, False: ``torch.compiler.disable``'s).
    """
    chosen = eval_frame._callback_from_stance
    eval_frame._callback_from_stance = replacement(chosen)  # type: ignore[assignment]
    try:
        yield
    finally:
        eval_frame._callback_from_stance = chosen
