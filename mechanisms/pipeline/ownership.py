"""Which rank has which parameters: those of its stages. What it does not have takes no memory there."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import cache
from itertools import compress
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from retime.foundations.lazy_updates import nbytes
from retime.foundations.messages import show_bytes, warn_no_effect
from retime.foundations.torch_private.distributed import timeout_of
from retime.foundations.torch_private.engine import tree_map
from retime.foundations.torch_private.tensors import storage_address, without_subclass_functions
from retime.mechanisms.pipeline.checks import (
    PipelineError,
    all_gather_object,
    broadcast,
    broadcast_object,
    messages_of_group,
)
from retime.mechanisms.pipeline.meta_device import without_memory

# Which ranks make up a pipeline, and which add their gradients up.

Size = int | Literal["auto"]


def sizes_of(world: int, pipeline: Size, data: Size) -> tuple[int, int]:
    """Ranks of a pipeline, and pipelines.

    Raises:
        ValueError: they do not make up all processes.
    """
    replicas = data if data != "auto" else 1 if pipeline == "auto" else max(1, world // pipeline)
    stages = max(1, world // replicas) if pipeline == "auto" else pipeline
    if stages * replicas != world:
        raise ValueError(
            f"pipeline_parallel_size={stages} and data_parallel_size={replicas} make {stages * replicas} ranks, and "
            f"there are {world}: let their product be the number of processes, or leave one of them 'auto'"
        )
    return stages, replicas


def make_groups(pipeline: int, data: int, timeout: timedelta) -> tuple[Any, Any]:
    """The group of this rank's pipeline, and of those it adds gradients up with; all ranks call this.

    Ranks of one pipeline have neighbouring numbers; the n-th ranks of all pipelines add gradients up.

    Args:
        pipeline: ranks of each.
        data: number of pipelines.

    Returns:
        The pipeline's, and the data parallel one, which is None if there is one pipeline.
    """
    pipelines = [list(range(first, first + pipeline)) for first in range(0, pipeline * data, pipeline)]
    pipeline_group, _ = dist.new_subgroups_by_enumeration(pipelines, timeout=timeout)  # type: ignore[no-untyped-call]
    if data == 1:
        return pipeline_group, None
    alike = [list(range(first, pipeline * data, pipeline)) for first in range(pipeline)]
    return pipeline_group, dist.new_subgroups_by_enumeration(alike, timeout=timeout)[0]  # type: ignore[no-untyped-call]


def gathered(mine: Any, group: Any) -> list[Any] | None:
    """Gather what each rank of a group gives, on its first; None on others. All ranks call this."""
    is_first = dist.get_rank(group) == 0
    everyone: list[Any] | None = [None] * dist.get_world_size(group) if is_first else None
    with messages_of_group(group):
        dist.gather_object(mine, everyone, dst=dist.get_global_rank(group, 0), group=group)
    return everyone


# Gradients of data parallel ranks, added up as soon as a stage has all of them.


class GradientSums:
    """Means of gradients over a group, on their way while other stages go on.

    Args:
        group: ranks that have the same stages; None: this one is alone.
    """

    def __init__(self, group: Any) -> None:
        self._group = group
        self._on_the_way: list[tuple[Any, Tensor, list[Tensor]]] = []

    def begin(self, parameters: Sequence[Tensor]) -> None:
        """Let the gradients of these leave; the same on all ranks. One that is not there counts as zeros."""
        if self._group is None:
            return
        by_type: dict[torch.dtype, list[Tensor]] = {}
        for parameter in parameters:
            by_type.setdefault(parameter.dtype, []).append(parameter)
        for some in by_type.values():
            gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in some]
            flat = torch.cat([(g.to_dense() if g.is_sparse else g).reshape(-1) for g in gradients])
            flat /= dist.get_world_size(self._group)
            self._on_the_way.append((dist.all_reduce(flat, group=self._group, async_op=True), flat, some))

    def end(self) -> None:
        """Wait for all, and put them where they belong."""
        while self._on_the_way:
            work, flat, parameters = self._on_the_way.pop(0)
            with messages_of_group(self._group):
                work.wait()
            for parameter, piece in zip(parameters, torch.split(flat, [p.numel() for p in parameters]), strict=True):
                mean = piece.view_as(parameter)
                is_dense = parameter.grad is not None and not parameter.grad.is_sparse
                parameter.grad = parameter.grad.copy_(mean) if is_dense else mean.clone()  # type: ignore[union-attr]

    def forget(self) -> None:
        """After a failure."""
        self._on_the_way.clear()


_MUCH_MORE = 1.5
"""Multiple of a rank's even share of the parameters' bytes that is warned of."""


def refuse_part_of_model(model: nn.Module) -> None:
    """Raise PipelineError if parameters of this model were given away to other ranks, and are not back."""
    for name, parameter in model.named_parameters():
        if parameter.numel() > 1 and not any(parameter.stride()) and parameter.detach().isnan().all():
            raise PipelineError(
                f"{name!r} lies on another rank, since training over ranks that ended with an exception: build the "
                "model anew, and load a checkpoint"
            )


class Reached:
    """Part of the graph that a backward pass from some tensors would come to.

    Attributes:
        leaves: that would get a gradient.
        nodes: of the graph; not those of leaves.
        ends: nodes of ``until`` that it comes to.

    Args:
        roots: with a graph.
        until: nodes that the pass does not go through.
    """

    def __init__(self, roots: Iterable[Tensor], until: Container[Any] = ()) -> None:
        self.ends: set[Any] = set()
        self.leaves: set[Tensor] = set()
        self.nodes: set[Any] = set()
        waiting = [root.grad_fn for root in roots if root.grad_fn is not None]
        while waiting:
            node = waiting.pop()
            leaf = getattr(node, "variable", None)
            if isinstance(leaf, Tensor):
                self.leaves.add(leaf)
            elif node in until:
                self.ends.add(node)
            elif node not in self.nodes:
                self.nodes.add(node)
                waiting += [following for following, _ in node.next_functions if following is not None]


class _Absent:
    """Writes into a parameter that lies on another rank, or into a view of one, do nothing; reads give NaN.

    A write that draws random numbers draws them, into memory of that size for a moment: generators of all ranks stay
    together.
    """

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        written = _written(func, args, kwargs)
        if isinstance(written, _Absent):
            if _draws(func):
                with without_subclass_functions():
                    scratch = torch.empty_like(_plain(written).detach(), memory_format=torch.contiguous_format)
                    given = [scratch if one is written else one for one in args]
                    func(*given, **{name: scratch if one is written else one for name, one in kwargs.items()})
            return written
        if isinstance(written, list | tuple) and any(isinstance(one, _Absent) for one in written):
            here = [not isinstance(one, _Absent) for one in written]  # torch._foreach_... of several parameters
            if not any(here):
                return None
            args, kwargs = [_compressed(v, here) for v in args], {k: _compressed(v, here) for k, v in kwargs.items()}
            return func(*args, **kwargs)
        with without_subclass_functions():
            result = func(*args, **kwargs)
            return tree_map(lambda one: _marked(one, args), result) if args else result

    def __deepcopy__(self, memo: Any) -> Any:
        with without_subclass_functions():
            plain = _plain(self)
            copied = memo[id(self)] = plain.__deepcopy__(memo)  # type: ignore[no-untyped-call]
            memo.pop(id(plain), None)  # which lives no longer, and another may come to have its id
            return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        with without_subclass_functions():
            return _plain(self).__reduce_ex__(protocol)  # type: ignore[no-untyped-call]


class _AbsentParameter(_Absent, nn.Parameter):
    """Never constructed, only the class of a live parameter for a while."""


class _AbsentTensor(_Absent, Tensor):
    """Tensor that shares an absent parameter's memory, such as its ``.data``."""


