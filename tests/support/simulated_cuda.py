"""CUDA's streams, events, pinned memory and caching allocator, simulated over CPU tensors.

    with simulated_cuda("late") as device:
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            total = values.sum()
    assert device.faults == []

Inside, CPU tensors are the device's. The host's are those with ``pin_memory=True``, those that ``torch.tensor`` makes
of numbers (such as an optimizer's count of steps), and what is computed from these alone. Every operation is a kernel
on the current stream. Each kernel's reads and writes are told to torch's own race checker,
``torch.cuda._sanitizer.EventHandler``, whose vector clocks know which kernels are ordered, whatever really ran first.
Beside that the numbers come out wrong where a wait is missing, because kernels on side streams run when ``order`` says:

* ``"eager"``: at once, as if the device were infinitely fast;
* ``"late"``: not before somebody waits for them, as if it were infinitely slow;
* ``"random N"``: in between, drawn from seed N.

The default stream always runs at once. What ``faults`` lists: two kernels that are not ordered; the host reads or
writes pinned memory that a kernel may still use; memory that is allocated again on its stream while another stream may
still use it. A kernel that has not run when its memory is freed goes on with that memory, until it is allocated again:
then it finds other bytes there. ``Event.query`` orders nothing, as in torch's checker: it sees no queries either.

Not simulated: what autograd does with streams (a backward node runs on the current stream here, not on the stream of
its forward pass); NCCL and all other collectives, which run at once and are not checked; CUDA graphs; kernels
themselves, whose arithmetic is the CPU's; several devices; the host's threads, which count as one; ``numpy()`` and
pointers, which see memory without asking (tests call :meth:`SimulatedCuda.host_access`); sparse tensors and
subclasses, whose operations run at once and are not checked. ``torch.cuda.is_available()`` stays False, so that
nothing looks for a real device.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import itertools
import random
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.cuda._sanitizer import EventHandler, zip_arguments
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from retime.foundations import streams, torch_private

ORDERS = ("eager", "late", "random 0", "random 1", "random 2")
"""In which order kernels of side streams run."""

KERNEL_MS = 1.0
"""What a kernel takes by the device's clock, which events with timing read."""

_OWN_FILES = (str(Path(torch.__file__).parent), __file__, contextlib.__file__)


@contextlib.contextmanager
def simulated_cuda(order: str = "late") -> Iterator[SimulatedCuda]:
    """Let CPU tensors lie on a device with streams, for this thread and those that choose a stream."""
    device = SimulatedCuda(order)
    with contextlib.ExitStack() as patches:
        for target in device.patches():
            patches.enter_context(target)
        patches.enter_context(device)
        yield device


# Streams and events: the part of torch.cuda's interface that orders work.


class Stream:
    """A queue of kernels, as ``torch.cuda.Stream``.

    Args:
        cuda: the simulation.
        priority: kept for who asks; the order of execution is the simulation's.
        immediate: whether kernels run when they are launched.
    """

    def __init__(self, cuda: SimulatedCuda, priority: int = 0, *, immediate: bool = False) -> None:
        self.cuda, self.priority, self.immediate = cuda, priority, immediate
        self.device = torch.device("cuda", 0)
        self.queue: deque[Callable[[], None]] = deque()
        self.launched = 0
        self.ready_ms = 0.0
        self.cuda_stream = self.stream_id = cuda.add_stream(self)

    def __repr__(self) -> str:
        return f"stream {self.stream_id}" if self.stream_id else "the default stream"

    @property
    def executed(self) -> int:
        """How many of its kernels and waits have run."""
        return self.launched - len(self.queue)

    def wait_event(self, event: Event) -> None:
        """Run what is launched from now on after the event."""
        self.cuda.wait(self, event)

    def wait_stream(self, stream: Stream) -> None:
        """Run what is launched from now on after what that stream has been given so far."""
        self.wait_event(stream.record_event())

    def record_event(self, event: Event | None = None) -> Event:
        """Set an event behind what has been launched so far."""
        event = Event(self.cuda) if event is None else event
        event.record(self)
        return event

    def query(self) -> bool:
        """Whether all has run."""
        self.cuda.run_some()
        return not self.queue

    def synchronize(self) -> None:
        """Let the host wait for all that has been launched."""
        with self.cuda.lock:
            self.execute(self.launched)
            self.cuda.checker._handle_stream_synchronization(self.stream_id)
            self.cuda.host_ms = max(self.cuda.host_ms, self.ready_ms)

    def execute(self, upto: int) -> None:
        """Run kernels until so many have run."""
        while self.queue and self.executed < upto:
            self.queue.popleft()()


