"""Other tensors in the places of a model's, for a while: fake ones for a dry run, copies for a run that must not count.

What a run leaves in the modules, one that was stopped half-way too, is taken away again.

The tensors are swapped in the module itself, so that whatever closes over it (a loss function, a Trainer) runs on the
stand-ins too, and nothing has to be copied that cannot be.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from retime.foundations.parts import replaced_tensors
from retime.foundations.preserve_state.outside import ExternalTensors
from retime.foundations.preserve_state.state import (
    ReachableState,
    SavedState,
    Slots,
    Snapshot,
    lazy_copy,
    replaced,
    seed_all,
    uncompiled,
)
from retime.foundations.torch_private.engine import FakeTensor, FakeTensorMode, tree_map
from retime.foundations.torch_private.nn_and_optim import STEP_HOOKS
from retime.foundations.torch_private.tensors import tensor_hooks, version_of

# Fake tensors that are of use in dry runs alone: one that a step has left in a variable is told from a real one.


class LeftBehindError(RuntimeError):
    """A step goes on with a tensor that a dry run of it has left behind, which has no values."""


class DryMode(FakeTensorMode):  # type: ignore[no-untyped-call]
    """Fake tensors, which can be computed with until :meth:`open` has ended, and in it again.

    What modules hold comes back after a dry run. A global variable or an attribute of some other object that a step
    binds anew, or a list there that it appends to, does not; a fake tensor there would make losses fake, and training
    would go on without a gradient.
    """

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True)

    @contextmanager
    def open(self) -> Iterator[None]:
        """Around all that a dry run does; afterwards whatever computes on a tensor of it raises LeftBehindError."""
        self.__class__ = DryMode  # as it is: each operation comes by here
        try:
            yield
        finally:
            self.__class__ = _Over


class _Over(DryMode):  # type: ignore[no-untyped-call]
    def __torch_dispatch__(self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        raise LeftBehindError(
            f"{func.name()} is given a tensor without values, which a dry run of the step has left in a variable "
            "that is no part of the model: a global one, or an attribute of some other object. Keep it in an "
            "attribute of the model, which planning puts back, write into one tensor in place, or give "
            "dry_run='off', which never calls the step more often than training does"
        )


class Replacement:
    """The same stand-in for the same tensor, wherever it is found.

    Args:
        convert: makes one for a parameter, a buffer, or a tensor of a batch or of an optimizer's state.
        convert_other: makes one for any other tensor that modules hold.

    Attributes:
        stand_ins: all so far.
    """

    def __init__(self, convert: Callable[[Tensor], Tensor], convert_other: Callable[[Tensor], Tensor]) -> None:
        self._convert, self._held = convert, convert_other
        self._known: dict[int, Tensor] = {}
        self._originals: list[Tensor] = []  # their ids must stay taken
        self.stand_ins: list[Tensor] = []
        self._reachable: tuple[nn.Module, ReachableState] | None = None

    def of(self, tensor: Tensor) -> Tensor:
        """Stand-in for a parameter, a buffer, or a tensor of a batch or of an optimizer's state."""
        return self._of(tensor, self._convert)

    def at(self, place: Any) -> Any:
        """Stand-in for a tensor that modules hold, or for a tuple or a partial with some."""
        stand_in = self._known.get(id(place))  # this is done before every run that is timed
        return stand_in if stand_in is not None else replaced(place, lambda tensor: self._of(tensor, self._held))

    def tree(self, tree: Any) -> Any:
        """A state with all its tensors replaced."""
        return tree_map(lambda leaf: self.of(leaf) if isinstance(leaf, Tensor) else leaf, tree)

    def batch(self, batch: Any) -> Any:
        """A batch with all its tensors replaced, which a step may write into."""
        return replaced_tensors(batch, self.of)

    def reachable(self, module: nn.Module) -> ReachableState:
        """State that ``module`` holds, looked for once; from then on its parameters and buffers have stand-ins."""
        if self._reachable is None or self._reachable[0] is not module:
            reachable = ReachableState(module.modules())
            for tensor in scripted(reachable):  # TorchScript keeps them where Python cannot put others
                self._of(tensor, lambda same: same)
            for tensor in (*module.parameters(), *module.buffers()):
                self.of(tensor)
            for container, key in reachable.places:
                self.at(container[key])
            self._reachable = module, reachable
        return self._reachable[1]

    def trained(self) -> list[Tensor]:
        """Originals that a backward pass could give a gradient to."""
        return [tensor for tensor in self._originals if _is_trained(tensor)]

    def forget_gradients(self) -> None:
        """No stand-in has a gradient any more."""
        for tensor in self.stand_ins:
            if _is_trained(tensor):
                tensor.grad = None

    def _of(self, tensor: Tensor, make: Callable[[Tensor], Tensor]) -> Tensor:
        if id(tensor) not in self._known:
            stand_in = self._known[id(tensor)] = make(tensor)
            self._originals.append(tensor)
            if stand_in is not tensor:
                stand_in.grad = None
                self._known[id(stand_in)] = stand_in  # it is found again where optimizers share lists with modules
                self.stand_ins.append(stand_in)
        return self._known[id(tensor)]