_FORM: Any = Tensor  # whose descriptors have no types
_SETS_DATA = _FORM.data.__set__
_LEAVES_VALUES = ("requires_grad_", "detach_", "share_memory_")
_WRITES = {f"__i{name}__" for name in ("add", "sub", "mul", "div", "truediv", "floordiv", "mod", "pow")}
_WRITES |= {"__setitem__", "__iand__", "__ior__", "__ixor__", "__ilshift__", "__irshift__"}


def _written(func: Any, args: Any, kwargs: Any) -> Any:
    """Argument that a torch function writes into, if it writes into anything that it is given."""
    if "out" in kwargs:
        return kwargs["out"]
    name = getattr(func, "__name__", "")
    in_place = name.endswith("_") and not name.endswith("__") and name not in _LEAVES_VALUES
    if in_place or name in _WRITES or func == _SETS_DATA:
        return args[0] if args else kwargs.get("self", next(iter(kwargs.values()), None))
    return None


@cache
def _draws(func: Any) -> bool:
    """Return whether a torch function draws random numbers, by what torch says of its operator."""
    operator = getattr(torch.ops.aten, getattr(func, "__name__", ""), None)
    overloads = [] if operator is None else [getattr(operator, name) for name in operator.overloads()]
    is_random = any(torch.Tag.nondeterministic_seeded in one.tags for one in overloads)
    return is_random or getattr(func, "__module__", None) == nn.init.__name__


