"""The ranks of a machine update a model's parameters together: each updates some, and all take what the others wrote.

moDNN, section 6.2 (Chen et al. 2019): gradients are added up on the host, and what goes back to the devices are
weights. So the state of the optimizer belongs to the host. Here each rank of a machine steps the user's own optimizer
for its share of the parameters, whose state nobody else on the machine has (as in ZeRO's first stage, Rajbhandari et
al. 2020), and weights go round in the memory that the ranks share.

    reduction = BucketReduction(model, HostReducer())            # on all ranks, right after DistributedDataParallel
    update = HostUpdate(optimizer, reduction.parameters)         # on all ranks
    ...                                                          # the loop as it was
    state = update.state_dict()                                  # on all ranks: whole on the first
    update.remove()                                              # on all ranks: the state is whole again on each
"""

from __future__ import annotations

import pickle
import zlib
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, fields, replace
from datetime import timedelta
from enum import IntEnum
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from retime.foundations.arguments import Timeout, checked
from retime.foundations.ddp import RankLostError
from retime.foundations.lazy_updates import ReplacedMethod, why_not_separable, why_not_this_step
from retime.foundations.messages import Report, show_bytes, warn_no_effect
from retime.foundations.torch_private.engine import tree_leaves, tree_map
from retime.foundations.torch_private.tensors import version_of
from retime.mechanisms.cpu_accumulation.shared_sums import SharedSum, host_sums

# What the ranks of a machine tell each other through the memory that they share; all of them call this alike.

SENT_ALONE_BYTES = 2**16
"""Tensors from this size on are sent as they lie; smaller ones together, as each turn waits for the other ranks."""


def broadcast(tensors: Sequence[Tensor], root: int, ranks: SharedSum) -> None:
    """Replace tensors of floating-point numbers by those of one rank, bit by bit."""
    together: dict[torch.dtype, list[Tensor]] = {}
    for tensor in tensors:
        if tensor.is_contiguous() and tensor.nbytes >= SENT_ALONE_BYTES:
            ranks.broadcast(tensor.view(-1), root)
            if ranks.rank != root:
                torch.autograd.graph.increment_version(tensor)
        else:
            together.setdefault(tensor.dtype, []).append(tensor)
    for few in together.values():
        flat = torch.cat([one.reshape(-1) for one in few])
        ranks.broadcast(flat, root)
        if ranks.rank != root:
            for one, values in zip(few, torch.split(flat, [one.numel() for one in few]), strict=True):
                one.copy_(values.view(one.shape))


def all_gather_floats(mine: Sequence[float], ranks: SharedSum) -> list[list[float]]:
    """Each rank's numbers, the same count on all."""
    table = torch.zeros(ranks.ranks, len(mine), dtype=torch.float64)
    table[ranks.rank] = torch.tensor(mine, dtype=torch.float64)
    ranks.add(table.view(-1))
    return table.tolist()


def broadcast_object(mine: Any, root: int, ranks: SharedSum) -> Any:
    """Return one rank's object, which can be pickled, on all ranks."""
    data = bytearray(pickle.dumps(mine)) if ranks.rank == root else bytearray()
    size = torch.tensor([len(data)], dtype=torch.float64)
    ranks.broadcast(size, root)
    data.extend(bytes(-int(size) % 4 + int(size) - len(data)))
    ranks.broadcast(torch.frombuffer(data, dtype=torch.float32), root)
    return mine if ranks.rank == root else pickle.loads(data)


def all_gather_object(mine: Any, ranks: SharedSum) -> list[Any]:
    """Return the objects of all ranks, in their order."""
    return [broadcast_object(mine, root, ranks) for root in range(ranks.ranks)]


# Whether the ranks have the same weights and gradients, so that the update of one is that of all.

_COMPARED = 16
"""Parameters of which ranks compare one number in each step: others in the next step."""


class ReplicaChecksum:
    """Numbers that are the same on ranks whose parameters are alike, and almost surely not on others.

    To compare all would take a turn through memory. But gradients that are not reduced differ everywhere, so a few of
    their numbers tell; and weights only differ where something else than the step has written, which torch counts.
    """

    def __init__(self) -> None:
        self._versions: dict[Tensor, int] = {}

    def note(self, parameters: Iterable[Tensor]) -> None:
        """These are what the ranks have made alike."""
        self._versions |= {one: version_of(one) for one in parameters}

    def weights(self, parameters: Iterable[Tensor]) -> int:
        """Return the checksum of all weights that were written into since they were noted."""
        written = (one for one in parameters if self._versions.get(one) != version_of(one))
        return zlib.crc32(repr([_sum_of_bits(one) for one in written]).encode())

    def sample(self, parameters: Sequence[Tensor], step: int) -> int:
        """Return the checksum of one number of some gradients, and of their weights."""
        first = step * _COMPARED % max(1, len(parameters))
        some = [*parameters[first:], *parameters[:first]][:_COMPARED]
        numbers = [
            (_number(one.grad, step), _number(one, step)) for one in some if one.grad is not None and one.numel()
        ]
        return zlib.crc32(repr(numbers).encode())