def fake(mode: FakeTensorMode) -> Replacement:
    """Stand-ins without data, of the same sizes, on the same device.

    Tensors that are neither trained nor buffers are copied, as what has nothing to do with fake tensors is really
    computed: a count of calls, say.
    """

    def convert(tensor: Tensor) -> Tensor:
        return mode.from_tensor(tensor if tensor.is_leaf else tensor.detach(), static_shapes=True)

    def held(tensor: Tensor) -> Tensor:
        if isinstance(tensor, nn.Parameter) or _is_trained(tensor):
            return convert(tensor)
        return _held_copy(tensor)

    return Replacement(convert, held)


def copies() -> Replacement:
    """Stand-ins with the same values."""
    return Replacement(lambda tensor: _twin(tensor, tensor.detach().clone()), _held_copy)


def aliases() -> Replacement:
    """Stand-ins with the same values; parameters share their memory, and have gradients of their own."""
    rest = copies()

    def alias(tensor: Tensor) -> Tensor:
        if isinstance(tensor, nn.Parameter):
            return nn.Parameter(tensor.detach(), requires_grad=tensor.requires_grad)
        return rest.of(tensor)

    return Replacement(alias, _held_copy)


def _twin(tensor: Tensor, twin: Tensor) -> Tensor:
    """A copy made the same kind of tensor as the original."""
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(twin, requires_grad=tensor.requires_grad)
    return twin.requires_grad_(tensor.requires_grad) if tensor.is_leaf else twin


def _held_copy(tensor: Tensor) -> Tensor:
    """A tensor with a history stands in without, but asks for a gradient all the same."""
    if isinstance(tensor, FakeTensor) or (not isinstance(tensor, nn.Parameter) and type(tensor) is not Tensor):
        return tensor  # one that an earlier dry run has left; or of a subclass that may not know how to be copied
    return _twin(tensor, lazy_copy(tensor)).requires_grad_(tensor.requires_grad)


@contextmanager
def stand_ins(module: nn.Module, replacement: Replacement, trained: Iterable[Tensor] = ()) -> Iterator[None]:
    """Tensors that ``module`` holds, in any way that can be seen, are replaced; at the end the originals are back.

    A step can still reach originals, through a closure, say. So the gradients of all that could get one are put aside
    for that time, and what TorchScript modules hold, which cannot be replaced, gets back its values.

    Args:
        module: whose tensors are to be replaced.
        replacement: by what.
        trained: what else a backward pass may give a gradient to, such as parameters of a loss.
    """
    reachable = replacement.reachable(module)
    beside = [*trained, *replacement.trained()]
    with _gradients_put_aside(beside), _values_kept(scripted(reachable)), uncompiled():
        try:
            with _swapped(reachable, replacement):
                yield
        finally:
            replacement.forget_gradients()


