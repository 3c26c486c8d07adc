"""What the users of the process's one pool ask for, and what it does for all of them together."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

__all__ = ["Wish", "Wishes"]


@dataclass(frozen=True)
class Wish:
    """One user's.

    Attributes:
        everywhere: tensors of the whole process come from the pool; otherwise those of threads that say so.
        limit: bytes of live and retained memory together; None leaves it to ``slack``.
        slack: the limit follows the most that was alive, times this; None leaves it to the others.
    """

    everywhere: bool = True
    limit: int | None = None
    slack: float | None = None


class Wishes:
    """All users' wishes: the last limit is the promise of the step that runs; without one the largest slack holds."""

    def __init__(self) -> None:
        self._of: dict[int, Wish] = {}
        self._next = 0

    def __len__(self) -> int:
        return len(self._of)

    @property
    def everywhere(self) -> bool:
        """Whether tensors of the whole process come from the pool."""
        return any(wish.everywhere for wish in self._of.values())

    def enter(self, library: ctypes.CDLL, wish: Wish) -> int:
        """One user more; the number by which it is known."""
        self._next += 1
        self.change(library, self._next, wish)
        return self._next

    def change(self, library: ctypes.CDLL, user: int, wish: Wish) -> None:
        """What this user wishes from now on."""
        self._of.pop(user, None)
        self._of[user] = wish  # behind all others
        self._grant(library)

    def leave(self, library: ctypes.CDLL, user: int) -> None:
        """One user less; the last takes the pool away, and all that was retained goes back."""
        del self._of[user]
        if self._of:
            self._grant(library)
        else:
            library.retime_pool_remove()

    def _grant(self, library: ctypes.CDLL) -> None:
        limits = [wish.limit for wish in self._of.values() if wish.limit is not None]
        slacks = [wish.slack for wish in self._of.values() if wish.slack is not None]
        if slacks and not limits:
            library.retime_pool_follow(max(slacks))
        else:
            library.retime_pool_limit(limits[-1] if limits else 0)
        library.retime_pool_turn(self.everywhere)