class Event:
    """A point in a stream, as ``torch.cuda.Event``."""

    def __init__(self, cuda: SimulatedCuda, *, enable_timing: bool = False) -> None:
        self.cuda, self.enable_timing = cuda, enable_timing
        self.stream: Stream | None = None
        self.position = 0
        self.at_ms = 0.0
        self.number = next(cuda.numbers)
        cuda.checker._handle_event_creation(self.number)

    def record(self, stream: Stream | None = None) -> None:
        """Move the event behind all that ``stream``, or the current one, has been given so far."""
        with self.cuda.lock:
            self.stream = stream or self.cuda.current_stream()
            self.position, self.at_ms = self.stream.launched, self.stream.ready_ms
            self.cuda.checker._handle_event_record(self.number, self.stream.stream_id)

    def wait(self, stream: Stream | None = None) -> None:
        """Let ``stream``, or the current one, wait; an event that was never recorded is none to wait for."""
        self.cuda.wait(stream or self.cuda.current_stream(), self)

    def query(self) -> bool:
        """Whether all before it has run."""
        self.cuda.run_some()
        return self.stream is None or self.stream.executed >= self.position

    def synchronize(self) -> None:
        """Let the host wait."""
        with self.cuda.lock:
            if self.stream is not None:
                self.stream.execute(self.position)
            self.cuda.checker._handle_event_synchronization(self.number)
            self.cuda.host_ms = max(self.cuda.host_ms, self.at_ms)

    def elapsed_time(self, end_event: Event) -> float:
        """Milliseconds by the device's clock from this event to ``end_event``.

        Raises:
            RuntimeError: one of them measures no time, was not recorded, or has not been reached.
        """
        for event in (self, end_event):
            if not event.enable_timing or event.stream is None:
                raise RuntimeError("both events must be recorded, and made with enable_timing=True")
            if not event.stream.executed >= event.position:
                raise RuntimeError("an event has not been reached: synchronize it first")
        return end_event.at_ms - self.at_ms


# Memory.


@dataclass(eq=False)
class Block:
    """The memory of one storage.

    Attributes:
        home: on whose allocation it is used again; None: the host's.
        pinned: whether kernels may use it although it is the host's.
        used_by, written_by: the last kernel of each stream.
        recorded: streams that the allocator waits for, by ``record_stream``.
        pending: launched kernels that use it and have not run.
        kept: the bytes, once the storage was freed before such a kernel has run.
    """

    number: int
    address: int
    nbytes: int
    home: Stream | None
    pinned: bool = False
    storage: weakref.ref[torch.UntypedStorage] | None = None
    used_by: dict[Stream, Kernel] = field(default_factory=dict)
    written_by: dict[Stream, Kernel] = field(default_factory=dict)
    recorded: set[Stream] = field(default_factory=set)
    pending: int = 0
    kept: bytearray | None = None

    def keep(self) -> None:
        """Copy the bytes: the storage is about to be freed."""
        self.kept = bytearray(ctypes.string_at(self.address, self.nbytes))

    def spoil(self) -> None:
        """Put into kept bytes what somebody else may have written there: not-a-numbers, or minus ones."""
        if self.kept is not None:
            self.kept[:] = b"\xff" * self.nbytes

    def view(self, like: Form) -> Tensor:
        """A tensor on the memory that holds nothing, as a kernel has a pointer."""
        memory = self.kept if self.kept is not None else (ctypes.c_char * self.nbytes).from_address(self.address)
        whole = torch.frombuffer(memory, dtype=torch.uint8).untyped_storage()
        return torch.empty(0, dtype=like.dtype).set_(whole, like.offset, like.size, like.stride)


