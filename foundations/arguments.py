"""Arguments of public functions and constructors are checked against their annotations before anything else is done.

    @checked
    def fuse(model: nn.Module, bucket_bytes: Annotated[int, AtLeast(1)] | None = None) -> None: ...

    fuse(model, bucket_bytes=0)     # ValueError: fuse(bucket_bytes=0): give a whole number of 1 or more, or None

What an annotation promises is one line in a signature, which type checkers and command lines read too.
"""

from __future__ import annotations

import collections.abc
import inspect
import math
import numbers
import operator
import types
import typing
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import timedelta
from functools import cache, partial, wraps
from typing import Annotated, Any, Literal, TypeVar, Union


@dataclass(frozen=True, repr=False)
class Bound:
    """Bound on the numbers that an argument may be: ``Annotated[int, AtLeast(1)]``."""

    text: str
    compare: Callable[[Any, Any], Any]
    bound: float | timedelta

    def __repr__(self) -> str:
        return "finite" if self.bound == math.inf else self.text.format(self.bound)

    def holds(self, value: Any) -> bool:
        return bool(self.compare(value, self.bound))


AtLeast, AtMost = partial(Bound, "of {} or more", operator.ge), partial(Bound, "of at most {}", operator.le)
Above, Below = partial(Bound, "above {}", operator.gt), partial(Bound, "below {}", operator.lt)

_Checked = TypeVar("_Checked", bound=Callable[..., Any] | type)
Timeout = Annotated[timedelta, Above(timedelta(0))]


def checked(function: _Checked) -> _Checked:
    """Have the arguments of every call checked against the annotations: for functions, ``__init__`` and dataclasses.

    Numbers are no truth values here and the reverse, and never NaN; a text is no list of texts. A whole number of
    numpy's arrives as an ``int``, which checkpoints can hold. What an annotation does not tell (``Any``, protocols,
    tensors' shapes) is left to the function.

    Raises:
        TypeError: of the decorated function, for an argument of another type.
        ValueError: of the decorated function, for a value outside the annotation's bounds or choices.
    """
    if isinstance(function, type):
        type.__setattr__(function, "__init__", checked(function.__init__))  # type: ignore[misc]
        return function
    signature = inspect.signature(function)

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            bound = signature.bind(*args, **kwargs)
        except TypeError:
            return function(*args, **kwargs)  # says the same, with the function's name
        hints = _hints(function)
        for name, value in bound.arguments.items():
            if name in hints and signature.parameters[name].kind not in _GATHERED and not accepts(value, hints[name]):
                owner = type(args[0]).__name__ if function.__name__ == "__init__" else function.__name__
                kind = ValueError if accepts(value, hints[name], bounds=False) else TypeError
                raise kind(f"{owner}({name}={_shown(value)}): give {describe(hints[name])}")
            if not isinstance(value, int) and isinstance(value, numbers.Integral):
                bound.arguments[name] = int(value)
        return function(*bound.args, **bound.kwargs)

    return typing.cast(_Checked, call)


def checked_with(options: type) -> Callable[[_Checked], _Checked]:
    """Check what a function takes by ``**`` as the fields of a dataclass, which ``help`` shows in their place too."""

    def decorate(function: _Checked) -> _Checked:
        own = inspect.signature(function)
        named = [one for one in own.parameters.values() if one.kind is not one.VAR_KEYWORD]
        fields = [one.replace(kind=one.KEYWORD_ONLY) for one in inspect.signature(options).parameters.values()]
        function.__annotations__.update(typing.get_type_hints(options, include_extras=True))
        function.__signature__ = own.replace(parameters=[*named, *fields])  # type: ignore[union-attr]
        return checked(function)

    return decorate


_GATHERED = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


@cache
def _hints(function: Callable[..., Any]) -> dict[str, Any]:
    """Read when first called: annotations may name what a module imports later."""
    return {
        name: hint for name, hint in typing.get_type_hints(function, include_extras=True).items() if name != "return"
    }


def is_checkable(hint: Any) -> bool:
    """Return whether values can be told from the annotation."""
    parts = _parts(hint)
    if parts:
        return all(map(is_checkable, parts))
    hint, _ = _bare(hint)
    return hint is not Any and (
        not getattr(hint, "_is_protocol", False) or getattr(hint, "_is_runtime_protocol", False)
    )


