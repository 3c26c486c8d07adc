"""A model that can be run without a trace: steps see copies of its tensors, and everything comes back afterwards."""

from __future__ import annotations

import copy
import random
import sys
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from retime.foundations.preserve_state.bound_names import BoundNames
from retime.foundations.preserve_state.generators import cuda_generators, seed_torch
from retime.foundations.preserve_state.lazy_copy import lazy_copy
from retime.foundations.preserve_state.outside import Outside
from retime.foundations.preserve_state.reachable_state import ReachableState, replaced
from retime.foundations.preserve_state.snapshot import Snapshot
from retime.foundations.preserve_state.uncompiled import uncompiled
from retime.foundations.torch_private import tensor_hooks, version_of

__all__ = ["Untouched", "random_state", "set_random_state", "why_not_replaced"]


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
    `Outside`. What else a step changes outside of the model is its caller's to
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
        self._names = None if step is None else BoundNames(step, model)
        self._snapshot = Snapshot()
        self._copies: dict[int, tuple[Tensor, Tensor, int]] = {}
        self._named = [*model.named_parameters(), *model.named_buffers()]
        self._registered = {id(tensor) for _, tensor in self._named}
        self._random: list[Any] = []
        self._outside, self._around = Outside(), ExitStack()

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
        found = {}
        for name, original in self._named:
            _, made, version = self._copies[id(original)]
            present = now.get(name, made)
            if present is not made or version_of(made) != version:
                found[name] = present.detach().clone()
        return found

    def numbers(self) -> dict[tuple[int, str], float]:
        """What modules' attributes, and names that the step binds, are now if they are numbers."""
        found = {} if self._names is None else self._names.numbers()
        for module in self._model.modules():
            found |= {(id(module), name): value for name, value in vars(module).items() if type(value) in (int, float)}
        return found

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
            made = tensor.detach()
        elif dtype is None and id(tensor) not in self._registered:
            made = lazy_copy(tensor)
        else:
            made = tensor.detach().to(dtype=dtype, copy=True)
        if isinstance(tensor, nn.Parameter):
            made = nn.Parameter(made, requires_grad=tensor.requires_grad)
            made.__dict__.update(tensor.__dict__)
        elif tensor.is_leaf and tensor.requires_grad:
            made.requires_grad_()
        hooks = tensor_hooks(tensor) if tensor.is_leaf else None
        for hook in (hooks or {}).values():
            made.register_hook(hook)  # type: ignore[no-untyped-call]
        self._copies[id(tensor)] = (tensor, made, version_of(made))
        return made


def why_not_replaced(model: nn.Module) -> str:
    """Which module keeps its parameters or buffers where others cannot be put in their place; empty if none does."""
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule) and any(True for _ in (*module.parameters(), *module.buffers())):
            return f"{name or 'the model itself'} is a TorchScript module, whose parameters cannot be stood in for"
    found = ReachableState(model.modules())
    held = {id(container[key]) for container, key in found.places}
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if id(tensor) not in held:
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
