"""DistributedDataParallel's communication hook, of which a model has one for life: one owner at a time.

    slot = comm_hook_of(model)
    slot.take(owner, "my mechanism", "use mode='forward'")   # owner.reduce(bucket) is called for each full bucket
    ...
    slot.give_back(owner)                                    # gradients are averaged as DDP does it by itself

DDP takes one hook and never gives it up. So what is registered belongs to the model and hands buckets on to the owner
of the moment: the slot can be given back, and taken by another.
"""

import threading
import weakref
from collections.abc import Callable, Hashable
from datetime import timedelta
from functools import partial
from typing import Any, Protocol, runtime_checkable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from retime.foundations.arguments import Timeout, checked
from retime.foundations.torch_private.distributed import GradBucket, divides_by_ranks_left, join_reader
from retime.foundations.torch_private.engine import graph_task_id, queue_callback

# What sums gradients over the ranks; where it does is a reducer's own affair.


@runtime_checkable
class Reducer(Protocol):
    """Sums tensors over the ranks while the backward pass goes on.

    What holds between a reducer and the owner of DDP's communication hook that was given it:

    * Who divides: the owner, before :meth:`start`, as DDP does. A reducer only adds; one that has
      ``start_scaled(key, values, scale, *, urgent)`` too multiplies each rank's values where the factor is exact, so
      that memory is gone through once less.
    * What it gets: a bucket, or a piece of one: one-dimensional, contiguous, of the gradients' dtype, on the model's
      device. The sum is written there, and nobody else touches it before the future is done.
    * How it writes: with any operation of torch. Those raise a version counter, and who puts gradients aside (forward
      fusion) takes that for a change by somebody else. So an owner that lets gradients be put aside while a sum is on
      its way gives the reducer ``values.data``, which has a counter of its own (``ddp/reductions.py``).
    * Order: all ranks start the same ones in the same order, in one thread at a time. Urgent ones may overtake others,
      if they do on every rank.
    * The end: its owner closes it, once, when nothing is on its way, or aborts it after a failure.

    Inside of the wrapper's ``join()`` owners use the wrapper's own group instead, where ranks without batches answer.
    """

    def start(self, key: Hashable, values: Tensor, *, urgent: bool = False) -> torch.futures.Future[Tensor]:
        """Begin to replace ``values``, shape ``(n,)``, by their sum.

        Args:
            key: of values that come again, such as a bucket's index. A reducer may keep memory for them, so those of
                the last call with the same key must have arrived.
            values: on the model's device.
            urgent: the next forward pass needs these first.

        Returns:
            Done when the sum is there, with ``values``, or with the error; in any thread. On CUDA the stream of whoever
            waits for it waits too.
        """

    def close(self) -> None:
        """Give back what was made for this; when nothing is on its way."""

    def abort(self) -> None:
        """The same after a failure: wait for nothing. What is on its way may never be done."""


# The ranks' mean, with the bits of DistributedDataParallel's own: it scales gradients first, and sums them then.
#
# It divides a gradient that was in its bucket before the backward pass. All others it multiplies by the rounded
# reciprocal while it copies them there. With 2, 4, 8, ... ranks both give the same bits; with others they do not.


def scale(values: Tensor, ranks: int, *, divide: bool) -> None:
    """Divide ``values`` by the number of ranks in place, or multiply them by its rounded reciprocal."""
    if divide:
        values.div_(ranks)
    else:
        values.mul_(1.0 / ranks)


def start_mean(
    reducer: Reducer, key: Hashable, values: Tensor, ranks: int, *, divide: bool, urgent: bool = False
) -> torch.futures.Future[Tensor]:
    """Begin to replace ``values`` by their mean over the ranks; a reducer divides by 2, 4, 8, ... itself, if it can."""
    start_scaled = getattr(reducer, "start_scaled", None)
    if start_scaled is not None and is_exact(ranks):
        scaled: torch.futures.Future[Tensor] = start_scaled(key, values, 1.0 / ranks, urgent=urgent)
        return scaled
    scale(values, ranks, divide=divide)
    return reducer.start(key, values, urgent=urgent)


def is_exact(ranks: int) -> bool:
    """Return whether the reciprocal of this number is exact."""
    return ranks & (ranks - 1) == 0


