"""The optimizer's state while updates are pending: whoever looks into it finds them done."""

import contextlib
import copy
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

from torch.optim import Optimizer


class WatchedState(defaultdict[Any, Any]):
    """``optimizer.state`` that runs pending updates before anything but those updates reads or changes it."""

    def __init__(self, flush: Callable[[], None], content: dict[Any, Any]) -> None:
        super().__init__(dict, content)
        self._flush = flush
        self._turn = threading.RLock()
        self._updating: int | None = None
        """The thread in which an update runs."""

    @contextlib.contextmanager
    def update_runs(self) -> Iterator[None]:
        """An update reads and writes the state in here, in this thread; updates in others come one after the other."""
        with self._turn:
            before, self._updating = self._updating, threading.get_ident()
            try:
                yield
            finally:
                self._updating = before

    def _settle(self) -> None:
        if self._updating != threading.get_ident():
            self._flush()

    def __getitem__(self, key: Any) -> Any:
        self._settle()
        return super().__getitem__(key)

    def __setitem__(self, key: Any, value: Any) -> None:
        self._settle()
        super().__setitem__(key, value)

    def __delitem__(self, key: Any) -> None:
        self._settle()
        super().__delitem__(key)

    def __iter__(self) -> Any:
        self._settle()
        return super().__iter__()

    def __contains__(self, key: object) -> bool:
        self._settle()
        return super().__contains__(key)

    def __len__(self) -> int:
        self._settle()
        return super().__len__()

    def get(self, key: Any, default: Any = None) -> Any:
        self._settle()
        return super().get(key, default)

    def keys(self) -> Any:
        self._settle()
        return super().keys()

    def values(self) -> Any:
        self._settle()
        return super().values()

    def items(self) -> Any:
        self._settle()
        return super().items()

    def pop(self, *args: Any) -> Any:
        self._settle()
        return super().pop(*args)

    def clear(self) -> None:
        self._settle()
        super().clear()

    def update(self, *args: Any, **kwargs: Any) -> None:
        self._settle()
        super().update(*args, **kwargs)

    def setdefault(self, key: Any, default: Any = None) -> Any:
        self._settle()
        return super().setdefault(key, default)

    def plain(self) -> defaultdict[Any, Any]:
        """The same entries without the watch."""
        self._settle()
        return defaultdict(dict, super().items())

    def __deepcopy__(self, memo: Any) -> Any:
        return copy.deepcopy(self.plain(), memo)

    def __reduce__(self) -> Any:
        return self.plain().__reduce__()


def watch(optimizer: Optimizer, flush: Callable[[], None]) -> WatchedState:
    """Put a watch on the optimizer's state, which loading a checkpoint takes off, and return it."""
    state = optimizer.state
    if not isinstance(state, WatchedState):
        state = optimizer.state = WatchedState(flush, state)
    return state


def unwatch(optimizer: Optimizer) -> None:
    """Give the optimizer a plain state with the same entries."""
    if isinstance(optimizer.state, WatchedState):
        optimizer.state = optimizer.state.plain()
