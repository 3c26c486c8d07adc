"""Activations leave the device during the forward pass and come back during the backward pass (moDNN, section 5.2).

    host = parse_host("disk:/var/tmp", "cpu")
    with OffloadSavedTensors(plan, host, keep=[*model.parameters(), *model.buffers(), *batch]) as offload:
        loss = model(batch)
    loss.backward()
    print(offload.report())

The numbers stay the same: what comes back is what left, bit by bit, and it leaves when nothing but the graph holds it
any more, so that nothing can write into it. Autograd saves tensors; what moves is storages, so several views of one
storage move once and come back as one storage. Memory that torch has not allocated (NumPy's, say) stays.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from itertools import islice
from types import TracebackType
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from retime.foundations.arguments import checked
from retime.foundations.messages import parse_bytes
from retime.foundations.storages import has_storage, storage_key, storage_keys
from retime.foundations.torch_private.engine import (
    graph_task_id,
    next_sequence_number,
    queue_callback,
    top_saved_tensors_hooks,
)
from retime.mechanisms.memory_budget.offload.storages import (
    InFlight,
    OffloadedStorage,
    OffloadedTensor,
    OffloadReport,
    ResidentTensor,
    interruptions,
    raise_interruption,
    watch,
    working,
)
from retime.mechanisms.memory_budget.offload.tier import HostError, HostNone, HostTier, check_host
from retime.schedules.budget import OffloadPlan
from retime.schedules.errors import ScheduleError

# Who is told what a forward pass saves and what the backward pass uses.


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


# Brings offloaded storages back for backward passes, some of them ahead of their use.

# A storage that several nodes saved is held between their uses while fewer than so many others came back after it.
_RETAINED_STORAGES = 2


class Restores:
    """What backward passes use of one forward pass's storages.

    Args:
        moved: the storages that move, as they are saved; the list grows meanwhile.
        depth: so many are fetched ahead of their use.
        counts: what is fetched and waited for is added up there.
        in_flight: is told of errors that cannot be raised in a backward pass.
        observer: is told what is used and fetched.
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
            self._in_flight.note(error)

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


_WHOLE_PASSES = 17  # with 2, 4 or 8 parts to a batch it is another part each time
"""One of so many passes is watched to its end."""


class PlanMismatch(ScheduleError):  # noqa: N818  # callbacks take it as news, not only as an error
    """A forward pass saved other storages than the plan was made for.

    Attributes:
        saved: how many storages it saved.
        planned: how many the plan has.
    """

    def __init__(self, saved: int, planned: int) -> None:
        self.saved, self.planned = saved, planned
        super().__init__(
            f"the forward pass saved {saved} storages, but its plan has {planned}: the batch has another shape, or the "
            "model took another way. Make a plan for this shape, or bring all batches to one shape"
        )


_REFUSES_HOOKS = "support saved tensor hooks"
"""So ``torch.func`` says it."""


class NoHooksError(RuntimeError):
    """The forward pass refuses to run under saved-tensor hooks, so nothing that it saves can be offloaded."""

    def __init__(self) -> None:
        super().__init__(
            "nothing can be offloaded, because the forward pass calls torch.func.grad, vjp, jacrev or hessian, which "
            "do not run under saved-tensor hooks"
        )