class MeanOfBuckets:
    """Scales a model's buckets as its DistributedDataParallel would.

    By the time that a communication hook runs, all gradients are in their buckets. Where it matters which of them were
    before, each parameter gets a hook that runs when its gradient has been accumulated, just before DDP moves it. These
    hooks go with the model.
    """

    def __init__(self, model: DistributedDataParallel) -> None:
        self._places: dict[int, int] = {}
        self._follows = False
        if not is_exact(dist.get_world_size(model.process_group)):
            self.follow(model)

    def follow(self, model: DistributedDataParallel) -> None:
        """Note from now on which gradients are in their buckets before DDP moves them."""
        if self._follows or not model.gradient_as_bucket_view:
            return
        self._follows = True
        for parameter in model.parameters():
            if parameter.requires_grad:
                handle = parameter.register_post_accumulate_grad_hook(partial(_note, self._places))  # type: ignore[no-untyped-call]
                weakref.finalize(model, handle.remove)

    def start(self, bucket: GradBucket, reducer: Reducer, ranks: int) -> torch.futures.Future[Tensor]:
        """Begin to replace what a full bucket holds by its mean over so many ranks."""
        if not self._places:
            return start_mean(reducer, bucket.index(), bucket.buffer(), ranks, divide=False)
        for parameter, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True):
            scale(gradient, ranks, divide=self._places.get(id(parameter)) == gradient.data_ptr())
        return reducer.start(bucket.index(), bucket.buffer())


def _note(places: dict[int, int], parameter: Tensor) -> None:
    """Note where a gradient is before DDP sees it; by identity, as the table must not hold what holds the hook."""
    if parameter.grad is not None:
        places[id(parameter)] = parameter.grad.data_ptr()


# Process groups of one's own: nothing that others send queues before or behind what goes through them.


def own_group(group: Any = None, *, backend: str | None = None, timeout: timedelta | None = None) -> Any:
    """A new group of the same ranks; all of them call this, in the same order.

    Args:
        group: whose ranks; None: all.
        backend: None: that of ``group``.
        timeout: of its collectives; None is torch's default.
    """
    ranks = dist.get_process_group_ranks(group)
    local = len(ranks) != dist.get_world_size()  # the other ranks know nothing of this
    backend = backend or dist.get_backend(group)
    return dist.new_group(ranks, timeout=timeout, backend=backend, use_local_synchronization=local)


def close_group(group: Any) -> None:
    """Give a group back, if torch has not done it already."""
    if group is not None and dist.is_initialized():
        dist.destroy_process_group(group)


# Gradients are summed where they are, by the all-reduce that DistributedDataParallel itself uses.


class DeviceReducer:
    """All-reduces in a process group, which stays its owner's.

    Args:
        group: None: all ranks. Do not keep a reducer in what runs when an all-reduce has ended: the last reference to a
            group may then go in a thread of that group, which cannot end in its own thread.
    """

    @checked
    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self._group = group

    def start(self, key: Hashable, values: Tensor, *, urgent: bool = False) -> torch.futures.Future[Tensor]:
        """Begin to replace ``values`` by their sum over the ranks."""
        work = dist.all_reduce(values, group=self._group, async_op=True)
        assert work is not None
        future: torch.futures.Future[Any] = work.get_future()
        return future.then(lambda done: done.value()[0])

    def close(self) -> None:
        """Nothing was made."""

    abort = close


_MOMENT_S = 2.0
"""How long an abort waits for the end of its groups, which takes milliseconds where nothing hangs."""


class OwnGroupsReducer:
    """All-reduces in process groups of its own.

    Of its own, so that nothing else (buffers, metrics, a user's barrier) queues behind them; the urgent ones have
    another, so that they do not queue behind the bulk either.

    Args:
        group: whose ranks; None: all. Each of them makes one of these.
        timeout: of a sum; None is torch's default.
    """

    @checked
    def __init__(self, group: dist.ProcessGroup | None = None, timeout: Timeout | None = None) -> None:
        self._groups = [own_group(group, timeout=timeout) for _ in range(2)]
        self._reducers = [DeviceReducer(one) for one in self._groups]

    def start(self, key: Hashable, values: Tensor, *, urgent: bool = False) -> torch.futures.Future[Tensor]:
        """Begin to replace ``values`` by their sum over the ranks."""
        return self._reducers[urgent].start(key, values)

    def close(self) -> None:
        """Give the process groups back."""
        groups, self._groups, self._reducers = self._groups, [], []
        for group in groups:
            close_group(group)

    def abort(self) -> None:
        """The same, but waited for a moment only: a group's threads, which end with it, may wait for a lost rank."""
        ending = threading.Thread(target=self.close, name="retime-abort", daemon=True)
        ending.start()
        ending.join(_MOMENT_S)


# What runs when DistributedDataParallel has finished a backward pass.


def at_end_of_backward(act: Callable[[], Any]) -> None:
    """Run ``act`` after DDP's own end-of-backward callback; called by its communication hook, with the last bucket.

    DDP queues its callback when the last bucket's hook has returned, so the queue is entered again from its end.
    """
    queue_callback(lambda: queue_callback(act))