@contextmanager
def _swapped(reachable: ReachableState, replacement: Replacement) -> Iterator[None]:
    lists = Snapshot()  # a step may take something out, so that places in them are others afterwards
    before: list[tuple[Any, Any, Any]] = []
    try:
        for container, key in reachable.places:
            if not isinstance(container, dict | Slots):
                lists.save(container)
            if _has(container, key):
                value = container[key]
                before.append((container, key, value))
                container[key] = replacement.at(value)
        yield
    finally:
        for container, key, value in before:
            if isinstance(container, dict | Slots):
                container[key] = value
        lists.put_back()


def _has(container: Any, key: Any) -> bool:
    return key in container if isinstance(container, dict | Slots) else key < len(container)


@contextmanager
def _gradients_put_aside(tensors: Iterable[Tensor]) -> Iterator[None]:
    before = {id(tensor): (tensor, tensor.grad) for tensor in tensors}
    try:
        for tensor, _ in before.values():
            tensor.grad = None
        yield
    finally:
        for tensor, gradient in before.values():
            tensor.grad = gradient


@contextmanager
def _values_kept(tensors: Iterable[Tensor]) -> Iterator[None]:
    before = [(tensor, lazy_copy(tensor), version_of(tensor)) for tensor in tensors]
    try:
        yield
    finally:
        for tensor, value, version in before:
            # Kernels of BatchNorm do not say that they write into buffers, which are small.
            if version_of(tensor) != version or not isinstance(tensor, nn.Parameter):
                tensor.data.copy_(value)


def scripted(reachable: ReachableState) -> list[Tensor]:
    """Parameters and buffers of TorchScript modules."""
    modules = [module for module in reachable.modules if isinstance(module, torch.jit.ScriptModule)]
    return [tensor for module in modules for tensor in (*module.parameters(), *module.buffers())]


def _is_trained(tensor: Tensor) -> bool:
    return tensor.is_leaf and tensor.requires_grad


def stand_in_optimizer(optimizer: torch.optim.Optimizer, replacement: Replacement) -> torch.optim.Optimizer:
    """An optimizer of the same kind and settings over the stand-ins, without hooks or a scheduler's wrapper."""
    twin: torch.optim.Optimizer = object.__new__(type(optimizer))
    twin.__dict__.update(optimizer.__dict__)
    twin.__dict__.pop("step", None)  # schedulers put a counting wrapper there, bound to the original
    for name in STEP_HOOKS:
        twin.__dict__[name] = OrderedDict()
    twin.param_groups = [
        {key: replacement.tree(value) for key, value in group.items()} for group in optimizer.param_groups
    ]
    states = {replacement.of(parameter): replacement.tree(state) for parameter, state in optimizer.state.items()}
    twin.state = defaultdict(dict, states)
    return twin


def _is_unlike(tensor: Tensor, original: Tensor) -> bool:
    """Return whether it was written behind its version number, by `.data`; none that is trained is looked at."""
    looked_at = tensor.layout == torch.strided and tensor.is_floating_point() and not tensor.requires_grad
    if not looked_at or tensor.device.type == "meta" or tensor.shape != original.shape:
        return bool(tensor.shape != original.shape)
    return not torch.allclose(tensor, original.to(tensor.dtype), 0, 0, equal_nan=True)