def _compressed(value: Any, here: list[bool]) -> Any:
    return list(compress(value, here)) if isinstance(value, list | tuple) else value


def _marked(result: Any, args: Any) -> Any:
    if type(result) is not Tensor or not isinstance(args[0], _Absent) or result.layout != torch.strided:
        return result
    is_view = storage_address(result.untyped_storage()) == storage_address(args[0].untyped_storage())  # type: ignore[attr-defined]
    return result.as_subclass(_AbsentTensor) if is_view else result


def _plain(absent: Any) -> Tensor:
    """The same values, as torch's own class has them."""
    if isinstance(absent, nn.Parameter):
        return nn.Parameter(absent.detach().as_subclass(Tensor), absent.requires_grad)
    return absent.as_subclass(Tensor)  # type: ignore[no-any-return]


def _set_absent(parameter: nn.Parameter, absent: bool) -> None:
    """Let writes do nothing from now on, or what they say; of a class of the user's own they stay torch's."""
    if type(parameter) in (nn.Parameter, _AbsentParameter):
        parameter.__class__ = _AbsentParameter if absent else nn.Parameter


class Ownership:
    """The parameters and buffers of a model that is spread over the ranks of a group.

    A parameter that several ranks have (tied weights) has the sum of their gradients on all of them. Frozen parameters,
    and those that no stage reached, stay on all ranks.

    Args:
        model: whole on all ranks.
        needed: trainable parameters that this rank's stages use.
        group: the ranks of the pipeline.
        here: the layers that this rank has.

    Attributes:
        parameters: by name.
        ranks: of the group, that have a parameter, by its name.
        absent: names of those that this rank has not.
        shared: the ranks of trainable parameters that several of them use.
        unreached: names of parameters that no stage uses.
    """

    def __init__(self, model: nn.Module, needed: set[Tensor], group: Any, here: Iterable[nn.Module]) -> None:
        self._model, self._group = model, group
        self._rank = dist.get_rank(group)
        self.parameters: dict[str, nn.Parameter] = dict(model.named_parameters())
        names = {parameter: name for name, parameter in self.parameters.items()}
        mine = {names[p] for p in needed if p in names}  # type: ignore[index]
        layers = list(here)
        mine |= {names[p] for layer in layers for p in layer.parameters()}
        others = all_gather_object(mine, group)
        self._everyone = range(len(others))
        self.ranks: dict[str, list[int]] = {}
        self.unreached: list[str] = []
        self.shared: dict[str, list[int]] = {}
        for name in self.parameters:
            ranks = [rank for rank, of_rank in enumerate(others) if name in of_rank]
            self.ranks[name] = ranks or list(self._everyone)
            if not ranks:
                self.unreached.append(name)
            elif len(ranks) > 1 and self.parameters[name].requires_grad:
                self.shared[name] = ranks
        self._strides = {name: p.stride() for name, p in self.parameters.items()}
        self.absent = sorted(name for name, ranks in self.ranks.items() if self._rank not in ranks)
        self._finite = [name for name in self.unreached if self._is_finite(name)]
        self._groups: dict[tuple[int, ...], Any] = {}
        self._owner_of_buffers = self._owners_of_buffers({one for layer in layers for one in layer.buffers()})
        named = model.named_buffers()
        self._outside = {
            name: one.clone() for name, one in named if name not in self._owner_of_buffers and not one.is_meta
        }
        self._computed = self._computed_attributes()

    def free(self) -> None:
        """Give the memory of what other ranks have back."""
        for owner, module, attribute in self._computed:
            value = vars(module).get(attribute)
            if isinstance(value, Tensor) and not value.is_leaf and self._rank != owner:
                setattr(module, attribute, value.detach())  # else it keeps parameters alive, and copies of it fail
        for name in self.absent:
            parameter = self.parameters[name]
            _set_absent(parameter, False)
            parameter.grad = None
            parameter.data = without_memory(parameter, parameter.device)
            _set_absent(parameter, True)

    def forget(self) -> None:
        """Parameters stay where they are; a write into one that is not here raises from now on."""
        for name in self.absent:
            _set_absent(self.parameters[name], False)

    def fetch(self, names: Iterable[str] | None = None) -> None:
        """Bring parameters (None: all), and all buffers, to all ranks; all ranks call this."""
        for name in sorted(self.parameters if names is None else names):
            ranks, parameter = self.ranks[name], self.parameters[name]
            if len(ranks) == len(self._everyone):
                continue
            if self._rank not in ranks:
                _set_absent(parameter, False)
                parameter.data = torch.empty_strided(
                    parameter.shape, self._strides[name], dtype=parameter.dtype, device=parameter.device
                )
            broadcast(parameter.data, ranks[0], self._group)
        self.find_writers()
        for name, buffer in sorted(self._model.named_buffers()):
            broadcast(buffer, self._owner_of_buffers.get(name, 0), self._group)
            if name in self._outside:
                self._outside[name] = buffer.clone()
        for owner, module, attribute in self._computed:
            mine = vars(module).get(attribute) if owner == self._rank else None
            value = broadcast_object(mine.detach() if isinstance(mine, Tensor) else mine, owner, self._group)
            if owner != self._rank:
                setattr(module, attribute, value)

    @contextmanager
    def whole(self, names: Iterable[str] | None = None) -> Iterator[None]:
        """Inside, these parameters are on all ranks."""
        self.fetch(names)
        try:
            yield
        finally:
            self.free()

    def keep_gradients(self) -> dict[str, Tensor]:
        """Put what shared parameters have of steps before aside, so that it is not summed again."""
        kept: dict[str, Tensor] = {}
        for name in self.shared:
            parameter = self.parameters[name]
            if self._rank in self.shared[name] and parameter.grad is not None:
                kept[name], parameter.grad = parameter.grad, None
        return kept

    def put_back(self, kept: dict[str, Tensor]) -> None:
        """Shared parameters have the gradients of steps before again: a step has failed, and its own are not summed."""
        for name, ranks in self.shared.items():
            if self._rank in ranks:
                self.parameters[name].grad = kept.get(name)

    def sum_shared(self, kept: dict[str, Tensor]) -> None:
        """Add up the gradients of parameters that several ranks have; all ranks call this."""
        for name in sorted(self.shared):
            ranks, parameter = self.shared[name], self.parameters[name]
            group = self._group_of(tuple(ranks), parameter.device)
            if self._rank not in ranks:
                continue
            gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            if gradient.is_sparse:
                gradient = gradient.to_dense()
            gradient = gradient.contiguous()
            with messages_of_group(group):
                dist.all_reduce(gradient, group=group)
            parameter.grad = gradient if name not in kept else kept[name].add_(gradient)

    def refuse_strays(self) -> None:
        """Raise PipelineError if a parameter that no stage used in the first batch has a gradient."""
        for name in self.unreached:
            parameter = self.parameters[name]
            if parameter.requires_grad and parameter.grad is not None:
                raise PipelineError(
                    f"{name!r} got a gradient that it did not get in the first batch, so it is not known which ranks "
                    "need it: use all trainable parameters in the first batch, or freeze this one"
                )

    def refuse_averages(self) -> None:
        """Raise PipelineError if a parameter that no stage uses, such as an average of others, became NaN."""
        for name in self._finite:
            if not self._is_finite(name):
                raise PipelineError(
                    f"{name!r} is not used in the step, and became NaN behind a batch: code between the batches "
                    "reads weights of all layers into it, as averages of weights do, and those of other ranks' layers "
                    "are NaN here. Average the weights of checkpoints instead"
                )

    def _is_finite(self, name: str) -> bool:
        return not bool(self.parameters[name].detach().isnan().any())

    def find_writers(self) -> None:
        """A buffer outside of layers, of a module without parameters, is the first rank's that has written into it.

        All ranks call this. Code in front of the layers runs on all ranks, code behind them on the last, and between
        them on each as well, on stand-ins for what other ranks' layers give: that makes them NaN.
        """
        buffers = dict(self._model.named_buffers())
        changed = {
            name: not bool(buffers[name].isnan().any())
            for name, one in self._outside.items()
            if name in buffers and not torch.equal(buffers[name], one)
        }
        everyone = all_gather_object(changed, self._group) if self._outside else []
        for finite in (False, True):
            for rank, of_rank in reversed([*enumerate(everyone)]):
                self._owner_of_buffers |= {name: rank for name, is_finite in of_rank.items() if is_finite is finite}

    def counts_state(self, name: str) -> bool:
        """Return whether this rank writes a parameter or buffer into a checkpoint."""
        if name in self.ranks:
            return self.ranks[name][0] == self._rank
        return self._owner_of_buffers.get(name, 0) == self._rank

    def gather(self, mine: dict[Any, Any]) -> dict[Any, Any] | None:
        """Merge all ranks' parts on the first; of a key that several give, its value. None on others; all call this."""
        everyone = gathered(mine, self._group)
        if everyone is None:
            return None
        merged: dict[Any, Any] = {}
        for part in reversed(everyone):
            merged |= part
        return merged

    @property
    def bytes_by_rank(self) -> list[int]:
        """Return the bytes of the parameters that each rank has."""
        sizes = {name: nbytes(parameter) for name, parameter in self.parameters.items()}
        return [sum(size for name, size in sizes.items() if rank in self.ranks[name]) for rank in self._everyone]

    @property
    def bytes_of_all(self) -> int:
        """Return the bytes of all parameters."""
        return sum(map(nbytes, self.parameters.values()))

    def warn_of_shares(self, split: str) -> None:
        """Say which rank keeps much more than its even share of the parameters, and why.

        Args:
            split: how stages were cut, as an argument.
        """
        shares, total = self.bytes_by_rank, self.bytes_of_all
        most = max(shares)
        if most * len(shares) <= _MUCH_MORE * total:
            return
        rank = shares.index(most)
        there = [name for name in self.parameters if rank in self.ranks[name]]
        largest = max(there, key=lambda name: nbytes(self.parameters[name]))
        fix = "split='even'" if split != "'even'" else "fewer ranks, or layers that hold less each"
        warn_no_effect(
            f"rank {rank} of the pipeline keeps {show_bytes(most)} of {show_bytes(total)} of parameters, "
            f"{most * len(shares) / total:.2f} times an even share, as split={split} cuts the layers (a layer is not "
            f"divided, and weights lie on each rank that uses them; the largest there is {largest!r} with "
            f"{show_bytes(nbytes(self.parameters[largest]))}): use {fix}"
        )

    def _group_of(self, ranks: tuple[int, ...], device: torch.device) -> Any:
        if len(ranks) == len(self._everyone):
            return self._group
        if self._rank in ranks and ranks not in self._groups:
            world, wait = [dist.get_global_rank(self._group, rank) for rank in ranks], timeout_of(self._group, device)
            self._groups[ranks] = dist.new_group(world, timeout=wait, use_local_synchronization=True)
        return self._groups.get(ranks)

    def _owners_of_buffers(self, here: set[Tensor]) -> dict[str, int]:
        """A layer's buffers are those of the first rank that has the layer, others' of the one with their parameters.

        Args:
            here: buffers of the layers that this rank has.
        """
        modules = self._modules_with_parameters()
        owners = {start + name: rank for start, one, rank in modules for name, _ in one.named_buffers(recurse=False)}
        mine = {name for name, buffer in self._model.named_buffers() if buffer in here}
        for rank, names in reversed([*enumerate(all_gather_object(mine, self._group))]):
            owners |= dict.fromkeys(names, rank)
        return owners

    def _modules_with_parameters(self) -> Iterator[tuple[str, nn.Module, int]]:
        """Yield what its names begin with, the module, and the first rank that has one of its own parameters."""
        for prefix, module in self._model.named_modules():
            start = f"{prefix}." if prefix else ""
            names = [start + name for name, _ in module.named_parameters(recurse=False)]
            ranks = [self.ranks[name][0] for name in names if name in self.ranks]
            if ranks:
                yield start, module, min(ranks)

    def _computed_attributes(self) -> list[tuple[int, nn.Module, str]]:
        """Attributes that modules compute from parameters and buffers and keep, as pruning and old weight norms do.

        Returns:
            The rank that has the parameters, the module, and the attribute, in the same order on all ranks.
        """
        owned: dict[str, tuple[int, nn.Module, str]] = {}
        for start, module, rank in self._modules_with_parameters():
            for attribute, value in vars(module).items():
                if isinstance(value, Tensor):
                    owned[start + attribute] = rank, module, attribute
        computed = {name for name, (_, module, attribute) in owned.items() if not vars(module)[attribute].is_leaf}
        everyone = all_gather_object((computed, set(owned)), self._group)
        somewhere = set().union(*(names for names, _ in everyone))
        return [owned[name] for name in sorted(somewhere.intersection(*(names for _, names in everyone)))]


