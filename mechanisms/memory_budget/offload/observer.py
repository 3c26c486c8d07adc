"""Who is told what a forward pass saves and what the backward pass uses."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Protocol, runtime_checkable

import torch


@runtime_checkable
class SaveObserver(Protocol):
    """Is told what a forward pass saves and what the backward pass uses."""

    def inside(self) -> AbstractContextManager[None]:
        """Held while a hook works: operations in it are not the model's."""

    def saved(self, number: int, storage: torch.UntypedStorage) -> None:
        """A tensor on the storage with this number was saved, for the first time or again."""

    def used(self, number: int) -> None:
        """A tensor on it is about to be used."""

    def restored(self, number: int, storage: torch.UntypedStorage, device: torch.device) -> None:
        """Its data comes back in another storage on ``device``."""
