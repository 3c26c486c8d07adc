"""A model that can be run without a trace: steps see copies of its tensors, and everything comes back afterwards."""

from __future__ import annotations

import argparse
import copy
import functools
import random
import sys
import types
from collections import deque
from collections.abc import Callable, Iterable, Iterator, MutableMapping
from contextlib import contextmanager, nullcontext
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from retime.foundations.messages import warn_difference
from retime.foundations.preserve_state.outside import LIBRARIES, GlobalsSnapshot, root_of
from retime.foundations.storages import has_storage, tensors_in
from retime.foundations.torch_private.engine import compiled_backends, stance_callback_replaced
from retime.foundations.torch_private.tensors import lazy_clone, version_of

# What modules hold beside one another: tensors and where they are, containers, random generators, arrays.
#
# One walk serves all that run a model without a trace: it finds what has to be noted so that it can be put back, and
# the places in which other tensors can stand in for a while.

_NOTHING_IN_IT = (bool, int, float, complex, str, bytes, type(None), range, slice, type, torch.dtype, torch.device)
_CODE = (types.FunctionType, types.BuiltinFunctionType, types.MethodType, types.ModuleType, torch.jit.ScriptFunction)
_OF_THREADS = {"threading", "_thread", "queue", "_queue", "multiprocessing", "concurrent", "asyncio", "subprocess"}
# A Trainer, say, goes on while a step is tried out; but a metric's state is the model's.
_FRAMEWORKS = LIBRARIES - {"torchmetrics"}
_PLAIN_ALL_THE_SAME = (types.SimpleNamespace, argparse.Namespace, torch.distributions.Distribution)


class Slots(MutableMapping[str, Any]):
    """The attributes that an object keeps in slots, as a mapping."""

    def __init__(self, owner: object, names: Iterable[str]) -> None:
        self._owner, self._names = owner, list(names)

    def __getitem__(self, name: str) -> Any:
        return getattr(self._owner, name)

    def __setitem__(self, name: str, value: Any) -> None:
        object.__setattr__(self._owner, name, value)  # frozen dataclasses too

    def __delitem__(self, name: str) -> None:
        object.__delattr__(self._owner, name)

    def __iter__(self) -> Iterator[str]:
        return (name for name in self._names if hasattr(self._owner, name))

    def __len__(self) -> int:
        return sum(1 for _ in self)