def _is_alike(value: Any, choice: Any) -> bool:
    """Return whether a value is of a choice's kind: a text of numpy's is one too, True is no 1."""
    return isinstance(value, type(choice)) and isinstance(value, bool) == isinstance(choice, bool)


def accepts(value: Any, hint: Any, *, bounds: bool = True) -> bool:
    """Return whether an argument with this annotation may have the value; without ``bounds`` only its type counts."""
    if not is_checkable(hint):
        return True
    if any_of := _parts(hint):
        return any(accepts(value, part, bounds=bounds) for part in any_of)
    hint, limits = _bare(hint)
    if hint is None or hint is type(None):
        return value is None
    if typing.get_origin(hint) is Literal:
        alike = [choice for choice in typing.get_args(hint) if _is_alike(value, choice)]
        return value in alike if bounds else bool(alike)
    if hint is float:
        fits = _is_number(value)
    elif hint is int:
        fits = _is_number(value) and isinstance(value, numbers.Integral)
    elif entries := _lengths(hint):
        fits = isinstance(value, tuple) and len(value) == len(entries)
        fits = fits and all(accepts(one, part, bounds=bounds) for one, part in zip(value, entries, strict=True))
    else:
        fits = _is_instance(value, hint)
    if not fits or not bounds:
        return fits
    return not (_is_number(value) and math.isnan(value)) and all(limit.holds(value) for limit in limits)


def _is_instance(value: Any, hint: Any) -> bool:
    origin = typing.get_origin(hint) or hint
    if origin in (collections.abc.Callable, typing.Callable):
        return callable(value)
    if origin is type:
        return isinstance(value, type)
    if not isinstance(origin, type):
        return True
    if origin is bool:
        return isinstance(value, bool) or type(value).__name__ in ("bool_", "bool")
    if not isinstance(value, origin):
        return False
    inside = typing.get_args(hint)
    if issubclass(origin, Iterable) and len(inside) == 1 and not isinstance(value, collections.abc.Iterator):
        entries = typing.cast("Iterable[Any]", value)
        return not isinstance(value, str | bytes) and all(accepts(entry, inside[0]) for entry in entries)
    return True


def _is_number(value: Any) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def _parts(hint: Any) -> tuple[Any, ...]:
    """The alternatives of a union; nothing for another annotation."""
    return typing.get_args(hint) if typing.get_origin(hint) in (Union, types.UnionType) else ()


def _lengths(hint: Any) -> tuple[Any, ...]:
    """The entries of a tuple of one length; nothing for another annotation."""
    inside = typing.get_args(hint) if typing.get_origin(hint) is tuple else ()
    return () if Ellipsis in inside else inside


def _bare(hint: Any) -> tuple[Any, tuple[Bound, ...]]:
    if typing.get_origin(hint) is not Annotated:
        return hint, ()
    bare, *marks = typing.get_args(hint)
    return bare, tuple(mark for mark in marks if isinstance(mark, Bound))


_NAMES = {int: "a whole number", float: "a number", bool: "True or False", str: "a text", type(None): "None"}


def describe(hint: Any) -> str:
    """Describe the values that an annotation allows, for an error's text."""
    if any_of := _parts(hint):
        *most, last = (describe(part) for part in any_of)
        return f"{', '.join(most)}{',' if last == 'None' else ''} or {last}"
    hint, limits = _bare(hint)
    if typing.get_origin(hint) is Literal:
        return " or ".join(map(repr, typing.get_args(hint)))
    origin = typing.get_origin(hint) or hint
    if origin in (collections.abc.Callable, typing.Callable):
        name = "a function"
    elif origin in _NAMES:
        name = _NAMES[origin]
    elif entries := _lengths(hint):
        name = f"a tuple ({', '.join(map(describe, entries))})"
    elif typing.get_args(hint) == (str,):
        name = "texts in a list"
    elif typing.get_args(hint):
        name = f"{_article(origin.__name__)} ({'; '.join(describe(entry) for entry in typing.get_args(hint))} each)"
    else:
        name = _article(getattr(origin, "__name__", str(origin)))
    return " ".join([name, " and ".join(map(str, limits))]).strip()


def _article(name: str) -> str:
    return f"{'an' if name[0].lower() in 'aeio' else 'a'} {name}"


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
