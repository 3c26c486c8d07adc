"""One forward pass: which storages it saves, their copies on the host, and how its backward passes bring them back."""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from itertools import islice
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import torch
from torch import Tensor

from retime.foundations.storages import Window, has_storage, storage_key, storage_keys
from retime.foundations.torch_private.engine import FakeTensor, graph_task_id, queue_callback
from retime.foundations.torch_private.tensors import version_of
from retime.mechanisms.memory_budget.offload.tier import (
    HostCopy,
    HostError,
    HostTier,
    Loading,
    interruptions,
    is_torchs_own,
    raise_interruption,
    watch,
    working,
)
from retime.schedules.budget import OffloadPlan

if TYPE_CHECKING:
    from retime.mechanisms.memory_budget.offload.saved_tensors import OffloadReport

# Copies to the host that still hold the storages they read, and those that failed.


class InFlight:
    """Sources of copies are let go of in order, and as late as a limit allows.

    Of copies that fail where no error can be raised the first is noted, until it can be.

    Args:
        limit_bytes: sources hold so much at most.
        counts: how often a copy had to be waited for is added up there.
    """

    def __init__(self, limit_bytes: int, counts: OffloadReport) -> None:
        self._limit_bytes, self._counts = limit_bytes, counts
        self._copies: deque[tuple[int, weakref.ref[HostCopy]]] = deque()  # bytes; a copy goes with its record
        self._bytes = 0
        self._error: HostError | None = None

    def add(self, nbytes: int, copy: HostCopy) -> None:
        """A copy has begun; settle the oldest ones until those in flight keep the limit.

        Raises:
            HostError: a copy failed; it holds its source on.
        """
        self._copies.append((nbytes, weakref.ref(copy)))
        self._bytes += nbytes
        while self._bytes > self._limit_bytes:
            oldest_bytes, reference = self._copies.popleft()
            self._bytes -= oldest_bytes
            oldest = reference()
            if oldest is not None:
                self._counts.stalls += oldest.settle()

    def check(self) -> None:
        """Raise what is known to have failed so far; does not wait.

        Raises:
            HostError: a copy failed.
        """
        self.raise_noted()
        for _, reference in self._copies:
            copy = reference()
            if copy is not None:
                copy.check()

    def clear(self) -> None:
        """Forget all of them."""
        self._copies.clear()

    def note(self, error: HostError) -> None:
        """A copy failed where that cannot be raised."""
        self._error = self._error or error

    def raise_noted(self) -> None:
        """Raise what was noted, once.

        Raises:
            HostError: a copy failed.
        """
        if interruptions:
            raise_interruption()
        error, self._error = self._error, None
        if error is not None:
            raise error


# What a saved-tensor hook hands to autograd in place of a tensor, and the check that hooks switch off.
#
# Autograd compares a saved tensor's version with the one it had when it was saved, and refuses to go on after an edit
# in place. With hooks it leaves that to them.