class ReachableState:
    """Everything that is found in modules' attributes: by itself, in dicts, lists, sets, deques, tuples and partials.

    So are the attributes of objects that are found there, but not of objects in these: one level deep. Modules are
    looked into wherever they are, as in a list that hides them from their parent. Left alone are optimizers, trainers
    and other objects of frameworks and of the standard library, and objects that share their state with threads.

    Args:
        modules: where to begin.

    Attributes:
        modules: these, and all that were found.
        containers: dicts, lists, sets, deques and :class:`Slots`; an object's ``__dict__`` is one.
        places: containers and keys at which there is a tensor, or a tuple or partial with one in it.
        generators: of random numbers, of torch, NumPy and Python.
        arrays: of NumPy.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self.modules: list[nn.Module] = []
        self.containers: list[Any] = []
        self.places: list[tuple[Any, Any]] = []
        self.generators: list[Any] = []
        self.arrays: list[Any] = []
        self._known: dict[int, Any] = {}  # by id, which must stay taken
        self._waiting: list[tuple[Any, bool]] = []
        for module in modules:
            self._known[id(module)] = module
            self._add_module(module)
        while self._waiting:
            self._look_into(*self._waiting.pop())
        self._known.clear()

    def _find(self, value: Any, in_object: bool) -> bool:
        """Note a value; whether another one must take its place when tensors are replaced."""
        if isinstance(value, _NOTHING_IN_IT):
            return False
        if isinstance(value, Tensor):
            return True
        if isinstance(value, tuple):
            return self._find_all(value, in_object) and _can_be_rebuilt(value)
        if type(value) is functools.partial:
            return self._find_all((*value.args, *value.keywords.values()), in_object)
        if id(value) not in self._known:
            self._known[id(value)] = value
            self._note(value, in_object)
        return False

    def _find_all(self, values: Iterable[Any], in_object: bool) -> bool:
        to_replace = [self._find(value, in_object) for value in values]  # all, even if the first one is a tensor
        return any(to_replace)

    def _note(self, value: Any, in_object: bool) -> None:
        numpy = sys.modules.get("numpy")
        if isinstance(value, nn.Module):
            if not isinstance(value, DistributedDataParallel):  # what it keeps is for communication
                self._add_module(value)
        elif isinstance(value, dict | list | set | deque):
            self._add(value, in_object)
        elif _is_generator(value):
            self.generators.append(value)
        elif numpy is not None and isinstance(value, numpy.ndarray):
            self.arrays.append(value)
        elif not in_object and _is_plain(value):
            for attributes in _attributes(value):
                self._add(attributes, in_object=True)

    def _add_module(self, module: nn.Module) -> None:
        self.modules.append(module)
        self._add(module.__dict__, in_object=False)

    def _add(self, container: Any, in_object: bool) -> None:
        self.containers.append(container)
        self._waiting.append((container, in_object))

    def _look_into(self, container: Any, in_object: bool) -> None:
        if isinstance(container, set):
            for value in container:
                self._find(value, in_object)
            return
        for key, value in container.items() if isinstance(container, dict | Slots) else enumerate(container):
            if self._find(value, in_object):
                self.places.append((container, key))


def replaced(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Replacement for what is at a place: a tensor, a tuple or a partial."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, tuple) and _can_be_rebuilt(value):
        children = [replaced(child, change) for child in value]
        return value._make(children) if hasattr(value, "_make") else tuple(children)
    if type(value) is functools.partial:
        named = {name: replaced(child, change) for name, child in value.keywords.items()}
        return functools.partial(value.func, *(replaced(child, change) for child in value.args), **named)
    return value


def _can_be_rebuilt(value: tuple[Any, ...]) -> bool:
    return type(value) is tuple or hasattr(value, "_make")


def _is_generator(value: Any) -> bool:
    if isinstance(value, torch.Generator | random.Random):
        return not isinstance(value, random.SystemRandom)  # it has no state
    numpy = sys.modules.get("numpy")
    kinds = () if numpy is None else (numpy.random.Generator, numpy.random.RandomState, numpy.random.BitGenerator)
    return isinstance(value, kinds)


def _is_plain(value: Any) -> bool:
    """Return whether an object's attributes are the model's own state."""
    if isinstance(value, _PLAIN_ALL_THE_SAME):
        return True
    if isinstance(value, (*_CODE, torch.optim.Optimizer)) or root_of(type(value)) in _FRAMEWORKS:
        return False
    values = (child for attributes in _attributes(value) for child in attributes.values())
    kinds = chain(type(value).__mro__, *(type(child).__mro__ for child in values))
    return all(root_of(kind) not in _OF_THREADS for kind in kinds)


def _attributes(value: Any) -> Iterator[Any]:
    named = getattr(value, "__dict__", None)
    if isinstance(named, dict):
        yield named
    declared = [kind.__dict__.get("__slots__", ()) for kind in type(value).__mro__]
    names = [name for slots in declared for name in ([slots] if isinstance(slots, str) else slots)]
    if names := [name for name in names if name not in ("__dict__", "__weakref__")]:
        yield Slots(value, names)


# What a model keeps beside its tensors, noted so that it can be put back.

_LARGE_ARRAY = 2**20
"""NumPy arrays of more bytes are taken for data, which no step writes into."""


class Snapshot:
    """Content of containers when they were saved, states of random generators, and entries of small arrays.

    The containers, generators and arrays themselves stay the same objects. What nothing has changed is not touched.
    """

    def __init__(self) -> None:
        self._containers: dict[int, tuple[Any, Any]] = {}
        self._restore: list[Callable[[], object]] = []

    def save(self, container: Any) -> None:
        """Save what a dict, list, set, deque or :class:`Slots` holds now; nothing if it was saved before."""
        if id(container) not in self._containers:
            content = dict(container) if isinstance(container, dict | Slots) else list(container)
            self._containers[id(container)] = container, content

    def save_all(self, reachable: ReachableState) -> None:
        """Everything but tensors."""
        for container in reachable.containers:
            self.save(container)
        self._restore += map(_put_back_generator, reachable.generators)
        self._restore += [_put_back_array(array) for array in reachable.arrays if array.nbytes <= _LARGE_ARRAY]

    def put_back(self) -> None:
        """All is again as it was."""
        for container, content in self._containers.values():
            if isinstance(container, dict | Slots):
                _put_back_items(container, content)
            elif not _same(container, content):
                container.clear()
                if isinstance(container, list | deque):
                    container.extend(content)
                else:
                    container.update(content)
        for restore in self._restore:
            restore()


def _put_back_items(container: Any, content: dict[Any, Any]) -> None:
    """Never empty on the way: attributes may be asked for by another thread."""
    for key in [key for key in container if key not in content]:
        del container[key]
    for key, value in content.items():
        if key not in container or container[key] is not value:
            container[key] = value
    if isinstance(container, dict) and not _same(container, content):  # another order
        for key, value in content.items():
            del container[key]
            container[key] = value


def _same(container: Any, content: Any) -> bool:
    """The same objects in the same order; ``==`` would compare the entries of tensors."""
    return len(container) == len(content) and all(one is two for one, two in zip(container, content, strict=True))


def _put_back_generator(generator: Any) -> Callable[[], object]:
    if isinstance(generator, torch.Generator):
        return partial(generator.set_state, generator.get_state())
    if isinstance(generator, random.Random):
        return partial(generator.setstate, generator.getstate())
    if hasattr(generator, "set_state"):
        return partial(generator.set_state, copy.deepcopy(generator.get_state()))
    source = getattr(generator, "bit_generator", generator)
    return partial(setattr, source, "state", copy.deepcopy(source.state))


def _put_back_array(array: Any) -> Callable[[], None]:
    before = array.copy()

    def restore() -> None:
        if array.flags.writeable and array.tobytes() != before.tobytes():
            array[...] = before

    return restore


class SavedState:
    """State that a model's modules hold beside tensors, and the global random generators, to be put back after a run.

    Saved are all attributes of all modules, with what dicts, lists, sets and deques in them hold, the attributes of
    objects in them, small NumPy arrays and random generators that they keep (see `ReachableState`), and the global
    generators of torch, Python and NumPy.

    Args:
        model: that is about to run.
        step: what will run: names outside of the model that it binds anew are bound as they were again, too.
        tensors: these are copied, and get their values back, too. Where there are none, the run is to be on stand-ins,
            or must replace a tensor in an attribute (a metric's state) and not write into it.

    It is a context manager too, around one run or one after the other, each of which begins with what was saved.

    Attributes:
        reachable: where the model's tensors are.
        names: that the step binds.
    """

    def __init__(
        self, model: nn.Module, step: Callable[[Any], Any] | None = None, *, tensors: Iterable[Tensor] = ()
    ) -> None:
        self._random = random_state()
        self.reachable = ReachableState(model.modules())
        self.names = None if step is None else GlobalsSnapshot(step, model)
        self._snapshot = Snapshot()
        self._snapshot.save_all(self.reachable)
        self._values = [
            (tensor, version_of(tensor), tensor.detach().clone())
            for tensor in tensors
            if not tensor.is_inference()  # those cannot be written into
        ]

    def __enter__(self) -> None:
        """Nothing: it was saved when this was made."""

    def __exit__(self, *failure: object) -> None:
        self.put_back()

    def put_back(self) -> None:
        """All is as it was when this was made; what has not changed is not touched."""
        set_random_state(self._random)
        self._snapshot.put_back()
        if self.names is not None:
            self.names.put_back()
        with torch.no_grad():
            for tensor, version, value in self._values:
                # Batch norm's kernels write into running statistics without a new version.
                unversioned = tensor.layout == torch.strided and not torch.equal(tensor, value)
                if version_of(tensor) != version or unversioned:
                    tensor.copy_(value)


preserve_state = SavedState
"""Save the state now, and put it back at the end of a context."""


def reachable_tensors(model: nn.Module, batch: Any, *, parameters: bool = True) -> list[Tensor]:
    """Return each tensor of a model, beside its parameters and buffers too, and of a batch.

    Args:
        model, batch: whose tensors.
        parameters: whether the model's parameters are among them.
    """
    tensors: list[Tensor] = [*model.parameters(), *model.buffers(), *tensors_in(batch)]

    def note(tensor: Tensor) -> Tensor:
        tensors.append(tensor)
        return tensor

    for container, key in ReachableState(model.modules()).places:
        replaced(container[key], note)
    left_out = set() if parameters else {id(parameter) for parameter in model.parameters()}
    return list({id(tensor): tensor for tensor in tensors if id(tensor) not in left_out}.values())


# Copies that take memory only once they are written into.

LARGE_BYTES = 2**20
"""A model's tables and masks may be as large as the model; its counters and sums are small."""


def lazy_copy(tensor: Tensor) -> Tensor:
    """The same values for whoever may write into them; a large tensor shares its memory until somebody does."""
    tensor = tensor.detach()
    if type(tensor) in (Tensor, nn.Parameter) and has_storage(tensor) and tensor.nbytes > LARGE_BYTES:
        try:
            return lazy_clone(tensor)
        except RuntimeError:  # memory that is not torch's own: NumPy's, say, or a file's
            pass
    return tensor.clone()


# Torch's own random generators.


def cuda_generators() -> list[torch.Generator]:
    """One a device, once CUDA is in use; asking before would start it."""
    return list(torch.cuda.default_generators) if torch.cuda.is_initialized() else []  # type: ignore[no-untyped-call]


def seed_torch(seed: int) -> None:
    """Seed torch's generators for processors and CUDA devices, as ``torch.manual_seed`` does.

    Before CUDA is in use that one formats the call stack at each call, which takes about a millisecond.
    """
    torch.default_generator.manual_seed(seed)
    for generator in cuda_generators():
        generator.manual_seed(seed)


# Code under ``torch.compile`` runs as it was written, where compiled code would be lost or is not what was planned.
#
# Under a mode that sees each operation, as in a dry run, ``torch.compile`` gives a function up for good; and what
# compiled code saves for its backward pass is none of what a plan was made for.


def nothing_compiled() -> bool:
    """Return whether this process has put nothing under ``torch.compile`` so far."""
    return all(backend is None for backend in compiled_backends().values())  # None: torch.compiler.disable's


@contextmanager
def uncompiled(met: Callable[[], object] | None = None) -> Iterator[None]:
    """Nothing is compiled and nothing compiled runs; ``torch.compile``'s caches stay as they are.

    Args:
        met: called whenever something would have run compiled.
    """

    def noting(chosen: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def choose(callback: Any) -> Any:
            if met is not None and callback not in (None, False):  # torch.compiler.disable has these two
                met()
            return chosen(callback)

        return choose

    with torch.compiler.set_stance("force_eager"), nullcontext() if met is None else stance_callback_replaced(noting):
        yield


class CompiledCode:
    """Guard of the compiled code of a training step: where it runs, and the warning where it does not."""

    def __init__(self) -> None:
        self._met = self._warned = self._ran = False

    @contextmanager
    def looked_for(self) -> Iterator[None]:
        """Around runs of the step that only try something out; what they themselves compile, its first pass tells."""
        with uncompiled(None if nothing_compiled() else self._note):
            yield

    @contextmanager
    def under(self, plain: bool) -> Iterator[None]:
        """Around a forward or backward pass: plain ones run compiled code, all others warn once that they do not."""
        if plain:
            yield
            return
        self.warn()
        settled, self._ran = self._ran and nothing_compiled(), True
        with torch.compiler.set_stance("force_eager") if settled else uncompiled(self._note):
            yield
        self.warn()  # code that no dry run has met

    def warn(self) -> None:
        """Once, if there is compiled code."""
        if self._met and not self._warned:
            self._warned = True
            warn_difference(
                "code under torch.compile runs uncompiled in steps that the budget splits or offloads: a plan cannot "
                "know what compiled code saves for its backward pass. So weights are those of the uncompiled model, "
                "which rounds differently. Give a budget that the plain step fits into, or leave out torch.compile"
            )

    def _note(self) -> None:
        self._met = True


def seed_all(seed: int = 0) -> None:
    """Put torch's, Python's and NumPy's global generators at one fixed state."""
    seed_torch(seed)
    random.seed(seed)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(seed % 2**32)


def random_state() -> list[Any]:
    """States of torch's, Python's and NumPy's global generators."""
    cuda = [generator.get_state() for generator in cuda_generators()]
    numpy = sys.modules.get("numpy")
    legacy = copy.deepcopy(numpy.random.get_state()) if numpy is not None else None
    return [torch.default_generator.get_state(), cuda, random.getstate(), legacy]


def set_random_state(state: list[Any]) -> None:
    """Put them back."""
    torch.default_generator.set_state(state[0])
    for generator, saved in zip(cuda_generators(), state[1], strict=False):
        generator.set_state(saved)
    random.setstate(state[2])
    if state[3] is not None:
        sys.modules["numpy"].random.set_state(state[3])
