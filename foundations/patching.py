"""Other attributes for one object, for a while."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any


@contextmanager
def replaced_attributes(owner: object, **attributes: Any) -> Iterator[None]:
    """While open, ``owner`` itself has these attributes, methods of its class included; then what it had before."""
    own = vars(owner)
    before = {name: own[name] for name in attributes if name in own}
    own.update(attributes)
    try:
        yield
    finally:
        for name in attributes.keys() - before.keys():
            own.pop(name, None)
        own.update(before)


class _Layer:
    """A method in front of another; when it is gone, that one alone."""

    def __init__(self, owner: object, name: str, method: Callable[..., Any]) -> None:
        self._owner, self._name, self._method = owner, name, method
        self._own = vars(owner).get(name)
        self._inner = getattr(owner, name)
        vars(owner)[name] = self
        self._gone = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return (self._inner if self._gone else self._method)(*args, **kwargs)

    def take_out(self) -> None:
        self._gone = True
        own = vars(self._owner)
        while isinstance(top := own.get(self._name), _Layer) and top._gone:
            if top._own is None:
                del own[self._name]
            else:
                own[self._name] = top._own


class _Layers(AbstractContextManager[None]):
    def __init__(self, owner: object, methods: dict[str, Callable[..., Any]]) -> None:
        self._owner, self._methods = owner, methods
        self._layers: list[_Layer] = []

    def __enter__(self) -> None:
        self._layers = [_Layer(self._owner, name, method) for name, method in self._methods.items()]

    def __exit__(self, *_: object) -> None:
        for layer in self._layers:
            layer.take_out()


def layered_methods(owner: object, **methods: Callable[..., Any]) -> AbstractContextManager[None]:
    """While open, ``owner`` has these methods in front of those it had, which they may call.

    Unlike with :func:`replaced_attributes`, several of these may be closed in any order. One that is never closed stays
    open, whoever entered it is gone or not, and an owner is copied together with its layers.
    """
    return _Layers(owner, methods)
