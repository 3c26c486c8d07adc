"""What a saved-tensor hook hands to autograd in place of a tensor, and the check that hooks switch off.

Autograd compares a saved tensor's version with the one it had when it was saved, and refuses to go on after an edit in
place. With hooks it leaves that to them.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable

import torch
from torch import Tensor

from retime.foundations.storages import Window
from retime.foundations.torch_private import FakeTensor, version_of
from retime.mechanisms.memory_budget.host import HostCopy, Loading, is_torchs_own


class VersionCheck:
    """Remembers a tensor's version, and keeps its counter but not its storage."""

    def __init__(self, tensor: Tensor) -> None:
        self._saved_at = version_of(tensor)
        self._what = f"{tensor.type()} {list(tensor.shape)}" if not isinstance(tensor, FakeTensor) else ""
        self._counter: Tensor | None = None
        if self._what:
            counter = tensor.detach()  # shares the counter
            counter.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)  # keeps it, and lets the storage go
            self._counter = counter

    def check(self) -> None:
        """Raise as autograd does when the tensor was edited in place after it was saved.

        Raises:
            RuntimeError: it was.
        """
        if self._counter is not None and version_of(self._counter) != self._saved_at:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: "
                f"[{self._what}] is at version {version_of(self._counter)}; expected version {self._saved_at} instead. "
                "Hint: enable anomaly detection to find the operation that failed to compute its gradient, with "
                "torch.autograd.set_detect_anomaly(True)."
            )


class ResidentTensor:
    """A saved tensor that stays where it is."""

    __slots__ = ("tensor", "version")

    def __init__(self, tensor: Tensor) -> None:
        # A saved output that kept its history would hold its own node, and the graph would never be freed.
        self.tensor = tensor if tensor.grad_fn is None else tensor.detach()
        self.version = version_of(tensor)

    def get(self) -> Tensor:
        """The tensor, as it was saved.

        Raises:
            RuntimeError: it was edited in place since.
        """
        if version_of(self.tensor) != self.version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: "
                f"[{self.tensor.type()} {list(self.tensor.shape)}] is at version {version_of(self.tensor)}; expected "
                f"version {self.version} instead."
            )
        return self.tensor


class OffloadedStorage:
    """One storage that a forward pass saved, and that goes to the host when nobody else holds it any more.

    Attributes:
        number: its ordinal in the plan.
        copy: its bytes on the host, once it went there.
        saves: how often it was saved.
        last_save: when it was saved last, counted over all saves of the pass: the later, the sooner the backward pass
            needs it.
        uses_left: saves that this backward pass has not asked for yet.
        used_in: the backward pass that used it last.
        done_in: the backward pass that used all its saves.
        retained: the storage that came back, while it is sure to be needed again.
    """

    def __init__(
        self, number: int, tensor: Tensor, offload: Callable[[OffloadedStorage, torch.UntypedStorage], None]
    ) -> None:
        source = tensor.untyped_storage()
        self.number = number
        self.nbytes = source.nbytes()
        self.device = tensor.device
        self.copy: HostCopy | None = None
        self.saves = 0
        self.last_save = -1
        self.uses_left = 0
        self.used_in = -1
        self.done_in = -1
        self.retained: torch.UntypedStorage | None = None
        self.loading: Loading | None = None
        self._offload = offload
        self._source = weakref.ref(source)
        self._stays: torch.UntypedStorage | None = None
        self._restored: Callable[[], torch.UntypedStorage | None] = _nothing

    def inherit(self, storage: torch.UntypedStorage) -> None:
        """Nobody else holds the storage: from now on it stays as it is."""
        if self.copy is not None or self._stays is not None:
            return
        if is_torchs_own(storage):
            self._offload(self, storage)
        if self.copy is None:
            self._stays = storage

    def present(self) -> torch.UntypedStorage | None:
        """The data on the device, if it is there or on its way."""
        return self._source() or self.retained or self._restored()

    def fetch(self) -> torch.UntypedStorage:
        """Start to bring the data back into a new storage, and hold that.

        Raises:
            RuntimeError: the storage has ended without having come here.
        """
        if self.copy is None:
            raise RuntimeError("a saved tensor was lost, because its copy to the host was interrupted")
        with torch.no_grad():
            storage = torch.empty(self.nbytes, dtype=torch.uint8, device=self.device).untyped_storage()
        self.loading = self.copy.load(storage)
        self._restored = weakref.ref(storage)
        self.retained = storage
        return storage

    def wait(self) -> bool:
        """Have the data that :meth:`fetch` asked for; whether it had to be waited for."""
        loading, self.loading = self.loading, None
        return loading.wait() if loading is not None else False

    def let_go(self) -> None:
        """Hold the data no longer; a tensor that looks at it still does."""
        self.wait()
        self.retained = None

    def free(self) -> None:
        """Leave nothing on the host, and need nothing any more."""
        self.retained = self._stays = None
        if self.copy is not None:
            self.copy.free()


class OffloadedTensor:
    """A saved tensor whose storage goes to the host."""

    __slots__ = ("storage", "version", "window")

    def __init__(self, storage: OffloadedStorage, tensor: Tensor) -> None:
        self.storage = storage
        self.window = Window.of(tensor)
        self.version = VersionCheck(tensor)


def _nothing() -> None:
    return None