def _sum_of_bits(tensor: Tensor) -> int:
    flat = tensor.detach().contiguous().view(-1)
    return int(flat.view(torch.int16 if flat.itemsize == 2 else torch.int32).sum())


def _number(tensor: Tensor, step: int) -> Any:
    place = step * 7919 % tensor.numel()
    index = []
    for size in reversed(tensor.shape):
        index.append(place % size)
        place //= size
    return tensor.detach()[tuple(reversed(index))].item()


# What a rank updated for its machine, and what state it holds for that.


@dataclass(frozen=True)
class HostUpdateReport(Report):
    """Counts of one rank.

    Attributes:
        steps: that the ranks of the machine did together.
        updated_bytes: of the parameters that this rank updates.
        parameter_bytes: of all that are divided.
        state_bytes: of optimizer state on this rank, while updates were divided.
        whole_state_bytes: that this rank would hold under plain ``ddp``.
        reasons: why every rank does whole steps of an optimizer.
    """

    steps: int = 0
    updated_bytes: int = 0
    parameter_bytes: int = 0
    state_bytes: int = 0
    whole_state_bytes: int = 0
    reasons: tuple[str, ...] = ()

    def beside(self, other: HostUpdateReport) -> HostUpdateReport:
        """Return the report of two optimizers together."""
        return HostUpdateReport(*(getattr(self, one.name) + getattr(other, one.name) for one in fields(self)))

    def what_was_done(self) -> list[str]:
        updated, of = show_bytes(self.updated_bytes), show_bytes(self.parameter_bytes)
        return [f"updates on the host: {self.steps} steps; this rank updates {updated} of {of} of parameters"]

    def what_stayed_plain(self) -> list[str]:
        return [f"whole on every rank: {reason}" for reason in self.reasons]

    def what_was_measured(self) -> list[str]:
        mine, whole = show_bytes(self.state_bytes), show_bytes(self.whole_state_bytes)
        return [f"optimizer state on this rank: {mine}, where plain ddp holds {whole}"]


# Who updates what.


class Shares:
    """Gives whole parameters to ranks: the largest first, each to the rank that has the fewest bytes so far.

    All ranks ask for the same parameters in the same order, so that all give them out alike. What is given out stays
    where it is, as its state does; parameters that come later go to who has the least then.

    Args:
        ranks: how many.
        divisible: those that can be given out: their gradients are the same on all ranks. Others each rank updates.
    """

    def __init__(self, ranks: int, divisible: Collection[Tensor]) -> None:
        self.bytes = [0] * ranks
        self._divisible = frozenset(divisible)
        self._owners: dict[Tensor, int] = {}

    def give_out(self, parameters: Iterable[Tensor]) -> list[Tensor]:
        """Assign the parameters that no rank had so far, and return them."""
        new = [one for one in parameters if one not in self._owners and one in self._divisible]
        for parameter in sorted(new, key=lambda one: -one.nbytes):
            rank = min(range(len(self.bytes)), key=self.bytes.__getitem__)
            self._owners[parameter] = rank
            self.bytes[rank] += parameter.nbytes
        return new

    def owner(self, parameter: Tensor) -> int | None:
        """The rank that updates it; None: all do."""
        return self._owners.get(parameter)

    def may_divide(self, parameter: Tensor) -> bool:
        """Return whether a parameter's gradient is the same on all ranks."""
        return parameter in self._divisible


# The state of an optimizer, put together of the parts that ranks have.

_SENT = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class _Coming:
    """Stands for a tensor that is sent by itself."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype

    def empty(self) -> Tensor:
        return torch.empty_strided(self.shape, self.strides, dtype=self.dtype)


def whole_state(part: dict[int, Any], ranks: SharedSum, *, keep: bool) -> dict[int, Any]:
    """All ranks' states, by the parameter's number; large tensors go one by one, so that nobody needs twice the memory.

    Args:
        part: of this rank; no number is in two ranks' parts.
        ranks: all of them call this.
        keep: whether to return the whole here; else ``part`` comes back.
    """
    whole = dict(part)
    for root in range(ranks.ranks):
        sends = root == ranks.rank
        descriptions = broadcast_object(
            {number: tree_map(_described, state) for number, state in part.items()} if sends else None, root, ranks
        )
        for number in descriptions:
            if sends:
                for tensor in tree_leaves(part[number]):
                    if _is_sent(tensor):
                        broadcast([tensor], root, ranks)
                continue
            state = tree_map(partial(_received, root=root, ranks=ranks), descriptions[number])
            if keep:
                whole[number] = state
    return {number: whole[number] for number in sorted(whole)}


def state_bytes(state: Any) -> int:
    """Return the bytes of the tensors in one parameter's state."""
    return sum(one.nbytes for one in tree_leaves(state) if isinstance(one, Tensor))