@checked
@dataclass(eq=False)
class OffloadSavedTensors:
    """A context manager around a forward pass that moves what the plan names to the host.

    Use it around the forward pass only, as often as wanted; the backward pass runs outside. Tensors that are no strided
    window on one storage (sparse, nested, subclasses), zero-size ones, and those on other devices stay where they are
    and have no number, and so do storages saved while a backward pass runs.

    Hooks cost each saved tensor some microseconds. So most passes are left alone once the last storage that moves has
    been saved for the last time, as far as passes before tell; the first and every 17th are watched to their end, and
    only these are compared with the plan. So are all up to the next 17th once a pass makes another number of nodes.
    Where nothing is to move, to be compared or to be observed, and with :class:`HostNone`, there are no hooks at all.

    Args:
        plan: which storages move, numbered by when the forward pass first saves them. ``saved=0`` means that their
            number is not known: then nothing is compared.
        host: where they go.
        keep: tensors whose storages never move and have no number: parameters, buffers, the batch. May be set anew
            before each forward pass.
        in_flight_bytes: storages that a copy still reads may hold that much memory after the model has let go of them,
            which is when it begins. 0 waits for every copy. They are let go of in order and as late as this allows, so
            that the peak does not depend on the disk's mood.
        on_mismatch: called with the error when a pass that was watched to its end does not fit the plan; without it the
            error is raised at the end of the forward pass.
        observer: is told what is saved and used, for a profile.

    Raises:
        HostError: when the host fails; see there.
        NoHooksError: at the end of a forward pass that cannot run under hooks.
        PlanMismatch: see ``on_mismatch``.
    """

    plan: OffloadPlan
    host: HostTier
    keep: Iterable[Tensor] = ()
    in_flight_bytes: int | str = 0
    on_mismatch: Callable[[PlanMismatch], None] | None = None
    observer: SaveObserver | None = None
    _counts: OffloadReport = field(default_factory=OffloadReport, init=False)
    _pass: ForwardPass | None = field(default=None, init=False)
    _hooks: torch.autograd.graph.saved_tensors_hooks | None = field(default=None, init=False)
    _entered: bool = field(default=False, init=False)
    _planned: int = field(default=0, init=False)
    _tail: int | None = field(default=None, init=False)
    _began: int = field(default=0, init=False)
    _nodes: int | None = field(default=None, init=False)
    _steady: bool = field(default=True, init=False)

    def __post_init__(self) -> None:
        check_host(self.host)
        self.in_flight_bytes = parse_bytes("in_flight_bytes", self.in_flight_bytes, least=0)
        self._planned = 1 + max(self.plan.offload, default=-1)

    def __enter__(self) -> OffloadSavedTensors:
        if self._entered:
            raise RuntimeError("this OffloadSavedTensors is already around a forward pass: make another one to nest")
        if self._pass is not None:
            self._pass.settle()
        if self._counts.passes % _WHOLE_PASSES == 0:
            self._tail, self._nodes, self._steady = None, None, True
        # With hooks around these, ours may not leave the rest of the pass to them.
        nested = top_saved_tensors_hooks(True) is not None
        self._pass = ForwardPass(
            self.plan, self.host, self.keep, int(self.in_flight_bytes), self._counts, observer=self.observer
        )
        if self._tail is not None and self._steady and not nested and self.observer is None:
            self._pass.end_at(max(self._tail, self._planned), self._unhook)
        if self._hooked:
            # A compiled region calls them for what it saves; they are not a part of what it compiles.
            pack, unpack = (torch.compiler.disable(hook) for hook in (self._pass.pack, self._pass.unpack))  # type: ignore[no-untyped-call]
            self._hooks = torch.autograd.graph.saved_tensors_hooks(pack, unpack)
            self._hooks.__enter__()
        self._entered = True
        self._counts.passes += 1
        self._began = next_sequence_number()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._pass is not None, "left without having been entered"
        whole = self._hooks is not None or not self._hooked
        self._entered = False
        self._unhook()
        if error is not None:
            self._pass.abandon()
            if isinstance(error, RuntimeError) and _REFUSES_HOOKS in str(error):
                raise NoHooksError from error
            return
        self._pass.close()
        nodes = next_sequence_number() - self._began
        self._steady &= self._nodes in (None, nodes)
        self._nodes = nodes
        if whole:
            self._tail = self._pass.tail
            self._compare(self._pass.sizes)

    @property
    def _hooked(self) -> bool:
        needed = self.plan.saved > 0 or self.observer is not None
        return needed and not isinstance(self.host, HostNone)

    def _unhook(self) -> None:
        hooks, self._hooks = self._hooks, None
        if hooks is not None:
            hooks.__exit__(None, None, None)

    @property
    def sizes(self) -> list[int]:
        """Bytes of each storage that the last pass saved, by number, as far as it was watched."""
        return [] if self._pass is None else self._pass.sizes

    @property
    def ended(self) -> bool:
        """No forward pass is under way, and nothing that the last one moved is waited for any more."""
        return self._pass is None or self._pass.ended

    def report(self) -> OffloadReport:
        """What was moved so far."""
        return replace(self._counts)

    def _compare(self, sizes: Sequence[int]) -> None:
        if self.plan.saved in (0, len(sizes)):
            return
        self._counts.mismatches += 1
        self._tail = None
        mismatch = PlanMismatch(len(sizes), self.plan.saved)
        if self.on_mismatch is None:
            assert self._pass is not None
            self._pass.abandon()
            raise mismatch
        self.on_mismatch(mismatch)