_IN_MODEL = "_retime_comm_hook"


class HookOwner(Protocol):
    """Owner of a communication hook: it reduces a model's gradients."""

    def reduce(self, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        """Begin to reduce a bucket that is full; the future's value takes the place of its buffer."""


class CommHook:
    """The slot of one model.

    DDP holds what is registered where no garbage collector can look. So that refers to the model weakly, and the model
    holds the slot, and so its owner, for as long as it lives. A copy of the model has a slot of its own, which is free.

    Attributes:
        owner: who reduces gradients; None: DDP's own arithmetic does.
        ranks: by how many DDP divides the gradients of the running backward pass.
    """

    def __init__(self, model: DistributedDataParallel) -> None:
        self._model = weakref.ref(model)
        self._registered = False
        self.owner: HookOwner | None = None
        self._name = ""
        self._mean: MeanOfBuckets | None = None
        self.ranks = dist.get_world_size(model.process_group)
        self._joins = join_reader(model)

    def __reduce__(self) -> Any:
        return type(None), ()  # a copy of the model has none yet

    @property
    def _living(self) -> DistributedDataParallel:
        model = self._model()
        assert model is not None
        return model

    def is_of(self, model: nn.Module) -> bool:
        """Return whether this is that model's slot."""
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
        if self.owner is owner:
            return
        if self.owner is not None:
            raise ValueError(_refusal(name, self._name, f"remove that first, or {instead}"))
        if not self._registered:
            self._register(name, instead)
        self.owner, self._name = owner, name

    def _register(self, name: str, instead: str) -> None:
        model = self._living
        others = [getattr(hook, "__qualname__", str(hook)) for hook, _ in getattr(model, "_comm_hooks", ())]
        try:
            model.register_comm_hook(weakref.ref(model), _hand_on)
        except RuntimeError as error:
            raise ValueError(_refusal(name, others[0] if others else "one of torch's own", instead)) from error
        self._registered = True

    def give_back(self, owner: HookOwner, reducer: Reducer | None = None, *, failed: bool = False) -> None:
        """Let DDP's own arithmetic reduce gradients again, unless another owner does; when no backward pass runs.

        Args:
            owner: does nothing more with buckets.
            reducer: the owner's, which ends with it.
            failed: whether a reduction may never be done.
        """
        if self.owner is owner:
            self.owner, self._name = None, ""
            self.mean()
        if reducer is not None:
            if failed:
                reducer.abort()
            else:
                reducer.close()

    def mean(self) -> MeanOfBuckets:
        """Return what divides buckets as DDP does; an owner that needs it asks before the first backward pass."""
        if self._mean is None:
            self._mean = MeanOfBuckets(self._living)
        return self._mean

    def reduce(self, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        """Reduce a bucket by the owner or, without one, as DDP does."""
        if bucket.index() == 0:
            self.ranks = self._count_ranks()
        if self.owner is not None:
            return self.owner.reduce(bucket)
        return self.reduce_as_ddp(bucket)

    def reduce_as_ddp(self, bucket: GradBucket, reducer: Reducer | None = None) -> torch.futures.Future[Tensor]:
        """Do as DDP does without a hook: divide by the number of ranks, then sum; by this reducer, if there is one."""
        return self.mean().start(bucket, self._now(reducer), self.ranks)

    def sum(self, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        """Sum a full bucket, which has been divided, in the wrapper's own group.

        Inside of its ``join()`` ranks that have no batches left answer in that group.
        """
        return self._now(None).start(bucket.index(), bucket.buffer())

    def _count_ranks(self) -> int:
        """Fewer than all in ``join(divide_by_initial_world_size=False)``, where some have no batches left.

        DDP counts them in its forward pass and shows nobody the number. A rank without batches runs this hook too, for
        zeros in the place of gradients, but in no backward pass.
        """
        model = self._living
        if not self._joins(model) or not divides_by_ranks_left(model):
            return dist.get_world_size(model.process_group)
        self.mean().follow(model)  # the number may be one whose reciprocal is rounded
        count = torch.full((1,), float(graph_task_id() != -1), device=model.join_device)
        dist.all_reduce(count, group=model.process_group)
        return max(1, int(count))

    def _now(self, reducer: Reducer | None) -> Reducer:
        model = self._living
        return _WrappersReducer(model) if reducer is None or self._joins(model) else reducer


class _WrappersReducer(DeviceReducer):
    """All-reduces in the wrapper's own group; made for each bucket, and so without checks."""

    def __init__(self, model: DistributedDataParallel) -> None:
        self._group = model.process_group


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