def _edited(what: str, version: int, expected: int) -> RuntimeError:
    """Return autograd's error about a tensor that was edited in place after it was saved."""
    return RuntimeError(
        f"one of the variables needed for gradient computation has been modified by an inplace operation: [{what}] is "
        f"at version {version}; expected version {expected} instead. Hint: enable anomaly detection to find the "
        "operation that failed to compute its gradient, with torch.autograd.set_detect_anomaly(True)."
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
            what = f"{self.tensor.type()} {list(self.tensor.shape)}"
            raise _edited(what, version_of(self.tensor), self.version)
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
        self._restored: weakref.ref[torch.UntypedStorage] | None = None

    def on_release(self, storage: torch.UntypedStorage) -> None:
        """Nobody else holds the storage: from now on it stays as it is."""
        if self.copy is not None or self._stays is not None:
            return
        if is_torchs_own(storage):
            self._offload(self, storage)
        if self.copy is None:
            self._stays = storage

    def present(self) -> torch.UntypedStorage | None:
        """The data on the device, if it is there or on its way."""
        return self._source() or self.retained or (None if self._restored is None else self._restored())

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
    """A saved tensor whose storage goes to the host: it keeps the counter of the tensor's versions, not its storage."""

    __slots__ = ("_counter", "_first_version", "_what", "storage", "window")

    def __init__(self, storage: OffloadedStorage, tensor: Tensor) -> None:
        self.storage = storage
        self.window = Window.of(tensor)
        self._first_version = version_of(tensor)
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
        if self._counter is not None and version_of(self._counter) != self._first_version:
            raise _edited(self._what, version_of(self._counter), self._first_version)


# Who is told what a forward pass saves and what its backward pass fetches.


@runtime_checkable
class SaveObserver(Protocol):
    """Is told what a forward pass saves and what its backward pass fetches."""

    def inside(self) -> AbstractContextManager[None]:
        """Held while a hook works: operations in it are not the model's."""

    def saved(self, number: int, storage: torch.UntypedStorage) -> None:
        """A tensor on the storage with this number was saved, for the first time or again."""

    def restored(self, number: int, storage: torch.UntypedStorage, device: torch.device) -> None:
        """Its data comes back in another storage on ``device``."""


# Brings offloaded storages back for backward passes, some of them ahead of their use.

# A storage that several nodes saved is held between their uses while fewer than so many others came back after it.
_RETAINED_STORAGES = 2


class Restores:
    """Uses of one forward pass's storages by backward passes.

    Args:
        moved: the storages that move, as they are saved; the list grows meanwhile.
        depth: so many are fetched ahead of their use.
        counts: what is fetched and waited for is added up there.
        in_flight: is told of errors that cannot be raised in a backward pass.
        observer: is told what is fetched.
    """

    def __init__(
        self,
        moved: list[weakref.ref[OffloadedStorage]],
        depth: int,
        counts: OffloadReport,
        in_flight: InFlight,
        observer: SaveObserver | None,
    ) -> None:
        self._moved, self._depth = moved, depth
        self._counts, self._in_flight, self._observer = counts, in_flight, observer
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
            if record.copy is not None:  # it may never have been waited for: now the source goes, or stays if it failed
                try:
                    record.copy.settle()
                except HostError as error:
                    self._in_flight.note(error)
        elif record.retained is not None:
            self._retained.append(weakref.ref(record))
            while len(self._retained) > _RETAINED_STORAGES:
                oldest = self._retained.popleft()()
                if oldest is not None and oldest is not record:
                    oldest.let_go()

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


# One forward pass under :class:`OffloadSavedTensors`, and the backward passes that read what it saved.


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
        counts: OffloadReport,
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
        self._in_flight = InFlight(in_flight_bytes, counts)
        self._restores = Restores(self._moved, plan.prefetch, counts, self._in_flight, observer)

    # ---- forward

    def end_at(self, number: int, then: Callable[[], None]) -> None:
        """Call ``then`` when the storage with this number is saved: none that moves will be saved any more."""
        self._end_at, self._at_end = number, then

    def pack(self, tensor: Tensor) -> ResidentTensor | OffloadedTensor:
        """Autograd saves a tensor."""
        with working, self._lock, self._quiet():
            self._in_flight.raise_noted()
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
        self._in_flight.raise_noted()

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
                self._counts.storages += 1
                self._counts.bytes_out += record.nbytes
                self._in_flight.add(record.nbytes, record.copy)
            except HostError as error:  # a copy that failed holds its source on
                self._in_flight.note(error)

    # ---- backward

    def unpack(self, packed: ResidentTensor | OffloadedTensor) -> Tensor:
        """Autograd needs a tensor it saved."""
        if isinstance(packed, ResidentTensor):
            return packed.get()
        if self._abandoned:
            raise RuntimeError("the forward pass that saved this tensor failed: run it again")
        with working, self._lock, self._quiet():
            if interruptions:
                raise_interruption()
            packed.check()
            record = packed.storage
            backward = graph_task_id()
            storage = self._restores.storage(record, backward)
            tensor = packed.window.on(storage, record.device)
            self._restores.used(record, backward, ahead=not self._open)
            return tensor

    def _quiet(self) -> AbstractContextManager[None]:
        return self._observer.inside() if self._observer is not None else nullcontext()