class ScratchModel:
    """While open, a model's modules hold copies of all their tensors; closing puts the originals back.

    ::

        with ScratchModel(model, torch.float64) as scratch:
            loss = step(batch)                 # reads and writes copies
            scratch.restart()                  # as if that had not been

    Copied are parameters, buffers and tensors in attributes (states of metrics), wherever `ReachableState` finds them.
    Tied parameters stay tied. All else that :class:`SavedState` saves comes back too. The originals are never written,
    their ``.grad`` is left alone and no hook of theirs that fires in a backward pass does; hooks on gradients
    (``Tensor.register_hook``) come along to the copies, as they are a part of the computation. Code under
    ``torch.compile`` runs uncompiled.

    Tensors and generators that the step reaches in other ways come back, see `ExternalTensors`. What else a step
    changes outside of the model is its caller's to bring back.

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
        self._saved = SavedState(model, step)
        if reason := why_not_replaced(model, self._saved.reachable):
            raise ValueError(reason)
        self._model = model
        self._dtype, self._prepare = dtype, prepare
        self._read_only = read_only and dtype is None
        self._copies: dict[int, tuple[Tensor, Tensor, int]] = {}
        self._named = [*model.named_parameters(), *model.named_buffers()]
        self._registered = {id(tensor) for _, tensor in self._named}
        self._outside, self._around = ExternalTensors(), ExitStack()

    def __enter__(self) -> ScratchModel:
        self._around.callback(self._put_back)
        self._around.enter_context(uncompiled())
        self._around.enter_context(self._outside.put_back_after())
        try:
            self._swap()
        except BaseException:
            self._around.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._around.close()

    def restart(self) -> None:
        """Begin anew: fresh copies, and all random generators at the same seed."""
        self._put_back()
        self._swap()

    def parameters(self) -> list[tuple[str, Tensor, Tensor]]:
        """Name, original and copy of the parameters that need a gradient."""
        trained = ((name, one) for name, one in self._named if isinstance(one, nn.Parameter) and one.requires_grad)
        return [(name, tensor, self._copies[id(tensor)][1]) for name, tensor in trained]

    def changed(self) -> dict[str, Tensor]:
        """The parameters and buffers that a step has written or replaced since the last restart, by name."""
        now = {**dict(self._model.named_parameters()), **dict(self._model.named_buffers())}
        changed = {}
        for name, original in self._named:
            _, twin, version = self._copies[id(original)]
            present = now.get(name, twin)
            if present is not twin or version_of(twin) != version or _is_unlike(present, original):
                changed[name] = present.detach().clone()
        return changed

    def disturb(self, names: Collection[str]) -> None:
        """Write other values into the copies of these parameters and buffers, always the same ones."""
        generator = torch.Generator().manual_seed(0)
        for name, original in self._named:
            twin = self._copies[id(original)][1]
            if name in names and twin.data_ptr() != original.data_ptr():
                noise = torch.randn(twin.shape, generator=generator).to(twin.device, twin.dtype)
                twin.data += noise * (float(twin.abs().mean()) or 1.0)

    def value_of(self, name: str) -> Tensor:
        """The copy of a parameter or buffer, as it is now."""
        now = {**dict(self._model.named_parameters()), **dict(self._model.named_buffers())}
        return now.get(name, dict(self._named)[name]).detach()

    def numbers(self) -> dict[tuple[int, str], float]:
        """Values of modules' attributes, and of names that the step binds, where they are numbers now."""
        numbers = {} if self._saved.names is None else self._saved.names.numbers()
        for module in self._model.modules():
            named = vars(module).items()
            numbers |= {(id(module), name): value for name, value in named if type(value) in (int, float)}
        return numbers

    def bind(self, key: tuple[int, str], value: float) -> None:
        """Another number there, until the next restart."""
        module = next((one for one in self._model.modules() if id(one) == key[0]), None)
        if module is not None:
            module.__dict__[key[1]] = value
        elif self._saved.names is not None:
            self._saved.names.bind(key, value)

    def _swap(self) -> None:
        seed_all()
        self._outside.begin()
        for container, key in self._saved.reachable.places:
            container[key] = replaced(container[key], self._copy)
        for module in self._saved.reachable.modules:
            if isinstance(module, nn.RNNBase):
                module.__dict__["dropout"] = 0.0
        if self._prepare is not None:
            self._prepare()

    def _put_back(self) -> None:
        self._saved.put_back()
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


def why_not_replaced(model: nn.Module, reachable: ReachableState | None = None) -> str:
    """Name the module that keeps parameters or buffers where others cannot be put in their place; empty if none does.

    Args:
        reachable: what the model holds, where that was looked for.
    """
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule) and any(True for _ in (*module.parameters(), *module.buffers())):
            return f"{name or 'the model itself'} is a TorchScript module, whose parameters cannot be stood in for"
    reachable = reachable or ReachableState(model.modules())
    replaceable = {id(container[key]) for container, key in reachable.places}
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if id(tensor) not in replaceable:
            return f"{name} is not where modules keep their parameters and buffers, so nothing can stand in for it"
    return ""