@dataclass(frozen=True)
class Form:
    """How a kernel sees a block."""

    block: Block
    dtype: torch.dtype
    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]


@dataclass(frozen=True)
class Kernel:
    """A launched operation."""

    number: int
    name: str
    place: str

    def __str__(self) -> str:
        return f"{self.name} ({self.place})"


# Operations.

_VIEWS_BY_ANOTHER_NAME = ("aten::_unsafe_view", "aten::_reshape_alias", "aten::lift", "aten::lift_fresh")
_METADATA = ("aten::set_", "aten::resize_", "aten::resize_as_", "aten::is_pinned")
_READ_BY_HOST = ("aten::_local_scalar_dense", "aten::equal", "aten::is_nonzero")
_BETWEEN_HOST_AND_DEVICE = ("aten::copy_", "aten::_to_copy")
_NOTED_WRITES_ONLY = ("aten::native_batch_norm", "aten::rrelu_with_noise")
"""Write into arguments that their schemas do not mark."""


@dataclass
class Operation:
    """What an operation of torch's dispatcher does with blocks."""

    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    tensors: list[Tensor] = field(default_factory=list)
    reads: set[Block] = field(default_factory=set)
    writes: set[Block] = field(default_factory=set)

    @property
    def name(self) -> str:
        """Such as ``aten::add_``."""
        return str(self.func._schema.name)

    @property
    def is_view(self) -> bool:
        """Whether it only looks at memory in another form."""
        returned = [each.alias_info for each in self.func._schema.returns]
        views = bool(returned) and all(alias is not None and not alias.is_write for alias in returned)
        return views or self.name in (*_VIEWS_BY_ANOTHER_NAME, *_METADATA)

    @property
    def sees_values(self) -> bool:
        """Whether the host cannot go on before it has run, since what it returns depends on values."""
        tags = (torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output)
        return self.name in _READ_BY_HOST or any(tag in self.func.tags for tag in tags)

    @property
    def can_wait(self) -> bool:
        """Whether it may run later: it makes tensors or writes into some, in a way that its schema tells."""
        returns = self.func._schema.returns
        makes = [each for each in returns if each.alias_info is None]
        return (
            not (makes and self.writes)
            and all(str(each.type) in ("Tensor", "Tensor[]") for each in returns)
            and torch.Tag.nondeterministic_seeded not in self.func.tags  # would draw twice
            and self.name not in _NOTED_WRITES_ONLY
        )

    def run(self) -> Any:
        """Run it as torch does."""
        return self.func(*self.args, **self.kwargs)

    def written_arguments(self) -> Any:
        """What an operation in place returns: the arguments into which it writes."""
        given = {
            frozenset(argument.alias_info.before_set): value
            for argument, value in zip_arguments(self.func._schema, self.args, self.kwargs)
            if argument.alias_info is not None
        }
        returned = [given[frozenset(each.alias_info.before_set)] for each in self.func._schema.returns]
        return returned[0] if len(returned) == 1 else tuple(returned) or None


def is_plain(value: Any) -> bool:
    """Whether it is a tensor on a strided CPU storage, with no tricks."""
    return (
        type(value) in (Tensor, nn.Parameter)
        and value.device.type == "cpu"
        and value.layout is torch.strided
        and not value.is_conj()
        and not value.is_neg()
    )


