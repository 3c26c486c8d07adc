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
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy

from retime.foundations.messages import warn_difference
from retime.foundations.preserve_state.outside import ExternalTensors, GlobalsSnapshot
from retime.foundations.storages import has_storage
from retime.foundations.torch_private import (
    compiled_backends,
    lazy_clone,
    stance_callback_replaced,
    tensor_hooks,
    version_of,
)

# What modules hold beside one another: tensors and where they are, containers, random generators, arrays.
#
# One walk serves all that run a model without a trace: it finds what has to be noted so that it can be put back, and
# the places in which other tensors can stand in for a while.

_NOTHING_IN_IT = (bool, int, float, complex, str, bytes, type(None), range, slice, type, torch.dtype, torch.device)
_CODE = (
    types.FunctionType,
    types.BuiltinFunctionType,
    types.MethodType,
    types.ModuleType,
    torch.jit.ScriptFunction,
)
_OF_THREADS = {"threading", "_thread", "queue", "_queue", "multiprocessing", "concurrent", "asyncio", "subprocess"}
# What these keep is their own affair; a Trainer, say, goes on while a step is tried out.
_FRAMEWORKS = {*sys.stdlib_module_names, "torch", "lightning", "pytorch_lightning", "lightning_fabric", "accelerate"}
_FRAMEWORKS |= {"retime", "numpy"}
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
    """What is to be at a place instead: a tensor, a tuple or a partial."""
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
    """Whether an object's attributes are the model's own state."""
    if isinstance(value, _PLAIN_ALL_THE_SAME):
        return True
    if isinstance(value, (*_CODE, torch.optim.Optimizer)) or _root(type(value)) in _FRAMEWORKS:
        return False
    values = (child for attributes in _attributes(value) for child in attributes.values())
    kinds = chain(type(value).__mro__, *(type(child).__mro__ for child in values))
    return all(_root(kind) not in _OF_THREADS for kind in kinds)


def _root(kind: type) -> str:
    return str(kind.__module__).partition(".")[0]


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
    """What containers held when they were saved, states of random generators, and entries of small arrays.

    The containers, generators and arrays themselves stay the same objects. What nothing has changed is not touched.
    """

    def __init__(self) -> None:
        self._containers: dict[int, tuple[Any, Any]] = {}
        self._restore: list[Callable[[], object]] = []

    def save(self, container: Any) -> None:
        """What a dict, list, set, deque or :class:`Slots` holds now; nothing if it was saved before."""
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
        """All is again as it was, and nothing is saved any more."""
        for container, content in self._containers.values():
            if isinstance(container, dict | Slots):
                _put_back_items(container, content)
            elif not _same(container, content):
                container.clear()
                if isinstance(container, list | deque):
                    container.extend(content)
                else:
                    container.update(content)
        self._containers.clear()
        for restore in self._restore:
            restore()
        self._restore.clear()


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
    """Whether this process has put nothing under ``torch.compile`` so far."""
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
    """Where the compiled code of a training step runs, and the warning where it does not."""

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
                "code under torch.compile runs uncompiled in steps that the budget splits or offloads: what it saves "
                "for its backward pass is not known to a plan. So weights are the uncompiled model's, and differ from "
                "the compiled one's as far as compiling rounds differently. Give a budget that the plain step fits "
                "into, or leave out torch.compile"
            )

    def _note(self) -> None:
        self._met = True