# Checkpoints of a model that lies on several ranks: one file, as of a plain Trainer.


def whole_model_state(model: nn.Module, state: dict[str, Any], owners: Ownership) -> dict[str, Any]:
    """A state dict with every rank's own values in it, on the first rank of the pipeline; all ranks call this."""
    named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    first: dict[Tensor, str] = {}
    owner_of = {name: first.setdefault(tensor, name) for name, tensor in named}  # tied weights are sent and saved once
    owners.find_writers()
    mine = {
        owner_of.get(key, key): value.detach().cpu()
        for key, value in state.items()
        if isinstance(value, Tensor) and owners.counts_state(owner_of.get(key, key))
    }
    values = owners.gather(mine)
    if values is None:
        return state
    return type(state)((key, values.get(owner_of.get(key, key), value)) for key, value in state.items())


def whole_optimizer_state(optimizer: Optimizer, state: dict[str, Any], owners: Ownership) -> dict[str, Any]:
    """An optimizer's state dict with every rank's own in it, on the first rank of the pipeline; all ranks call this."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    names = {tensor: name for name, tensor in owners.parameters.items()}
    mine = {
        index: one
        for index, one in state["state"].items()
        if not isinstance(index, int) or owners.counts_state(names[parameters[index]])
    }
    states = owners.gather(mine)
    if states is None:
        return state
    return {**state, "state": dict(sorted(states.items(), key=lambda item: str(item[0]).rjust(12)))}


def forget_absent(optimizer: Optimizer, owners: Ownership) -> None:
    """Drop the state of parameters that lie on other ranks."""
    absent = {owners.parameters[name] for name in owners.absent}
    for parameter in [one for one in optimizer.state if one in absent]:
        del optimizer.state[parameter]
