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
its forward pass); NCCL and all other collectives, which run at once and are not checked; kernels
themselves, whose arithmetic is the CPU's; several devices; the host's threads, which count as one; ``numpy()`` and
pointers, which see memory without asking (tests call :meth:`SimulatedCuda.host_access`); sparse tensors and
subclasses, whose operations run at once and are not checked. ``torch.cuda.is_available()`` stays False, so that
nothing looks for a real device.
"""

import contextlib
import ctypes
import functools
import itertools
import random
import sys
import threading
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from traceback import StackSummary
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.cuda import _sanitizer
from torch.cuda._sanitizer import EventHandler, zip_arguments
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from retime.foundations import streams
from retime.foundations.torch_private import engine
from support.simulated_graphs import Capturing, Graph
from support.simulated_operations import Block, Kernel, Operation, caller, form_of, is_plain
from support.simulated_streams import Event, Stream

ORDERS = ("eager", "late", "random 0", "random 1", "random 2")
"""In which order kernels of side streams run."""

KERNEL_MS = 1.0
"""What a kernel takes by the device's clock, which events with timing read."""


@contextlib.contextmanager
def simulated_cuda(order: str = "late") -> Iterator["SimulatedCuda"]:
    """Let CPU tensors lie on a device with streams, for this thread and those that choose a stream."""
    device = SimulatedCuda(order)
    with contextlib.ExitStack() as patches:
        for target in device.patches():
            patches.enter_context(target)
        patches.enter_context(device)
        yield device


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
        self.capture: Graph | None = None
        self.warm: dict[Stream, set[str]] = defaultdict(set)
        """Operations that have run outside of captures, by stream."""

    # ---- torch.cuda's interface

    def patches(self) -> list[contextlib.AbstractContextManager[Any]]:
        """What takes the place of torch's, and of ours that would pass the simulation by."""
        ours = [module for name, module in list(sys.modules.items()) if name.startswith("retime.")]
        tolist = Tensor.tolist
        without_modes = engine.without_dispatch_modes
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
                CUDAGraph=lambda keep_graph=False: Graph(self),
                graph=lambda graph, pool=None, stream=None, **_: Capturing(self, graph, stream or Stream(self)),
                graph_pool_handle=lambda: (0, next(self.numbers)),
                is_current_stream_capturing=lambda: self.capture is not None,
            ),
            patch.object(Tensor, "record_stream", lambda *given: self.record_stream(*given), create=True),
            patch.object(Tensor, "tolist", lambda tensor: (self._read(tensor), tolist(tensor))[1], create=True),
            patch.multiple(Future, **self._future_methods()),
            # The checker keeps a stack for each access, slowly; faults name one line.
            patch.object(
                _sanitizer, "traceback", SimpleNamespace(StackSummary=StackSummary, walk_stack=lambda frame: ())
            ),
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
        return getattr(self._here, "stream", self.default)

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
        self.not_in_capture("synchronize")
        with self.lock:
            for stream in list(self._streams):
                stream.synchronize()

    def wait(self, stream: Stream, event: Event) -> None:
        """Let ``stream`` wait for what was recorded last."""
        if self.capture is not None:
            if getattr(event, "capture", (None, 0))[0] is not self.capture:
                raise RuntimeError("dependency created on uncaptured work in another stream")
            self.capture.note_wait(stream, event)
            return
        with self.lock:
            self.checker._handle_event_wait(event.number, stream.stream_id)
            other, position = event.stream, event.position
            stream.ready_ms = max(stream.ready_ms, event.at_ms)
            if other is not None and other is not stream:
                self._launch(stream, lambda: other.execute(position))

    # ---- running kernels

    def __enter__(self) -> "SimulatedCuda":
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

    def not_in_capture(self, what: str) -> None:
        """Raise, as CUDA does, where the host may not wait.

        Raises:
            RuntimeError: a graph is captured.
        """
        if self.capture is not None:
            raise RuntimeError(f"operation not permitted when stream is capturing: {what}")

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
        if self.capture is not None:
            self.faults.append(f"the host runs {operation.name} in a capture, which no replay does ({caller()})")
        for block in (*operation.reads, *operation.writes):
            self._check_host_access(block, writes=block in operation.writes, what=operation.name)
        result = operation.run()
        for leaf in tree_leaves(result):
            if is_plain(leaf):
                self._block_of(leaf, on_host=True)
        return result

    def _run_on_device(self, operation: Operation) -> Any:
        stream = self.current_stream()
        if self.capture is not None:
            return self.capture.keep_kernel(operation, stream)
        self.warm[stream].add(operation.name)
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
        if operation.holds_the_host_up:
            stream.synchronize()
        return result

    def _run_later(self, operation: Operation, stream: Stream) -> Any:
        """Launch it. What it makes gets its form from a run with the bytes that are there now, and is then spoilt."""
        forms = {id(leaf): form_of(leaf, block) for leaf in operation.tensors if (block := self._block_of(leaf))}
        leaves: list[Tensor] = []
        if all(each.alias_info is not None for each in operation.func._schema.returns):
            result = operation.written_arguments()
        else:
            try:
                result = operation.run()
            except (RuntimeError, IndexError):  # the bytes that are there are no values yet: an index, say
                stream.execute(stream.launched)
                result = operation.run()
            leaves = [leaf for leaf in tree_leaves(result) if is_plain(leaf)]
            self._note_results(operation, result, stream)
        outputs = [
            (place, form_of(leaf, block))
            for place, leaf in enumerate(leaves)
            if (block := self._block_of(leaf)) is not None and block in operation.writes
        ]
        for _, form in outputs:
            ctypes.memset(form.block.address, 0xFF, form.block.nbytes)
        if leaves and not outputs:  # nothing to compute: empty, or another form of what was there
            return result
        used = {form.block for form in (*forms.values(), *(form for _, form in outputs))}
        for block in used:
            block.pending += 1
        self.deferred += 1
        self._launch(stream, operation.kernel(forms, outputs, used))
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

    def record_stream(self, tensor: Tensor, stream: Stream) -> None:
        """Let the allocator wait for that stream before it uses the tensor's memory again."""
        with self.lock:
            block = self._block_of(tensor)
            if block is not None:
                block.recorded.add(stream)

    def _read(self, tensor: Tensor) -> None:
        """The host reads values: as every operation that returns some, it waits for the current stream."""
        if is_plain(tensor) and getattr(self._here, "depth", 0) and tensor.numel():
            torch.equal(tensor, tensor)

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


_no_modes = engine.without_dispatch_modes


def _waiting_hook_registration() -> Callable[..., None]:
    """DDP waits for what its hook returns at the end of a backward pass, in C++: here Python's future waits."""
    register = DistributedDataParallel.register_comm_hook

    def register_comm_hook(model: DistributedDataParallel, state: Any, hook: Callable[..., Any]) -> None:
        @functools.wraps(hook)  # DDP looks at annotations
        def waiting(state: Any, bucket: Any) -> Any:
            future = hook(state, bucket)
            engine.queue_callback(future.wait)
            return future

        register(model, state, waiting)

    return register_comm_hook