def _is_sent(value: Any) -> bool:
    """Return whether a value goes by itself: a large tensor, laid out so that another rank can make one like it."""
    if not isinstance(value, Tensor) or value.layout is not torch.strided:
        return False
    if value.dtype not in _SENT or value.nbytes < SENT_ALONE_BYTES:
        return False
    return torch.empty_like(value, device="meta").stride() == value.stride()


def _described(value: Any) -> Any:
    if _is_sent(value):
        return _Coming(tuple(value.shape), value.stride(), value.dtype)
    # without the rest of the storage that it is a view of
    return value.detach().clone() if isinstance(value, Tensor) else value


def _received(value: Any, root: int, ranks: SharedSum) -> Any:
    if not isinstance(value, _Coming):
        return value
    tensor = value.empty()
    broadcast([tensor], root, ranks)
    return tensor


_PATIENCE = timedelta(seconds=5)
"""How long a rank that failed waits for others to fail too, so that they can put the state together."""


_UNLIKE_SETTINGS = (
    "some ranks have another learning rate, or other settings, in the optimizer's groups (does a scheduler follow a "
    "metric that is logged without sync_dist=True?)"
)


def _plain(value: Any) -> Any:
    """A setting without addresses, so that it is alike on ranks that have the same."""
    value = value.tolist() if isinstance(value, Tensor) else value
    return value if isinstance(value, int | float | str | list | None) else type(value).__name__


class _Does(IntEnum):
    """Action that a rank wants to take with the others."""

    STEP = 0
    STEP_WHOLE = 1
    END = 2
    END_FAILED = 3


