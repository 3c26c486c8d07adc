"""One forward pass under :class:`OffloadSavedTensors`, and the backward passes that read what it saved."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from retime.foundations.storages import has_storage, storage_key, storage_keys
from retime.foundations.torch_private import graph_task_id
from retime.mechanisms.memory_budget.host import HostError, HostTier, raise_interruption, watch, working
from retime.mechanisms.memory_budget.offload.counts import OffloadCounts
from retime.mechanisms.memory_budget.offload.in_flight import InFlight
from retime.mechanisms.memory_budget.offload.late_error import LateError
from retime.mechanisms.memory_budget.offload.observer import SaveObserver
from retime.mechanisms.memory_budget.offload.restores import Restores
from retime.mechanisms.memory_budget.offload.saved import OffloadedStorage, OffloadedTensor, ResidentTensor
from retime.schedules.budget import OffloadPlan


class ForwardPass:
    """Numbers what is saved, sends away what the plan names, and brings it back.

    A storage goes when the model has let go of it, because it may be written into until then. One that is held until
    the backward pass needs it never goes, so no plan could have gained by it.

    Attributes:
        sizes: bytes of each storage that was saved, by number.
        tail: how many storages had been saved when one that moves was saved for the last time.
    """

    def __init__(
        self,
        plan: OffloadPlan,
        host: HostTier,
        keep: Iterable[Tensor],
        in_flight_bytes: int,
        counts: OffloadCounts,
        observer: SaveObserver | None = None,
    ) -> None:
        self.sizes: list[int] = []
        self.tail = 0
        self._end_at: int | None = None
        self._at_end: Callable[[], None] | None = None
        self._thread = threading.get_ident()
        self._plan = plan
        self._host = host
        self._keep = storage_keys(keep)
        self._counts = counts
        self._observer = observer
        self._lock = threading.RLock()  # backward passes of several devices run in several threads
        self._open = True
        self._abandoned = False
        self._saves = 0
        # By storage key: the storage (keys are given out again), its number, its record.
        self._known: dict[int, tuple[weakref.ref[torch.UntypedStorage], int, weakref.ref[OffloadedStorage] | None]] = {}
        self._moved: list[weakref.ref[OffloadedStorage]] = []
        self._late = LateError()
        self._in_flight = InFlight(in_flight_bytes, counts)
        self._restores = Restores(self._moved, plan.prefetch, counts, self._late, observer)

    # ---- forward

    def end_at(self, number: int, then: Callable[[], None]) -> None:
        """Call ``then`` when the storage with this number is saved: none that moves will be saved any more."""
        self._end_at, self._at_end = number, then

    def pack(self, tensor: Tensor) -> ResidentTensor | OffloadedTensor:
        """Autograd saves a tensor."""
        with working, self._lock, self._quiet():
            self._late.raise_noted()
            if not self._open or graph_task_id() != -1 or not self._concerns(tensor):
                return ResidentTensor(tensor)
            storage = tensor.untyped_storage()
            number, record = self._number(tensor, storage)
            if self._observer is not None:
                self._observer.saved(number, storage)
            if record is None:
                if number == self._end_at and self._at_end is not None and self._thread == threading.get_ident():
                    self._at_end()
                return ResidentTensor(tensor)
            self.tail = len(self.sizes)
            record.last_save = self._saves
            record.saves += 1
            self._saves += 1
            return OffloadedTensor(record, tensor)

    def close(self) -> None:
        """The forward pass has ended.

        Raises:
            HostError: a copy is known to have failed.
        """
        self._open = False
        self._keep = set()
        self._at_end = None
        try:
            self._late.raise_noted()
            self._in_flight.check()
        except BaseException:
            self.abandon()
            raise

    def abandon(self) -> None:
        """The forward pass failed: leave nothing behind on the host, whoever still holds the graph."""
        self._open = False
        self._abandoned = True
        self._keep = set()
        self._at_end = None
        with working:
            for reference in self._moved:
                record = reference()
                if record is not None:
                    record.free()
        self._in_flight.clear()
        self._known.clear()

    def settle(self) -> None:
        """A new pass begins: hold nothing for this one, and raise what failed too late to stop it.

        Raises:
            HostError: a copy out failed after the forward pass; the backward pass used the source.
        """
        self._restores.let_go()
        self._late.raise_noted()

    @property
    def ended(self) -> bool:
        """Nothing that moved is waited for any more: the graph that saved it has gone."""
        return not self._open and all(reference() is None for reference in self._moved)

    def _concerns(self, tensor: Tensor) -> bool:
        return (
            has_storage(tensor)
            and self._host.takes(tensor.device)
            and tensor.untyped_storage().nbytes() > 0
            and storage_key(tensor) not in self._keep
        )

    def _number(self, tensor: Tensor, storage: torch.UntypedStorage) -> tuple[int, OffloadedStorage | None]:
        """The storage's number, and its record if it moves; both new unless it was saved before.

        A record that nobody holds any more belonged to a node that has been freed since, of a logged value say. Then
        there is a new one, under the same number: numbers must not depend on what moves.
        """
        key = storage_key(tensor)
        seen = self._known.get(key)
        number = None
        if seen is not None and seen[0]() is storage:
            number, reference = seen[1:]
            record = reference() if reference is not None else None
            if record is not None:
                self._counts.bytes_skipped += tensor.numel() * tensor.element_size()
            if reference is None or record is not None:
                return number, record
        if number is None:
            number = len(self.sizes)
            self.sizes.append(storage.nbytes())
        record = None
        if number in self._plan.offload:
            record = OffloadedStorage(number, tensor, self._send)
            if watch(storage, record):
                self._moved.append(weakref.ref(record))
            else:
                record = None
        self._known[key] = weakref.ref(storage), number, weakref.ref(record) if record is not None else None
        return number, record

    def _send(self, record: OffloadedStorage, storage: torch.UntypedStorage) -> None:
        """Nobody else holds the storage: copy it, and hold it until that is done. It stays if it cannot be copied."""
        if self._abandoned:
            return
        with self._lock, self._quiet():
            try:
                record.copy = self._host.store(storage)
            except HostError as error:
                self._late.note(error)
                return
            self._counts.storages += 1
            self._counts.bytes_out += record.nbytes
            try:
                self._in_flight.add(record.nbytes, record.copy)
            except HostError as error:  # it holds the source on
                self._late.note(error)

    # ---- backward

    def unpack(self, packed: ResidentTensor | OffloadedTensor) -> Tensor:
        """Autograd needs a tensor it saved."""
        if isinstance(packed, ResidentTensor):
            return packed.get()
        if self._abandoned:
            raise RuntimeError("the forward pass that saved this tensor failed: run it again")
        with working, self._lock, self._quiet():
            raise_interruption()
            packed.version.check()
            record = packed.storage
            backward = graph_task_id()
            storage = self._restores.storage(record, backward)
            tensor = packed.window.on(storage, record.device)
            self._restores.used(record, backward, ahead=not self._open)
            return tensor

    def _quiet(self) -> AbstractContextManager[None]:
        return self._observer.inside() if self._observer is not None else nullcontext()
