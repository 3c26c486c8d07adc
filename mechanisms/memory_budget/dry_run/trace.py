"""Sees each operation of a step below autograd, with real or fake tensors, and counts storages.

What tensors hold is counted; what an operation allocates for itself,
:mod:`retime.mechanisms.memory_budget.costs` measures.
"""

from __future__ import annotations

import weakref
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from retime.foundations.preserve_state import ObserverMode, ValueReadError
from retime.foundations.storages import tensors_in
from retime.foundations.torch_private.engine import (
    LOCAL_SCALAR_DENSE,
    TorchDispatchMode,
    current_node,
    next_sequence_number,
    schema_of,
    sequence_number,
    tree_leaves,
)
from retime.foundations.torch_private.tensors import sparse_indices, sparse_values, storage_address
from retime.schedules.budget import BlockKind, Phase

# Counts what a forward pass allocates while it is trained for real: its numbers stay what they are.


class TooMuchAllocated(BaseException):  # no error: the caller goes another way. A step's own `except` lets it by
    """The forward pass has allocated more than it may."""


class AllocatedBytes(ObserverMode):  # type: ignore[no-untyped-call]
    """While open, adds up the storages that operations make, as though none of them was ever freed.

    So a segment under activation checkpointing counts with what its backward pass makes again.

    Args:
        most: raise :class:`TooMuchAllocated` as soon as there is more; None never does.

    Attributes:
        bytes: of all storages so far.
    """

    def __init__(self, most: int | None = None) -> None:
        super().__init__()
        self.bytes = 0
        self._most = most

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        outputs = [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]
        if outputs:
            inputs = {_storage(leaf)[0] for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
            self.bytes += sum(nbytes for key, nbytes in dict(map(_storage, outputs)).items() if key not in inputs)
            if self._most is not None and self.bytes > self._most:
                raise TooMuchAllocated
        return out


def _storage(tensor: Tensor) -> tuple[int, int]:
    """Key and size of a tensor's storage; by itself where it has none to ask for."""
    try:
        storage: torch.UntypedStorage = tensor.untyped_storage()
    except (NotImplementedError, RuntimeError):
        return id(tensor), tensor.numel() * tensor.element_size()
    return storage_address(storage), int(storage.nbytes())


# Which layer of a module runs, in its forward pass and in its backward pass.

# Nodes that accumulate into a leaf are all numbered 2**64 - 1; they run right after the node that they serve.
_LEAF_SEQUENCE = 2**63


class RunningLayer:
    """Layers by name, innermost first.

    In a backward pass a layer is told by the number of autograd's node, which counts up while the graph is made.

    Args:
        module: whose layers; its hooks are taken off by :meth:`watch`'s end.

    Attributes:
        phase: which part of the step runs.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._root = type(module).__name__
        self._names: Mapping[int, str] = {id(child): name for name, child in module.named_modules()}
        self._stack: list[str] = []
        self._marks: tuple[list[int], list[str]] = ([], [])  # sequence numbers at which the layer changed, and to what
        self._last_backward_layer = self._root
        self.phase = Phase.FORWARD

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Follow which layer runs, by hooks on the module's children."""
        with ExitStack() as hooks:
            for child in self._module.modules():
                if not isinstance(child, torch.jit.ScriptModule):  # it takes no hooks: its parent is counted
                    hooks.enter_context(child.register_forward_pre_hook(self._enter_layer))
                    hooks.enter_context(child.register_forward_hook(self._leave_layer, always_call=True))
            yield

    def _enter_layer(self, module: nn.Module, args: object) -> None:
        self._stack.append(self._names.get(id(module)) or self._root)
        self._mark()

    def _leave_layer(self, module: nn.Module, args: object, output: object) -> None:
        self._stack.pop()
        self._mark()

    def _mark(self) -> None:
        """Nodes of the graph are numbered as they are made: remember from which number on this layer makes them."""
        if self.phase is Phase.FORWARD:
            numbers, layers = self._marks
            numbers.append(next_sequence_number())
            layers.append(self._stack[-1] if self._stack else self._root)

    def name(self) -> str:
        """The name of the layer that runs, or whose backward pass does."""
        if self._stack or self.phase is not Phase.BACKWARD:
            return self._stack[-1] if self._stack else self._root
        node = current_node()
        numbers, layers = self._marks
        if node is not None and numbers:
            sequence = sequence_number(node)
            if sequence < _LEAF_SEQUENCE:
                place = bisect_right(numbers, sequence) - 1
                self._last_backward_layer = layers[place] if place >= 0 else self._root
        return self._last_backward_layer


# What one training step does to memory: every operation, and every storage with the operations it lives through.

FOREVER = 2**62


@dataclass
class TracedStorage:
    """One storage of the step.

    Attributes:
        nbytes: as the allocator rounds it.
        kind: what it holds.
        born: the operation that made it; -1: it was there before the step.
        dies: the last operation that it lives through; :data:`FOREVER`: it outlives the step.
        number: its number among the saved storages of its forward pass; None: no node saved it.
        forward_pass: which sub-batch saved it, from 0.
        restored: it holds the data of that saved storage, which came back from the host.
    """

    nbytes: int
    kind: BlockKind
    born: int
    dies: int = FOREVER
    number: int | None = None
    forward_pass: int = 0
    restored: bool = False


@dataclass(frozen=True)
class Operation:
    """One operation; storages by their index in the trace."""

    name: str
    layer: str
    phase: Phase
    reads: tuple[int, ...]
    writes: tuple[int, ...]

    @property
    def kind(self) -> tuple[Phase, str, str]:
        """Key of operations that are alike: of the same phase, layer and name."""
        return self.phase, self.layer, self.name


@dataclass
class Trace:
    """A traced step.

    Attributes:
        operations: in the order in which they ran.
        storages: by index.
        peak_bytes: the most that was held at once.
        peak_at: index of the operation during which that was; -1: before the first.
        update_peak_bytes: the most that was held during the update; 0 if none ran.
        saves: for each forward pass, by saved number: the operation after which it was first saved.
        parameters: so many of the first storages are parameters.
        starts: for each forward pass, its first operation.
    """

    operations: list[Operation] = field(default_factory=list)
    storages: list[TracedStorage] = field(default_factory=list)
    peak_bytes: int = 0
    peak_at: int = -1
    update_peak_bytes: int = 0
    saves: list[dict[int, int]] = field(default_factory=list)
    parameters: int = 0
    starts: list[int] = field(default_factory=list)

    @property
    def writes_parameters(self) -> bool:
        """Return whether forward or backward passes write into parameters, as a model that clamps its weights does."""
        return any(index < self.parameters for index in self._written())

    @property
    def writes_batch(self) -> bool:
        """Return whether forward or backward passes write into the batch that they are given."""
        return any(
            self.storages[index].kind is BlockKind.INPUT and self.storages[index].born < 0 for index in self._written()
        )

    def _written(self) -> Iterator[int]:
        for operation in self.operations:
            if operation.phase is not Phase.UPDATE:
                yield from operation.writes


# CUDA's caching allocator hands out multiples of so many bytes.
_CUDA_ROUNDING = 512


class Meter(Protocol):
    """Measures what an operation allocates for itself."""

    def before(self) -> None:
        """An operation begins."""

    def after(self, operation: Operation, new_bytes: int) -> None:
        """It has ended and left so many bytes of new storages."""


class Tracer(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts storages while it is entered; also the observer of an :class:`OffloadSavedTensors`.

    Args:
        module: gives operations their layers.
        meter: is told when operations begin and end.

    Attributes:
        layers: to be watched meanwhile, and told which part of the step runs.
        finished: to be set when the step has ended: what is there then outlives it.
    """

    def __init__(self, module: nn.Module, meter: Meter | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._meter = meter
        self.trace = Trace()
        self.current_bytes = 0
        self.layers = RunningLayer(module)
        self._live: dict[int, tuple[int, weakref.ref[torch.UntypedStorage]]] = {}
        self._inside_hook = 0
        self._running = False
        self.finished = False

    # ---- storages

    def add(self, tree: object, kind: BlockKind) -> None:
        """Count storages that exist before the step."""
        for tensor in tensors_in(tree):
            self._see(tensor, kind, born=-1)

    def mark(self, tensor: Tensor, kind: BlockKind) -> None:
        """Note what a storage that was seen turned out to hold."""
        for index in self._see(tensor, kind, self.now):
            self.trace.storages[index].kind = kind

    @property
    def now(self) -> int:
        """Index of the operation that runs, or of the next one."""
        return len(self.trace.operations)

    def index_of(self, storage: torch.UntypedStorage) -> int | None:
        """The storage's index in the trace, if it was seen."""
        live = self._live.get(storage_address(storage))
        return live[0] if live is not None else None

    def _see(self, tensor: Tensor, kind: BlockKind | None, born: int) -> tuple[int, ...]:
        """Indices of the storages behind a tensor; new ones are counted."""
        parts = [sparse_values(tensor), sparse_indices(tensor)] if tensor.layout == torch.sparse_coo else [tensor]
        indices = []
        for part in parts:
            try:
                storage = part.untyped_storage()
            except (NotImplementedError, RuntimeError):  # a subclass that wraps others, which come by themselves
                continue
            live = self._live.get(storage_address(storage))
            if live is None:
                live = self._count(storage, part.device, kind or self._kind(), born)
            indices.append(live[0])
        return tuple(indices)

    def _count(
        self, storage: torch.UntypedStorage, device: torch.device, kind: BlockKind, born: int
    ) -> tuple[int, weakref.ref[torch.UntypedStorage]]:
        nbytes = int(storage.nbytes())
        if device.type == "cuda":  # a fake storage says meta
            nbytes = -(-nbytes // _CUDA_ROUNDING) * _CUDA_ROUNDING
        index = len(self.trace.storages)
        self.trace.storages.append(TracedStorage(nbytes, kind, born))
        entry = index, weakref.ref(storage, partial(self._gone, storage_address(storage), index))
        self._live[storage_address(storage)] = entry
        self.current_bytes += nbytes
        if self.layers.phase is Phase.UPDATE:
            self.trace.update_peak_bytes = max(self.trace.update_peak_bytes, self.current_bytes)
        if self.current_bytes > self.trace.peak_bytes:
            self.trace.peak_bytes, self.trace.peak_at = self.current_bytes, self.now if born >= 0 else -1
        return entry

    def _gone(self, key: int, index: int, _: object) -> None:
        if self.finished:
            return
        if self._live.get(key, (-1,))[0] == index:
            del self._live[key]
        storage = self.trace.storages[index]
        storage.dies = self.now if self._running else self.now - 1
        self.current_bytes -= storage.nbytes

    def _kind(self) -> BlockKind:
        """In an update temporaries are made: states are there before the step."""
        return BlockKind.ACTIVATION if self.layers.phase is Phase.FORWARD else BlockKind.GRADIENT

    # ---- operations

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is LOCAL_SCALAR_DENSE and self._reads_value(args[0]):
            return 1.0 if args[0].dtype.is_floating_point else 1
        # A fake tensor is asked for its device; what comes back is told by restored(), and buffers on the host do not
        # count; a real tensor's value is read, as in no dry run.
        if func.namespace == "prim" or self._inside_hook or func is LOCAL_SCALAR_DENSE:
            return func(*args, **kwargs)
        layer = self.layers.name()
        seen = len(self.trace.storages)
        self._running = True
        if self._meter is not None:
            self._meter.before()
        try:
            out = func(*args, **kwargs)
            reads: dict[int, None] = {}
            for tensor in _operands((*args, *kwargs.values())):
                # One that nobody told of is a constant that the model holds beside its parameters and buffers.
                reads.update(dict.fromkeys(self._see(tensor, BlockKind.WEIGHT, born=-1)))
            writes: dict[int, None] = {}
            mutable = schema_of(func).is_mutable
            # Operations on lists write into the first of them and return nothing.
            changed = args[:1] if out is None and mutable else ()
            for tensor in _operands((out, changed)):
                before = len(self.trace.storages)
                seen_now = self._see(tensor, None, self.now)
                writes.update((index, None) for index in seen_now if mutable or index >= before)
        finally:
            self._running = False
        name = func.name().split("::")[-1]
        operation = Operation(name, layer, self.layers.phase, tuple(reads), tuple(writes))
        if self._meter is not None:
            self._meter.after(operation, sum(storage.nbytes for storage in self.trace.storages[seen:]))
        self.trace.operations.append(operation)
        return out

    def _reads_value(self, tensor: Tensor) -> bool:
        """Return whether the value is to be made up: an optimizer's step count says nothing about memory.

        Raises:
            ValueReadError: the model reads a fake tensor's value.
        """
        if type(tensor) is Tensor or type(tensor) is nn.Parameter:
            return False
        if self.layers.phase is Phase.UPDATE:
            return True
        raise ValueReadError(
            f"{self.layers.name()} reads the value of a tensor (item(), float(), bool() or the like) in its "
            f"{self.layers.phase}, which a dry run without values cannot follow"
        )

    # ---- the hooks of an OffloadSavedTensors

    @contextmanager
    def inside(self) -> Iterator[None]:
        self._inside_hook += 1
        try:
            yield
        finally:
            self._inside_hook -= 1

    def begin_pass(self) -> None:
        """The next forward pass begins: numbers of saved storages start again at 0."""
        self.trace.starts.append(self.now)
        self.trace.saves.append({})

    def saved(self, number: int, storage: torch.UntypedStorage) -> None:
        self.trace.saves[-1].setdefault(number, self.now)
        index = self.index_of(storage)
        if index is None:  # a constant that no operation has read yet: autograd saves before an operation runs
            index, _ = self._count(storage, storage.device, BlockKind.WEIGHT, born=-1)
        if self.trace.storages[index].number is None:
            self.trace.storages[index].number = number
            self.trace.storages[index].forward_pass = len(self.trace.saves) - 1

    def restored(self, number: int, storage: torch.UntypedStorage, device: torch.device) -> None:
        index, _ = self._count(storage, device, BlockKind.ACTIVATION, self.now)
        traced = self.trace.storages[index]
        traced.number, traced.restored, traced.forward_pass = number, True, len(self.trace.saves) - 1


def _operands(values: Sequence[Any]) -> Iterator[Tensor]:
    """Tensors among an operator's arguments or results, which may be lists."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _operands(value)