def caller() -> str:
    """The line outside of torch and of this file that runs."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_OWN_FILES):
        frame = frame.f_back
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"


# The device.


class SimulatedCuda(TorchDispatchMode):
    """Sees every operation of the threads that it is on in; made by :func:`simulated_cuda`.

    Attributes:
        faults: what was found, in words.
        kernels: how many were launched.
        deferred: how many of them did not run at once.
        host_ms: the host's time by the device's clock.
    """

    def __init__(self, order: str = "late") -> None:
        super().__init__()
        if order not in ORDERS and not order.startswith("random "):
            raise ValueError(f"order={order!r}: give one of {', '.join(ORDERS)}")
        self.order = order
        self.faults: list[str] = []
        self.kernels = self.deferred = 0
        self.host_ms = 0.0
        self.lock = threading.RLock()
        self.numbers = itertools.count(1)
        self.checker = EventHandler()
        self._chance = random.Random(order) if order.startswith("random ") else None
        self._streams: list[Stream] = []
        self._blocks: dict[int, Block] = {}  # by the address of a storage's bookkeeping
        self._free: dict[Stream, list[Block]] = {}  # not used again yet, by home
        self._here = threading.local()
        self.default = Stream(self, immediate=True)

    # ---- torch.cuda's interface

    def patches(self) -> list[contextlib.AbstractContextManager[Any]]:
        """What takes the place of torch's, and of ours that would pass the simulation by."""
        ours = [module for name, module in list(sys.modules.items()) if name.startswith("retime.")]
        without_modes = torch_private.without_dispatch_modes
        return [
            patch.multiple(
                torch.cuda,
                Stream=lambda device=None, priority=0, **_: Stream(self, priority, immediate=self.order == "eager"),
                Event=lambda enable_timing=False, **_: Event(self, enable_timing=enable_timing),
                stream=self.stream,
                set_stream=self.set_stream,
                current_stream=self.current_stream,
                default_stream=lambda device=None: self.default,
                synchronize=self.synchronize,
                current_device=lambda: 0,
                set_device=lambda device: None,
            ),
            patch.object(Tensor, "record_stream", self._record_stream, create=True),
            patch.object(Tensor, "tolist", self._tolist, create=True),
            patch.multiple(Future, **self._future_methods()),
            patch.object(DistributedDataParallel, "register_comm_hook", _waiting_hook_registration()),
            patch.object(streams, "DEVICE_TYPES_WITH_STREAMS", streams.DEVICE_TYPES_WITH_STREAMS | {"cpu"}),
            *(
                patch.object(module, "without_dispatch_modes", self.without_other_modes)
                for module in ours
                if getattr(module, "without_dispatch_modes", None) is without_modes
            ),
        ]

    def add_stream(self, stream: Stream) -> int:
        """Number a new stream; the default one is 0."""
        with self.lock:
            self._streams.append(stream)
            number = len(self._streams) - 1
            self.checker._handle_stream_creation(number)
            return number

    def current_stream(self, device: object = None) -> Stream:
        """The calling thread's."""
        stream: Stream = getattr(self._here, "stream", self.default)
        return stream

    def set_stream(self, stream: Stream) -> None:
        """Make it the calling thread's current stream."""
        self._here.stream = stream

    @contextlib.contextmanager
    def stream(self, stream: Stream | None) -> Iterator[None]:
        """Make it current in here; a thread that is not simulated is, as long as it chooses a stream."""
        before = self.current_stream()
        self.set_stream(stream or before)
        try:
            with contextlib.nullcontext() if getattr(self._here, "depth", 0) else self:
                yield
        finally:
            self.set_stream(before)

    def synchronize(self, device: object = None) -> None:
        """Let the host wait for everything."""
        with self.lock:
            for stream in list(self._streams):
                stream.synchronize()

    def wait(self, stream: Stream, event: Event) -> None:
        """Let ``stream`` wait for what was recorded last."""
        with self.lock:
            self.checker._handle_event_wait(event.number, stream.stream_id)
            other, position = event.stream, event.position
            stream.ready_ms = max(stream.ready_ms, event.at_ms)
            if other is not None and other is not stream:
                self._launch(stream, lambda: other.execute(position))

    # ---- running kernels

    def __enter__(self) -> SimulatedCuda:
        self._here.depth = getattr(self._here, "depth", 0) + 1
        super().__enter__()
        return self

    def __exit__(self, *failure: Any) -> None:
        self._here.depth -= 1
        super().__exit__(*failure)

    @contextlib.contextmanager
    def without_other_modes(self) -> Iterator[None]:
        """What torch's ``_disable_current_modes`` does to all modes but this: operations in it run on the device."""
        with _no_modes():
            if getattr(self._here, "depth", 0):
                with self:
                    yield
            else:
                yield

    def run_some(self) -> None:
        """Time goes by: in a random order some kernels run."""
        if self._chance is None:
            return
        with self.lock:
            for stream in list(self._streams):
                while stream.queue and self._chance.random() < 0.3:
                    stream.execute(stream.executed + 1)

    def _launch(self, stream: Stream, run: Callable[[], None]) -> None:
        stream.queue.append(run)
        stream.launched += 1
        if stream.immediate:
            stream.execute(stream.launched)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        leaves = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if func.namespace in ("c10d", "_c10d_functional") or not all(map(is_plain, leaves)):
            return func(*args, **kwargs)
        with self.lock:
            self.run_some()
            operation = Operation(func, args, kwargs, leaves)
            if operation.name in ("aten::_pin_memory", "aten::is_pinned"):
                return self._pinning(operation)
            if operation.name == "aten::lift_fresh":
                self._block_of(leaves[0], on_host=True)
            if operation.is_view:
                return operation.run()
            self._note_arguments(operation)
            blocks = operation.reads | operation.writes
            if blocks and all(block.home is None for block in blocks):
                return self._run_on_host(operation)
            return self._run_on_device(operation)

    def _note_arguments(self, operation: Operation) -> None:
        makes_like = any(word in operation.name for word in ("::new_", "_like"))
        for argument, value in zip_arguments(operation.func._schema, operation.args, operation.kwargs):
            writes = argument.alias_info is not None and argument.alias_info.is_write
            for leaf in tree_leaves(value):
                if isinstance(leaf, Tensor) and (writes or not makes_like):
                    block = self._block_of(leaf)
                    if block is not None:
                        (operation.writes if writes else operation.reads).add(block)
        operation.reads -= operation.writes

    def _run_on_host(self, operation: Operation) -> Any:
        for block in (*operation.reads, *operation.writes):
            self._check_host_access(block, writes=block in operation.writes, what=operation.name)
        result = operation.run()
        for leaf in tree_leaves(result):
            if is_plain(leaf):
                self._block_of(leaf, on_host=True)
        return result

    def _run_on_device(self, operation: Operation) -> Any:
        stream = self.current_stream()
        pinned = operation.kwargs.pop("pin_memory", None)
        if stream.immediate or operation.sees_values or not operation.can_wait:
            stream.execute(stream.launched)
            result = operation.run()
            self._note_results(operation, result, stream, pinned=bool(pinned))
            stream.launched += 1
        else:
            result = self._run_later(operation, stream)
        if not operation.reads and not operation.writes:  # memory that nobody has touched yet
            return result
        self._tell_checker(operation, stream)
        blocks = operation.reads | operation.writes
        crosses = operation.name in _BETWEEN_HOST_AND_DEVICE and len({block.home is None for block in blocks}) == 2
        blocks_host = crosses and not (operation.kwargs.get("non_blocking") or operation.args[2:3] == (True,))
        if operation.sees_values or blocks_host:
            stream.synchronize()
        return result

    def _run_later(self, operation: Operation, stream: Stream) -> Any:
        """Launch it. What it makes gets its form from a run with the bytes that are there now, and is then spoilt."""
        forms: dict[int, Form] = {}
        for leaf in operation.tensors:
            block = self._block_of(leaf)
            if block is not None:
                forms[id(leaf)] = _form(leaf, block)
        made: list[Tensor] = []
        if all(each.alias_info is not None for each in operation.func._schema.returns):
            result = operation.written_arguments()
        else:
            try:
                result = operation.run()
            except (RuntimeError, IndexError):  # the bytes that are there are no values yet: an index, say
                stream.execute(stream.launched)
                result = operation.run()
            made = [leaf for leaf in tree_leaves(result) if is_plain(leaf)]
            self._note_results(operation, result, stream)
        outputs = [_form(leaf, block) for leaf in made if (block := self._block_of(leaf)) in operation.writes and block]
        if made and operation.writes:
            for form in outputs:
                ctypes.memset(form.block.address, 0xFF, form.block.nbytes)
        elif made:  # a factory: nothing to compute
            return result
        used = {form.block for form in (*forms.values(), *outputs)}
        for block in used:
            block.pending += 1
        func = operation.func
        args, kwargs = tree_map(functools.partial(_put_form, forms), (operation.args, operation.kwargs))

        def run() -> None:
            with _no_modes(), torch.no_grad():
                computed = func(*tree_map(_on_memory, args), **tree_map(_on_memory, kwargs))
                values = [leaf for leaf in tree_leaves(computed) if isinstance(leaf, Tensor)] if outputs else []
                for form, new in zip(outputs, values, strict=True):  # a gradient that was not asked for is None
                    form.block.view(form).copy_(new)
            for block in used:
                block.pending -= 1

        self.deferred += 1
        self._launch(stream, run)
        return result

    def _tell_checker(self, operation: Operation, stream: Stream) -> None:
        self.kernels += 1
        stream.ready_ms = max(stream.ready_ms, self.host_ms) + KERNEL_MS
        place = caller()
        reads, writes = ({block.number for block in blocks} for blocks in (operation.reads, operation.writes))
        name = f"{operation.name} ({place})"
        errors = self.checker._handle_kernel_launch(
            stream.stream_id, reads, writes, set(), name, {number: [] for number in reads | writes}
        )
        for error in errors:
            before = error.previous_access
            self.faults.append(
                f"race: {name} on {stream} is not ordered after {before.operator} on {self._streams[before.stream]}"
            )
        kernel = Kernel(self.checker.seq_num, operation.name, place)
        for block in operation.reads | operation.writes:
            block.used_by[stream] = kernel
        for block in operation.writes:
            block.written_by[stream] = kernel

    # ---- memory

    def _note_results(self, operation: Operation, result: Any, stream: Stream, *, pinned: bool = False) -> None:
        """Give what an operation has made a block; what is empty still has not been written."""
        fills = not any(word in operation.name for word in ("::empty", "::new_empty", "empty_like"))
        given = operation.reads | operation.writes
        for leaf in tree_leaves(result):
            if is_plain(leaf):
                block = self._block_of(leaf, made_on=stream, on_host=pinned, pinned=pinned)
                if block is None or block in given:
                    continue
                if not fills:
                    ctypes.memset(block.address, 0xFF, block.nbytes)  # whatever was there before
                elif not pinned:
                    operation.writes.add(block)

    def _block_of(
        self, tensor: Tensor, *, made_on: Stream | None = None, on_host: bool = False, pinned: bool = False
    ) -> Block | None:
        """The block of a tensor's storage, made at the first sight; None: it has no bytes."""
        storage = tensor.untyped_storage()
        if not storage.nbytes():
            return None
        key = storage._cdata
        block = self._blocks.get(key)
        if block is not None and block.address == storage.data_ptr() and block.storage and block.storage() is storage:
            return block
        if made_on is not None and not on_host:
            self._check_allocation(made_on)
        home = None if on_host else made_on or self.default
        block = Block(next(self.numbers), storage.data_ptr(), storage.nbytes(), home, pinned)
        block.storage = weakref.ref(storage, functools.partial(self._freed, key, block))
        self._blocks[key] = block
        self.checker._handle_memory_allocation(block.number)
        return block

    def _freed(self, key: int, block: Block, _: object) -> None:
        with self.lock:
            if self._blocks.get(key) is block:
                del self._blocks[key]
            self.checker._handle_memory_deallocation(block.number)
            if block.pending:
                block.keep()
            if block.home is not None and any(stream is not block.home for stream in block.used_by):
                self._free.setdefault(block.home, []).append(block)

    def _check_allocation(self, stream: Stream) -> None:
        """Whatever was freed on this stream may be what an allocation on it gets: nobody else may still use it."""
        for block in self._free.pop(stream, ()):
            for user, kernel in block.used_by.items():
                waited = self.checker.syncs.is_ordered_after(stream.stream_id, kernel.number, user.stream_id)
                if user is not stream and user not in block.recorded and not waited:
                    block.spoil()
                    self.faults.append(
                        f"memory used again: freed on {stream} while {kernel} on {user} may still use it ({caller()})"
                    )

    def host_access(self, tensor: Tensor, *, writes: bool = False) -> None:
        """The host looks at the tensor's memory, or writes into it, by a way that torch does not see."""
        with self.lock:
            block = self._block_of(tensor)
            if block is not None:
                self._check_host_access(block, writes=writes, what="the host")

    def _check_host_access(self, block: Block, *, writes: bool, what: str) -> None:
        for stream, kernel in (block.used_by if writes else block.written_by).items():
            if kernel.number > self.checker.syncs.host_sync_state.get(stream.stream_id, 0):
                verb = "writes" if writes else "reads"
                self.faults.append(f"the host {verb} ({what}, {caller()}) what {kernel} on {stream} may still use")

    def _pinning(self, operation: Operation) -> Any:
        block = self._block_of(operation.tensors[0])
        if operation.name == "aten::is_pinned":
            return block is not None and block.pinned
        pinned = operation.tensors[0].clone()
        self._block_of(pinned, on_host=True, pinned=True)
        return pinned

    @property
    def _record_stream(self) -> Callable[[Tensor, Stream], None]:
        def record_stream(tensor: Tensor, stream: Stream) -> None:
            with self.lock:
                block = self._block_of(tensor)
                if block is not None:
                    block.recorded.add(stream)

        return record_stream

    @property
    def _tolist(self) -> Callable[[Tensor], Any]:
        plain = Tensor.tolist

        def tolist(tensor: Tensor) -> Any:
            if is_plain(tensor) and getattr(self._here, "depth", 0) and tensor.numel():
                torch.equal(tensor, tensor)  # the host reads it, as it reads any value
            return plain(tensor)

        return tolist

    # ---- futures

    def _future_methods(self) -> dict[str, Any]:
        """A future of a device's values: who waits for it makes the current stream wait for what set its result."""
        make, set_result, wait, then = Future.__init__, Future.set_result, Future.wait, Future.then

        def init(future: Any, *, devices: Sequence[Any] | None = None) -> None:
            make(future)
            future.on_device, future.ready = bool(devices), None

        def set_result_on_stream(future: Any, result: Any) -> None:
            if future.on_device:
                future.ready = self.current_stream().record_event()
            set_result(future, result)

        def wait_on_stream(future: Any) -> Any:
            result = wait(future)
            if future.ready is not None:
                future.ready.wait()
            return result

        def then_on_stream(future: Any, callback: Callable[[Any], Any]) -> Any:
            if not future.on_device:
                return then(future, callback)
            child: Any = Future(devices=["cpu"])

            def call(_: object) -> None:  # torch runs it on a stream of its own, behind what set the result
                with self.stream(torch.cuda.Stream()):  # type: ignore[arg-type, no-untyped-call]
                    try:
                        if future.ready is not None:
                            future.ready.wait()
                        child.set_result(callback(future))
                    except Exception as error:
                        child.set_exception(error)

            future.add_done_callback(call)
            return child

        return {"__init__": init, "set_result": set_result_on_stream, "wait": wait_on_stream, "then": then_on_stream}


_no_modes = torch_private.without_dispatch_modes


def _waiting_hook_registration() -> Callable[..., None]:
    """DDP waits for what its hook returns at the end of a backward pass, in C++: here Python's future waits."""
    register = DistributedDataParallel.register_comm_hook

    def register_comm_hook(model: DistributedDataParallel, state: Any, hook: Callable[..., Any]) -> None:
        @functools.wraps(hook)  # DDP looks at annotations
        def waiting(state: Any, bucket: Any) -> Any:
            future = hook(state, bucket)
            torch_private.queue_callback(future.wait)
            return future

        register(model, state, waiting)

    return register_comm_hook


def _form(tensor: Tensor, block: Block) -> Form:
    return Form(block, tensor.dtype, int(tensor.storage_offset()), tuple(tensor.shape), tuple(tensor.stride()))


def _put_form(forms: dict[int, Form], leaf: Any) -> Any:
    return forms.get(id(leaf), leaf) if isinstance(leaf, Tensor) else leaf


def _on_memory(leaf: Any) -> Any:
    return leaf.block.view(leaf) if isinstance(leaf, Form) else leaf
