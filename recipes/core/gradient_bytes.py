"""Counts the bytes of gradients alive during training, by their storages, whoever keeps them."""

from collections.abc import Iterable

from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.hooks import RemovableHandle


class GradientBytes:
    """Watches the gradients that autograd hands to `parameters`; `peak` is the most bytes alive at one time.

    Each gradient's storage is followed by a weak reference from the moment autograd has made it, so a gradient counts
    until its memory is given back, be it in `.grad` or in a mechanism's private list. Counting happens whenever a
    gradient arrives, which is when the sum can grow. Copies that somebody makes of a gradient are not seen.
    """

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self.peak = 0
        self._alive: dict[int, tuple[StorageWeakRef, int]] = {}
        self._handles: list[RemovableHandle] = [
            parameter.register_hook(self._arrived)  # type: ignore[no-untyped-call]
            for parameter in parameters
            if parameter.requires_grad
        ]

    def _arrived(self, gradient: Tensor) -> None:
        storage = gradient.untyped_storage()
        self._alive = {key: entry for key, entry in self._alive.items() if not self._expired(entry[0])}
        self._alive[storage.data_ptr()] = (StorageWeakRef(storage), storage.nbytes())  # type: ignore[no-untyped-call]
        self.peak = max(self.peak, sum(size for _, size in self._alive.values()))

    def _expired(self, storage: StorageWeakRef) -> bool:
        return bool(storage.expired())  # type: ignore[no-untyped-call]

    def restart(self) -> None:
        """Forget the peak so far: a mechanism's first step may run the plain way."""
        self.peak = 0

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