class Untouched:
    """While open, a model's modules hold copies of all their tensors; closing puts the originals back.

    ::

        with Untouched(model, torch.float64) as scratch:
            loss = step(batch)                 # reads and writes copies
            scratch.restart()                  # as if that had not been

    Copied are parameters, buffers and tensors in attributes (states of metrics), wherever
    `ReachableState` finds them; containers get back what they held. Tied parameters
    stay tied. All other attributes, such as ``training``, and the states of random generators (the modules' own, and
    the global ones of torch on CPU and CUDA, Python, NumPy) come back as well. The originals are never written, their
    ``.grad`` is left alone and no hook of theirs that fires in a backward pass does; hooks on gradients
    (``Tensor.register_hook``) come along to the copies, as they are a part of the computation. Code under
    ``torch.compile`` runs uncompiled.

    So do tensors and generators that the step reaches in other ways, see
    `ExternalTensors`. What else a step changes outside of the model is its caller's to
    bring back.

    Args:
        dtype: floating-point type of the copies; None leaves each as it is.
        prepare: changes the modules' attributes after each restart; they come back as all others do.
        read_only: copies of parameters share their memory, where ``dtype`` is None: for steps that are known not to
            write into them.
        step: what will run: names outside of the model that it binds anew are bound as they were again, too.

    Raises:
        ValueError: a lazy module has no weights yet, or a module's tensors cannot be replaced.
    """

    def __init__(
        self,
        model: nn.Module,
        dtype: torch.dtype | None = None,
        prepare: Callable[[], None] | None = None,
        *,
        read_only: bool = False,
        step: Callable[[Any], Any] | None = None,
    ) -> None:
        lazy = [name for name, parameter in model.named_parameters() if is_lazy(parameter)]
        if lazy:
            raise ValueError(f"parameter {lazy[0]} has no shape yet: run the model once before it is probed")
        if reason := why_not_replaced(model):
            raise ValueError(reason)
        self._model = model
        self._dtype, self._prepare = dtype, prepare
        self._read_only = read_only and dtype is None
        self._names = None if step is None else GlobalsSnapshot(step, model)
        self._snapshot = Snapshot()
        self._copies: dict[int, tuple[Tensor, Tensor, int]] = {}
        self._named = [*model.named_parameters(), *model.named_buffers()]
        self._registered = {id(tensor) for _, tensor in self._named}
        self._random: list[Any] = []
        self._outside, self._around = ExternalTensors(), ExitStack()

    def __enter__(self) -> Untouched:
        self._random = random_state()
        self._around.enter_context(uncompiled())
        self._around.enter_context(self._outside.put_back_after())
        try:
            self._swap()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._put_back()
        self._around.close()
        set_random_state(self._random)

    def restart(self) -> None:
        """Begin anew: fresh copies, and all random generators at the same seed."""
        self._put_back()
        self._swap()

    def parameters(self) -> list[tuple[str, Tensor, Tensor]]:
        """Name, original and copy of the parameters that need a gradient."""
        named = ((name, tensor) for name, tensor in self._model_parameters() if tensor.requires_grad)
        return [(name, tensor, self._copies[id(tensor)][1]) for name, tensor in named]

    def changed(self) -> dict[str, Tensor]:
        """The parameters and buffers that a step has written or replaced since the last restart, by name."""
        now = {**dict(self._model.named_parameters()), **dict(self._model.named_buffers())}
        changed = {}
        for name, original in self._named:
            _, twin, version = self._copies[id(original)]
            present = now.get(name, twin)
            if present is not twin or version_of(twin) != version:
                changed[name] = present.detach().clone()
        return changed

    def numbers(self) -> dict[tuple[int, str], float]:
        """What modules' attributes, and names that the step binds, are now if they are numbers."""
        numbers = {} if self._names is None else self._names.numbers()
        for module in self._model.modules():
            named = vars(module).items()
            numbers |= {(id(module), name): value for name, value in named if type(value) in (int, float)}
        return numbers

    def bind(self, key: tuple[int, str], value: float) -> None:
        """Another number there, until the next restart."""
        module = next((one for one in self._model.modules() if id(one) == key[0]), None)
        if module is not None:
            module.__dict__[key[1]] = value
        elif self._names is not None:
            self._names.bind(key, value)

    def _model_parameters(self) -> list[tuple[str, Tensor]]:
        return [(name, tensor) for name, tensor in self._named if isinstance(tensor, nn.Parameter)]

    def _swap(self) -> None:
        seed_all()
        self._outside.begin()
        reachable = ReachableState(self._model.modules())
        self._snapshot.save_all(reachable)
        for container, key in reachable.places:
            container[key] = replaced(container[key], self._copy)
        for module in reachable.modules:
            if isinstance(module, nn.RNNBase):
                module.__dict__["dropout"] = 0.0
        if self._prepare is not None:
            self._prepare()

    def _put_back(self) -> None:
        self._snapshot.put_back()
        if self._names is not None:
            self._names.put_back()
        self._outside.put_back()
        self._copies.clear()

    def _copy(self, tensor: Tensor) -> Tensor:
        if id(tensor) in self._copies:
            return self._copies[id(tensor)][1]
        dtype = self._dtype if tensor.is_floating_point() else None
        shared = self._read_only and isinstance(tensor, nn.Parameter)
        if shared:
            twin = tensor.detach()
        elif dtype is None and id(tensor) not in self._registered:
            twin = lazy_copy(tensor)
        else:
            twin = tensor.detach().to(dtype=dtype, copy=True)
        if isinstance(tensor, nn.Parameter):
            twin = nn.Parameter(twin, requires_grad=tensor.requires_grad)
            twin.__dict__.update(tensor.__dict__)
        elif tensor.is_leaf and tensor.requires_grad:
            twin.requires_grad_()
        hooks = tensor_hooks(tensor) if tensor.is_leaf else None
        for hook in (hooks or {}).values():
            twin.register_hook(hook)  # type: ignore[no-untyped-call]
        self._copies[id(tensor)] = (tensor, twin, version_of(twin))
        return twin


def why_not_replaced(model: nn.Module) -> str:
    """Which module keeps its parameters or buffers where others cannot be put in their place; empty if none does."""
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule) and any(True for _ in (*module.parameters(), *module.buffers())):
            return f"{name or 'the model itself'} is a TorchScript module, whose parameters cannot be stood in for"
    reachable = ReachableState(model.modules())
    replaceable = {id(container[key]) for container, key in reachable.places}
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if id(tensor) not in replaceable:
            return f"{name} is not where modules keep their parameters and buffers, so nothing can stand in for it"
    return ""


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
