"""DistributedDataParallel's communication hook, of which a model has one for life: one owner at a time.

    slot = comm_hook_of(model)
    slot.take(owner, "my mechanism", "use mode='forward'")   # owner.reduce(bucket) is called for each full bucket
    ...
    slot.give_back(owner)                                    # gradients are averaged as DDP does it by itself

DDP takes one hook and never gives it up. So what is registered belongs to the model and hands buckets on to the owner
of the moment: the slot can be given back, and taken by another.
"""

import weakref
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from retime.foundations.ddp.mean import MeanOfBuckets
from retime.foundations.ddp.reducers import DeviceReducer, Reducer
from retime.foundations.torch_private import GradBucket, divides_by_ranks_left, graph_task_id, joins_uneven_inputs

__all__ = ["CommHook", "HookOwner", "comm_hook_of", "sparse_layer"]

_IN_MODEL = "_retime_comm_hook"


class HookOwner(Protocol):
    """What reduces a model's gradients."""

    def reduce(self, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        """Begin to reduce a bucket that is full; the future's value takes the place of its buffer."""


class CommHook:
    """The slot of one model.

    DDP holds what is registered where no garbage collector can look. So that refers to the model weakly, and the model
    holds the slot, and so its owner, for as long as it lives. A copy of the model has a slot of its own, which is free.
    """

    def __init__(self, model: DistributedDataParallel) -> None:
        self._model = weakref.ref(model)
        self._registered = False
        self._owner: HookOwner | None = None
        self._name = ""
        self._mean: MeanOfBuckets | None = None
        self._ranks = dist.get_world_size(model.process_group)

    def __reduce__(self) -> "tuple[type[_NoSlot], tuple[()]]":
        return _NoSlot, ()

    @property
    def owner(self) -> HookOwner | None:
        """Who reduces gradients; None: DDP's own arithmetic does."""
        return self._owner

    def is_of(self, model: nn.Module) -> bool:
        """Whether this is that model's slot."""
        return self._model() is model

    def take(self, owner: HookOwner, name: str, instead: str) -> None:
        """Let ``owner`` reduce the model's gradients from now on.

        Args:
            owner: gets each bucket of a backward pass that synchronises.
            name: what it is, for errors.
            instead: what a user can do who has another hook.

        Raises:
            ValueError: another has the slot.
        """
        if self._owner is owner:
            return
        if self._owner is not None:
            raise ValueError(_refusal(name, self._name, f"remove that first, or {instead}"))
        if not self._registered:
            self._register(name, instead)
        self._owner, self._name = owner, name

    def _register(self, name: str, instead: str) -> None:
        model = self._model()
        assert model is not None
        others = [getattr(hook, "__qualname__", str(hook)) for hook, _ in getattr(model, "_comm_hooks", ())]
        try:
            model.register_comm_hook(weakref.ref(model), _hand_on)
        except RuntimeError as error:
            raise ValueError(_refusal(name, others[0] if others else "one of torch's own", instead)) from error
        self._registered = True

    def give_back(self, owner: HookOwner) -> None:
        """Let DDP's own arithmetic reduce gradients again, unless another owner does; when no backward pass runs."""
        if self._owner is owner:
            self._owner, self._name = None, ""
            self.mean()

    def mean(self) -> MeanOfBuckets:
        """What divides buckets as DDP does; an owner that needs it asks before the first backward pass."""
        if self._mean is None:
            model = self._model()
            assert model is not None
            self._mean = MeanOfBuckets(model)
        return self._mean

    def reduce(self, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        """By the owner or, without one, as DDP does."""
        if bucket.index() == 0:
            self._ranks = self._count_ranks()
        if self._owner is not None:
            return self._owner.reduce(bucket)
        return self.reduce_as_ddp(bucket)

    def reduce_as_ddp(self, bucket: GradBucket, reducer: Reducer | None = None) -> torch.futures.Future[Tensor]:
        """What DDP does without a hook: divide by the number of ranks, then sum; by this reducer, if there is one."""
        return self.mean().start(bucket, self._now(reducer), self._ranks)

    def sum(self, bucket: GradBucket, reducer: Reducer | None = None) -> torch.futures.Future[Tensor]:
        """Sum a full bucket, which has been divided.

        Args:
            bucket: of the running backward pass.
            reducer: None: the wrapper's own group does it, as inside of its ``join()``, where ranks that have no
                batches left answer in that group.
        """
        return self._now(reducer).start(bucket.index(), bucket.buffer())

    @property
    def ranks(self) -> int:
        """By how many DDP divides the gradients of the running backward pass."""
        return self._ranks

    def _count_ranks(self) -> int:
        """Fewer than all in ``join(divide_by_initial_world_size=False)``, where some have no batches left.

        DDP counts them in its forward pass and shows nobody the number. A rank without batches runs this hook too, for
        zeros in the place of gradients, but in no backward pass.
        """
        model = self._model()
        assert model is not None
        if not divides_by_ranks_left(model):
            return dist.get_world_size(model.process_group)
        self.mean().follow(model)  # the number may be one whose reciprocal is rounded
        count = torch.full((1,), float(graph_task_id() != -1), device=model.join_device)
        dist.all_reduce(count, group=model.process_group)
        return max(1, int(count))

    def _now(self, reducer: Reducer | None) -> Reducer:
        model = self._model()
        assert model is not None
        if reducer is None or joins_uneven_inputs(model):
            return DeviceReducer(model.process_group)
        return reducer


class _NoSlot:
    """What a copy of a model has in its slot's place."""

    def is_of(self, model: nn.Module) -> bool:
        return False


def comm_hook_of(model: DistributedDataParallel) -> CommHook:
    """The slot of a model's communication hook."""
    slot = model.__dict__.get(_IN_MODEL)
    if slot is None or not slot.is_of(model):
        slot = model.__dict__[_IN_MODEL] = CommHook(model)
    assert isinstance(slot, CommHook)
    return slot


def sparse_layer(model: nn.Module) -> str | None:
    """Name of a layer with sparse gradients: DDP's communication hooks cannot carry them."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse:
            return str(name)
    return None


def _refusal(name: str, holder: str, instead: str) -> str:
    return f"{name} needs DDP's communication hook, and this model has one already ({holder}): {instead}"


def _hand_on(model: object, bucket: GradBucket) -> torch.futures.Future[Tensor]:
    living = model() if isinstance(model, weakref.ref) else None
    assert living is not None
    return comm_hook_of(living).reduce(bucket)
