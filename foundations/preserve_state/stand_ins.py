"""Other tensors in the places of a model's, for a while: fake ones for a dry run, copies for a run that must not count.

What a run leaves in the modules, one that was stopped half-way too, is taken away again.

The tensors are swapped in the module itself, so that whatever closes over it (a loss function, a Trainer) runs on the
stand-ins too, and nothing has to be copied that cannot be.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from retime.foundations.parts import replaced_tensors
from retime.foundations.preserve_state.outside import GlobalsSnapshot
from retime.foundations.preserve_state.state import (
    ReachableState,
    Slots,
    Snapshot,
    lazy_copy,
    random_state,
    replaced,
    set_random_state,
    uncompiled,
)
from retime.foundations.storages import tensors_in
from retime.foundations.torch_private import STEP_HOOKS, FakeTensor, FakeTensorMode, tree_map, version_of

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
        held: makes one for any other tensor that modules hold.

    Attributes:
        stand_ins: all so far.
    """

    def __init__(self, convert: Callable[[Tensor], Tensor], held: Callable[[Tensor], Tensor]) -> None:
        self._convert, self._held = convert, held
        self._known: dict[int, Tensor] = {}
        self._originals: list[Tensor] = []  # their ids must stay taken
        self.stand_ins: list[Tensor] = []
        self._reachable: tuple[nn.Module, ReachableState] | None = None

    def of(self, tensor: Tensor) -> Tensor:
        """What stands in for a parameter, a buffer, or a tensor of a batch or of an optimizer's state."""
        return self._of(tensor, self._convert)

    def at(self, place: Any) -> Any:
        """What stands in for a tensor that modules hold, or for a tuple or a partial with some."""
        stand_in = self._known.get(id(place))  # this is done before every run that is timed
        return replaced(place, self._of_held) if stand_in is None else stand_in

    def tree(self, tree: Any) -> Any:
        """A state with all its tensors replaced."""
        return tree_map(lambda leaf: self.of(leaf) if isinstance(leaf, Tensor) else leaf, tree)

    def batch(self, batch: Any) -> Any:
        """A batch with all its tensors replaced, which a step may write into."""
        return replaced_tensors(batch, self.of)

    def reachable(self, module: nn.Module) -> ReachableState:
        """What ``module`` holds, looked for once; from then on its parameters and buffers have stand-ins."""
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

    def _of_held(self, tensor: Tensor) -> Tensor:
        return self._of(tensor, self._held)

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


# What a run leaves in the modules is taken away again: without copying any tensor, or with copies of all.


@contextmanager
def undisturbed(model: nn.Module, step: Callable[[Any], Any] | None = None) -> Iterator[None]:
    """All attributes of all modules come back as they were, with what dicts, lists, sets and deques in them hold.

    So do the attributes of objects in them, small NumPy arrays, random generators that they keep, and the global ones
    of torch, Python and NumPy; see `ReachableState` for what is looked into.

    For steps that run on stand-ins of the tensors; a step that runs without must replace a tensor in an attribute (a
    metric's state) and not write into it.

    Args:
        step: what will run: names outside of the model that it binds anew are bound as they were again, too.
    """
    random = random_state()
    names = None if step is None else GlobalsSnapshot(step, model)
    snapshot = Snapshot()
    snapshot.save_all(ReachableState(model.modules()))
    try:
        yield
    finally:
        set_random_state(random)
        snapshot.put_back()
        if names is not None:
            names.put_back()


def reachable_tensors(model: nn.Module, batch: Any) -> list[Tensor]:
    """Each tensor of a model, beside its parameters and buffers too, and of a batch."""
    return _tensors_of(ReachableState(model.modules()), model, batch)


class Undo:
    """Notes what :func:`~retime.foundations.preserve_state.stand_ins.undisturbed` notes, and copies all tensors.

    Args:
        model: that is about to run.
        batch: that it is given.
        parameters: whether the model's parameters are copied too.
    """

    def __init__(self, model: nn.Module, batch: Any, *, parameters: bool = True) -> None:
        reachable = ReachableState(model.modules())
        self._random = random_state()
        self._snapshot = Snapshot()
        self._snapshot.save_all(reachable)
        left_out = set() if parameters else set(model.parameters())
        self._values = [
            (tensor, version_of(tensor), tensor.detach().clone())
            for tensor in _tensors_of(reachable, model, batch)
            if tensor not in left_out and not tensor.is_inference()  # those cannot be written into
        ]

    def put_back(self) -> None:
        """All is as it was when this was made; what has not changed is not touched."""
        set_random_state(self._random)
        self._snapshot.put_back()
        with torch.no_grad():
            for tensor, version, value in self._values:
                # Batch norm's kernels write into running statistics without a new version.
                unversioned = tensor.layout == torch.strided and not torch.equal(tensor, value)
                if version_of(tensor) != version or unversioned:
                    tensor.copy_(value)


def _tensors_of(reachable: ReachableState, model: nn.Module, batch: Any) -> list[Tensor]:
    tensors: list[Tensor] = [*model.parameters(), *model.buffers(), *tensors_in(batch)]

    def note(tensor: Tensor) -> Tensor:
        tensors.append(tensor)
        return tensor

    for container, key in reachable.places:
        replaced(container[key], note)
    return list({id(tensor): tensor for tensor in tensors}.values())
