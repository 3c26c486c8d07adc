"""Every private name of torch that retime uses: one accessor each, and no other file may use one.

Import the file that is about it: ``from retime.foundations.torch_private.engine import graph_task_id``. A name that
is gone raises :class:`PrivateNameError` with the feature that needs it, most of them at import; the tests of this
package check that each still does what it is used for. Here is what accessors are made of, of other libraries' too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from operator import attrgetter
from typing import Any


class PrivateNameError(ImportError):
    """A private name of another library is gone, and a feature of retime's cannot do without it."""

    def __init__(self, what: str, feature: str) -> None:
        super().__init__(
            f"{what}, which {feature} needs: install versions of torch, lightning, torchmetrics and accelerate that "
            "this version of retime was tested with"
        )


@contextmanager
def needed_by(feature: str) -> Iterator[None]:
    """Around the import of a private module or the look-up of a private name.

    Args:
        feature: of retime's, which does not work without the name.

    Raises:
        PrivateNameError: the module or the name is not there.
    """
    try:
        yield
    except (AttributeError, ImportError) as error:
        if isinstance(error, PrivateNameError):
            raise
        raise PrivateNameError(str(error), feature) from error


def attribute(owner: object, name: str | tuple[str, ...], feature: str) -> Callable[[Any], Any]:
    """A function that reads a private attribute, in C: as fast as reading it in place.

    Args:
        owner: a class that has the attribute, or an object whose class gives it to all of its kind.
        name: of the attribute; several are read as a tuple.
        feature: as for :func:`needed_by`.

    Raises:
        PrivateNameError: ``owner`` has no such attribute.
    """
    names = (name,) if isinstance(name, str) else name
    for one in names:
        if not hasattr(owner, one):
            raise PrivateNameError(f"{_described(owner)} has no attribute {one!r}", feature)
    return attrgetter(*names)


def read_private(owner: object, name: str, feature: str) -> Any:
    """A private attribute of an object of another library.

    Raises:
        PrivateNameError: it has none of that name.
    """
    try:
        return getattr(owner, name)
    except AttributeError as error:
        raise PrivateNameError(f"{_described(owner)} has no attribute {name!r}", feature) from error


def write_private(owner: object, name: str, value: object, feature: str) -> None:
    """Replace a private attribute that an object of another library has: one that nothing reads is not made.

    Raises:
        PrivateNameError: it has none of that name.
    """
    read_private(owner, name, feature)
    setattr(owner, name, value)


def _described(owner: object) -> str:
    kind = owner if isinstance(owner, type) else type(owner)
    return f"{kind.__module__}.{kind.__qualname__}"
