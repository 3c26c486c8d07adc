"""Calls the function that `package.module:function` names on the command line; errors say what to write instead."""

import importlib
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import nn

_FORM = "write package.module:function, of a function that returns (model, batch)"


def called(reference: str, batch_size: int | None) -> tuple[nn.Module, Any]:
    """The model and the batch that the function returns.

    Args:
        reference: `package.module:function`.
        batch_size: given to the function, which has to take it; None lets the function choose.

    Raises:
        ValueError: the text names no such function, or it returns something else.
        Exception: whatever the module or the function raises.
    """
    function = _function(reference)
    takes = inspect.signature(function).parameters
    needed = [name for name, one in takes.items() if one.default is one.empty and one.kind not in _STARRED]
    if set(needed) - {"batch_size"} or (needed and batch_size is None):
        more = "" if needed != ["batch_size"] else ", or --batch"
        raise ValueError(f"{reference} needs {', '.join(needed)}: give each a default{more}; it is called without")
    if batch_size is not None and "batch_size" not in takes:
        raise ValueError(f"--batch {batch_size}: {reference} takes no batch_size; add that argument, or drop --batch")
    made = function(**({} if batch_size is None else {"batch_size": batch_size}))
    if not (isinstance(made, tuple) and len(made) == 2 and isinstance(made[0], nn.Module)):
        raise ValueError(f"{reference} returned a {type(made).__name__}: return (model, batch)")
    return made


_STARRED = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def _function(reference: str) -> Callable[..., Any]:
    name, _, attribute = reference.partition(":")
    if not (name and attribute):
        raise ValueError(f"{reference!r} names no model: {_FORM}, or give --config FILE")
    if name.endswith(".py") or "/" in name:
        dotted = ".".join(Path(name).with_suffix("").parts)
        raise ValueError(f"{reference!r} names a file: write {dotted}:{attribute}, from the folder that it is under")
    module = importlib.import_module(name)
    if not hasattr(module, attribute):
        own = [key for key, one in vars(module).items() if inspect.isfunction(one) and one.__module__ == name]
        has = f"; its functions are {', '.join(own)}" if own else ""
        raise ValueError(f"{reference}: module {name!r} has no attribute {attribute!r}{has}")
    found = getattr(module, attribute)
    if isinstance(found, nn.Module) or not callable(found):
        raise ValueError(f"{reference} is a {type(found).__name__}: {_FORM}")
    if isinstance(found, type) and issubclass(found, nn.Module):
        raise ValueError(f"{reference} is a class of modules: {_FORM}")
    return found  # type: ignore[no-any-return]
