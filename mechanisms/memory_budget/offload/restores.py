"""Brings offloaded storages back for backward passes, some of them ahead of their use."""

from __future__ import annotations

import weakref
from collections import deque
from itertools import islice

import torch

from retime.foundations.torch_private import queue_callback
from retime.mechanisms.memory_budget.host import HostError
from retime.mechanisms.memory_budget.offload.counts import OffloadCounts
from retime.mechanisms.memory_budget.offload.late_error import LateError
from retime.mechanisms.memory_budget.offload.observer import SaveObserver
from retime.mechanisms.memory_budget.offload.saved import OffloadedStorage

# A storage that several nodes saved is held between their uses while fewer than so many others came back after it.
_RETAINED_STORAGES = 2


class Restores:
    """What backward passes use of one forward pass's storages.

    Args:
        moved: the storages that move, as they are saved; the list grows meanwhile.
        depth: so many are fetched ahead of their use.
        counts: what is fetched and waited for is added up there.
        late: errors that cannot be raised in a backward pass.
        observer: is told what is used and fetched.
    """

    def __init__(
        self,
        moved: list[weakref.ref[OffloadedStorage]],
        depth: int,
        counts: OffloadCounts,
        late: LateError,
        observer: SaveObserver | None,
    ) -> None:
        self._moved, self._depth = moved, depth
        self._counts, self._late, self._observer = counts, late, observer
        self._order: list[weakref.ref[OffloadedStorage]] | None = None  # as the backward pass needs them
        self._place: dict[int, int] = {}  # in that order, by last save
        self._retained: deque[weakref.ref[OffloadedStorage]] = deque()
        self._ahead: list[weakref.ref[OffloadedStorage]] = []
        self._watched_backward = -1

    def storage(self, record: OffloadedStorage, backward: int) -> torch.UntypedStorage:
        """The data on the device, once it is there.

        Args:
            record: of the storage.
            backward: number of the backward pass that asks; -1: none does.
        """
        self._watch(backward)
        storage = record.present() or self._fetch(record)
        self._counts.stalls += record.wait()
        if self._observer is not None:
            self._observer.used(record.number)
        return storage

    def used(self, record: OffloadedStorage, backward: int, *, ahead: bool) -> None:
        """One use has its tensor: let go of the storage after the last, and fetch others ahead.

        Args:
            record, backward: as for :meth:`storage`.
            ahead: whether others may be fetched.
        """
        if backward == -1:
            record.retained = None
            return
        self._count_use(record, backward)
        if ahead:
            self._prefetch(record, backward)

    def let_go(self) -> None:
        """Hold nothing any more: a backward pass has ended, or a new forward pass begins."""
        for reference in (*self._ahead, *self._retained):
            record = reference()
            if record is not None:
                record.let_go()
        self._ahead.clear()
        self._retained.clear()

    def _fetch(self, record: OffloadedStorage) -> torch.UntypedStorage:
        storage = record.fetch()
        self._counts.bytes_in += record.nbytes
        if self._observer is not None:
            self._observer.restored(record.number, storage, record.device)
        return storage

    def _count_use(self, record: OffloadedStorage, backward: int) -> None:
        if record.used_in != backward:  # the graph was kept, or the backward pass before this one failed half-way
            record.used_in, record.uses_left = backward, record.saves
        record.uses_left -= 1
        if record.uses_left <= 0:
            record.done_in = backward
            record.retained = None
            self._settle_late(record)
        elif record.retained is not None:
            self._retained.append(weakref.ref(record))
            while len(self._retained) > _RETAINED_STORAGES:
                oldest = self._retained.popleft()()
                if oldest is not None and oldest is not record:
                    oldest.let_go()

    def _settle_late(self, record: OffloadedStorage) -> None:
        """Its copy may never have been waited for: the source goes now, or stays if the copy failed."""
        if record.copy is None:
            return
        try:
            record.copy.settle()
        except HostError as error:
            self._late.note(error)

    def _prefetch(self, record: OffloadedStorage, backward: int) -> None:
        if self._order is None:
            alive = [(moved.last_save, reference) for reference in self._moved if (moved := reference()) is not None]
            self._order = [reference for _, reference in sorted(alive, key=lambda pair: -pair[0])]
            self._place = {-last_save: index for index, last_save in enumerate(sorted(-save for save, _ in alive))}
        wanted = self._depth
        for reference in islice(self._order, self._place.get(record.last_save, 0) + 1, None):
            if wanted == 0:
                return
            ahead = reference()
            if ahead is None or ahead.done_in == backward:
                continue
            wanted -= 1
            if ahead.present() is None:
                self._fetch(ahead)
                self._counts.prefetched += 1
                self._ahead.append(reference)

    def _watch(self, backward: int) -> None:
        """Ask autograd to tell when this backward pass ends: it may need less than was fetched ahead."""
        if backward not in (-1, self._watched_backward):
            self._watched_backward = backward
            queue_callback(self.let_go)
