"""What operations of torch's dispatcher do with memory, for the simulation of CUDA (``simulated_cuda.py``)."""

import contextlib
import ctypes
import functools
import sys
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.cuda._sanitizer import zip_arguments
from torch.utils._pytree import tree_leaves, tree_map

from retime.foundations.lazy_updates.pending import PendingParameter
from retime.foundations.torch_private.engine import without_dispatch_modes

OWN_FILES = (str(Path(torch.__file__).parent), str(Path(__file__).with_name("simulated_")), contextlib.__file__)

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
    home: Any
    pinned: bool = False
    storage: weakref.ref[torch.UntypedStorage] | None = None
    used_by: dict[Any, "Kernel"] = field(default_factory=dict)
    written_by: dict[Any, "Kernel"] = field(default_factory=dict)
    recorded: set[Any] = field(default_factory=set)
    pending: int = 0
    kept: bytearray | None = None

    def keep(self) -> None:
        """Copy the bytes: the storage is about to be freed."""
        self.kept = bytearray(ctypes.string_at(self.address, self.nbytes))

    def spoil(self) -> None:
        """Put into kept bytes what somebody else may have written there: not-a-numbers, or minus ones."""
        if self.kept is not None:
            self.kept[:] = b"\xff" * self.nbytes

    def view(self, like: "Form") -> Tensor:
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
_COPIES = ("aten::copy_", "aten::_to_copy")
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

    @property
    def holds_the_host_up(self) -> bool:
        """Whether the host waits for it: it asks for values, or copies to or from the host without ``non_blocking``."""
        if self.name not in _COPIES or self.kwargs.get("non_blocking") or self.args[2:3] == (True,):
            return self.sees_values
        return len({block.home is None for block in self.reads | self.writes}) == 2

    def run(self) -> Any:
        """Run it as torch does."""
        return self.func(*self.args, **self.kwargs)

    def kernel(
        self, forms: dict[int, "Form"], outputs: list[tuple[int, "Form"]], blocks: set[Block]
    ) -> Callable[[], None]:
        """What computes it later, from the bytes that are there then."""
        func = self.func
        args, kwargs = tree_map(functools.partial(put_form, forms), (self.args, self.kwargs))

        def run() -> None:
            with without_dispatch_modes(), torch.no_grad():
                computed = func(*tree_map(on_memory, args), **tree_map(on_memory, kwargs))
                values = [leaf for leaf in tree_leaves(computed) if isinstance(leaf, Tensor)]  # None: was not asked for
                for place, form in outputs:
                    form.block.view(form).copy_(values[place])
            for block in blocks:
                block.pending -= 1

        return run

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
        type(value) in (Tensor, nn.Parameter, PendingParameter)
        and value.device.type == "cpu"
        and value.layout is torch.strided
        and not value.is_conj()
        and not value.is_neg()
    )


def caller() -> str:
    """The line outside of torch and of this file that runs."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(OWN_FILES):
        frame = frame.f_back
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"


def form_of(tensor: Tensor, block: Block) -> Form:
    return Form(block, tensor.dtype, int(tensor.storage_offset()), tuple(tensor.shape), tuple(tensor.stride()))


def put_form(forms: dict[int, Form], leaf: Any) -> Any:
    return forms.get(id(leaf), leaf) if isinstance(leaf, Tensor) else leaf


def on_memory(leaf: Any) -> Any:
    return leaf.block.view(leaf) if isinstance(leaf, Form) else leaf