class HostUpdate:
    """Divides an optimizer's updates among the ranks of a machine; all ranks make one of these, and remove it.

    Every parameter is updated once per machine, from the gradient that all ranks have, so results do not change. In
    each step ranks check that they update the same parameters, and compare some gradients and all weights that
    something else has changed. If the optimizer cannot be run parameter by parameter, or ranks share no memory, every
    rank updates all, with one ``NoEffectWarning``; also from a later step on, as after a step hook is added.

    While updates are divided, ``optimizer.state_dict()`` and copies of the optimizer are refused, as they would hold a
    part. In DistributedDataParallel's ``join()`` a rank without batches does not step, and the others time out.

    Args:
        optimizer: the same on all ranks. State that is there stays with the rank that updates the parameter.
        parameters: those that are alike on all ranks, on processors; each rank steps others by itself.
        group: whose ranks; None: all.
        timeout: how long another rank may take; None is torch's default.

    Attributes:
        active: whether updates are divided.

    Raises:
        ValueError: parameters on another device.
    """

    @checked
    def __init__(
        self,
        optimizer: Optimizer,
        parameters: Collection[Tensor],
        group: dist.ProcessGroup | None = None,
        timeout: Timeout | None = None,
    ) -> None:
        device = next((one.device for one in parameters if one.device.type != "cpu"), None)
        if device is not None:
            raise ValueError(f"the update on the host takes parameters on processors, not on {device}: leave it out")
        self._optimizer = optimizer
        self._is_first = dist.get_rank(group) == 0
        self._sums = host_sums(group, timeout)
        self._report, self._failed, self._gathers = HostUpdateReport(), False, False
        try:
            reason = self._why_never()
        except BaseException:
            self._sums.close()
            raise
        self.active = reason is None
        if reason is not None:
            self._tell(f"the update on the host has no effect: {reason}", reason)
            self._sums.close()
            return
        self._held, self._states = 0, 0
        self._shares, self._likeness = Shares(self._ranks.ranks, parameters), ReplicaChecksum()
        self._step_method = ReplacedMethod(optimizer, "step", self._step)
        self._copied = ReplacedMethod(optimizer, "__getstate__", self._refuse_copies)
        self._handles = [
            optimizer.register_load_state_dict_post_hook(lambda _: self._after_load()),
            optimizer.register_state_dict_pre_hook(lambda _: self._refuse_part()),
        ]

    def report(self) -> HostUpdateReport:
        """Report of what this rank did so far, and of what it holds."""
        if self.active:
            nbytes = sum(state_bytes(state) for state in self._optimizer.state.values())
            alone = nbytes - self._shared_state_bytes()
            self._report = replace(
                self._report,
                updated_bytes=self._shares.bytes[self._ranks.rank],
                parameter_bytes=sum(self._shares.bytes),
                state_bytes=nbytes,
                whole_state_bytes=max(nbytes, self._report.whole_state_bytes + alone),
            )
        return self._report

    def state_dict(self) -> dict[str, Any]:
        """The optimizer's, on all ranks: whole on the group's first rank, on others only what they have."""
        if not self.active:
            return self._optimizer.state_dict()
        self._refuse_failed()
        self._gathers = True
        try:
            mine = self._optimizer.state_dict()
        finally:
            self._gathers = False
        mine["state"] |= self._whole_state(keep=self._is_first)
        return mine

    def remove(self, *, failed: bool = False) -> None:
        """Give the optimizer its own ``step``, and every rank the whole state.

        Args:
            failed: after an error. If the others do not fail too, within seconds, the optimizer is left with a part of
                its state, and refuses to step or to show it until a state is loaded.
        """
        if not self.active:
            return
        try:
            if not self._failed:
                self._put_together(failed)
        except BaseException:
            self._fail()
            if not failed:
                raise
        finally:
            self._sums.close()

    def _put_together(self, failed: bool) -> None:
        if failed:
            self._ranks.timeout = min(_PATIENCE, self._ranks.timeout)
        self._agree(_Does.END_FAILED if failed else _Does.END)
        self.report()
        whole = self._whole_state(keep=True)
        state, parameters = self._optimizer.state, self._parameters()
        for number in whole:
            state.pop(parameters[number], None)
            state[parameters[number]] = whole[number]
        self._let_go()

    @property
    def _ranks(self) -> SharedSum:
        shared = self._sums.shared
        assert shared is not None
        return shared

    def _why_never(self) -> str | None:
        """The same on all ranks of a machine."""
        if self._sums.shared is None:
            return f"ranks do not share memory ({self._sums.note})"
        mine = why_not_separable(self._optimizer) or why_not_this_step(self._optimizer)
        if mine is None and any(hasattr(self._optimizer, name) for name in ("train", "eval")):  # schedule-free
            mine = "its train() and eval() read the states of all parameters, of which each rank would have a part"
        return next(filter(None, all_gather_object(mine, self._sums.shared)), None)

    def _step(self, closure: Callable[[], Any] | None = None) -> Any:
        self._refuse_failed()
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        stepped = [one for one in self._parameters() if one.grad is not None]
        mine = why_not_separable(self._optimizer)
        try:
            whole = self._agree(_Does.STEP if mine is None else _Does.STEP_WHOLE, stepped)
            if not whole:
                self._step_share(stepped)
            else:
                reason = next(filter(None, all_gather_object(mine, self._ranks)), _UNLIKE_SETTINGS)
        except BaseException:
            self._fail()
            raise
        if whole:
            self.remove()
            self._tell(f"the update on the host has no effect from here on: {reason}", reason)
            self._step_method.inner()
        return loss

    def _step_share(self, stepped: list[Tensor]) -> None:
        for parameter in (new := self._shares.give_out(stepped)):
            if not self._is_here(parameter):
                self._optimizer.state.pop(parameter, None)
        others = [(one, one.grad) for one in stepped if not self._is_here(one)]
        for parameter, _ in others:
            parameter.grad = None
        try:
            self._step_method.inner()
        finally:
            for parameter, gradient in others:
                parameter.grad = gradient
        if new and (reason := next(filter(None, all_gather_object(self._why_not_sent(), self._ranks)), None)):
            raise RuntimeError(f"{reason}: leave out update_on_host")
        with torch.no_grad():
            for rank in range(self._ranks.ranks):
                broadcast([one for one in stepped if self._shares.owner(one) == rank], rank, self._ranks)
        self._likeness.note(one for one in stepped if self._shares.may_divide(one))
        self._report = replace(self._report, steps=self._report.steps + 1)

    def _agree(self, does: _Does, stepped: Sequence[Tensor] = ()) -> bool:
        """Make sure that the ranks do the same now; returns whether they cannot step shares, or not by like settings.

        Raises:
            RuntimeError: they do not, or would step other parameters, or the same ones from other gradients.
        """
        shared = [one for one in stepped if self._shares.may_divide(one)]
        stepping = set(shared)
        which = zlib.crc32(bytes(one in stepping for one in self._parameters()))
        weights, sample = self._likeness.weights(shared), self._likeness.sample(shared, self._report.steps)
        if does >= _Does.END or len(self._optimizer.state) != self._states:
            self._held, self._states = self._shared_state_bytes(), len(self._optimizer.state)
        mine = [dist.get_rank(), does, self._held, which, weights, sample, self._settings()]
        ranks, do, state_sizes, steps, written, samples, settings = zip(
            *all_gather_floats(mine, self._ranks), strict=True
        )
        self._report = replace(self._report, whole_state_bytes=int(sum(state_sizes)))
        if len({one >= _Does.END for one in do}) > 1:
            other, what = next(
                (int(rank), one)
                for rank, one in zip(ranks, do, strict=True)
                if (one >= _Does.END) != (does >= _Does.END)
            )
            ended = "failed; see its own error" if what == _Does.END_FAILED else "has ended its training"
            kind = RankLostError if what == _Does.END_FAILED else RuntimeError
            raise kind(f"rank {other} {'still steps' if what < _Does.END else ended}")
        if does >= _Does.END or _Does.STEP_WHOLE in do or len(set(settings)) > 1:
            return True
        if len(set(steps)) > 1:
            raise RuntimeError(
                "the ranks have gradients of different parameters, so they cannot divide the update: let all ranks use "
                "and clear the same ones, or leave out update_on_host"
            )
        if len(set(written)) > 1 or len(set(samples)) > 1:
            what = "weights" if len(set(written)) > 1 else "gradients, or weights"
            raise RuntimeError(
                f"the ranks have different {what}, so the update of one is not that of all: step after a backward pass "
                "that synchronises, change gradients and weights alike on all ranks, or leave out update_on_host"
            )
        return False

    def _settings(self) -> int:
        """A number for learning rates and whatever else the groups have; another one where ranks have others."""
        groups = [sorted({**group, "params": len(group["params"])}.items()) for group in self._optimizer.param_groups]
        return zlib.crc32(repr(tree_map(_plain, groups)).encode())

    def _parameters(self) -> list[Tensor]:
        return [one for group in self._optimizer.param_groups for one in group["params"]]

    def _is_here(self, parameter: Tensor) -> bool:
        return self._shares.owner(parameter) in (None, self._ranks.rank)

    def _shared_part(self) -> dict[int, Any]:
        """This rank's part of what is divided, by the parameter's number in ``optimizer.state_dict()``."""
        state, rank = self._optimizer.state, self._ranks.rank
        return {
            number: state[one]
            for number, one in enumerate(self._parameters())
            if self._shares.owner(one) == rank and one in state
        }

    def _shared_state_bytes(self) -> int:
        return sum(state_bytes(state) for state in self._shared_part().values())

    def _whole_state(self, *, keep: bool) -> dict[int, Any]:
        with torch.no_grad():
            return whole_state(self._shared_part(), self._ranks, keep=keep)

    def _after_load(self) -> None:
        if self._failed:
            self._failed = False
            self._let_go()
            return
        for parameter in self._parameters():
            if not self._is_here(parameter):
                self._optimizer.state.pop(parameter, None)

    def _let_go(self) -> None:
        self.active = False
        self._step_method.restore()
        self._copied.restore()
        for handle in self._handles:
            handle.remove()

    def _fail(self) -> None:
        """Other ranks' exchanges end, with this one's name."""
        if not self._failed:
            self._failed = True
            self._sums.stop()

    def _tell(self, text: str, reason: str) -> None:
        self._report = replace(self._report, reasons=(reason,))
        warn_no_effect(text)

    def _refuse_failed(self) -> None:
        if self._failed:
            raise RuntimeError(
                "training failed while the ranks of the machine divided the update, so this one has a part of the "
                "optimizer's state only: load a state into the optimizer before it steps"
            )

    def _refuse_part(self) -> None:
        self._refuse_failed()
        if not self._gathers:
            raise RuntimeError(
                "this rank has a part of the optimizer's state only, as the ranks of the machine divide the update: "
                "call Trainer.save_checkpoint() (or HostUpdate.state_dict()) on all ranks"
            )

    def _why_not_sent(self) -> str | None:
        """Reason why no other rank could take over the state that this one has."""
        try:
            for state in self._shared_part().values():
                pickle.dumps(tree_map(_described, state))
        except Exception as error:  # a value's own, when it is pickled
            return f"{type(self._optimizer).__name__} keeps state that cannot be sent to other ranks ({error})"
        return None

    def _refuse_copies(self) -> Any:
        self._refuse_part()
        return self._copied.inner()
