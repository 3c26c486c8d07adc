"""Activations leave the device during the forward pass and come back during the backward pass (moDNN, section 5.2).

    host = parse_host("disk:/var/tmp", "cpu")
    with OffloadSavedTensors(plan, host, keep=[*model.parameters(), *model.buffers(), *batch]) as offload:
        loss = model(batch)
    loss.backward()
    print(offload.report())

The numbers stay the same: what comes back is what left, bit by bit, and it leaves when nothing but the graph holds it
any more, so that nothing can write into it. Autograd saves tensors; what moves is storages, so several views of one
storage move once and come back as one storage. Memory that torch has not allocated (NumPy's, say) stays.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from types import TracebackType

import torch
from torch import Tensor

from retime.foundations.arguments import checked
from retime.foundations.messages import Report, parse_bytes, show_bytes
from retime.foundations.torch_private.engine import next_sequence_number, top_saved_tensors_hooks
from retime.mechanisms.memory_budget.offload.passes import ForwardPass, SaveObserver
from retime.mechanisms.memory_budget.offload.tier import HostNone, HostTier, check_host
from retime.schedules.budget import OffloadPlan
from retime.schedules.errors import ScheduleError

_WHOLE_PASSES = 17  # with 2, 4 or 8 parts to a batch it is another part each time
"""One of so many passes is watched to its end."""


@dataclass
class OffloadReport(Report):
    """Report of what an :class:`OffloadSavedTensors` did in all its forward passes.

    Attributes:
        passes: forward passes.
        storages: storages that went to the host.
        bytes_out, bytes_in: bytes copied to the host and back.
        bytes_skipped: bytes that copying every saved tensor would have moved once more.
        stalls: how often the step had to wait for a copy.
        prefetched: storages that were asked for before they were needed.
        mismatches: passes that did not fit the plan, of those that were watched to their end.
    """

    passes: int = 0
    storages: int = 0
    bytes_out: int = 0
    bytes_in: int = 0
    bytes_skipped: int = 0
    stalls: int = 0
    prefetched: int = 0
    mismatches: int = 0

    def what_was_done(self) -> list[str]:
        moved = f"{show_bytes(self.bytes_out)} out and {show_bytes(self.bytes_in)} back"
        return [f"offload: {self.storages} storages in {self.passes} forward passes, {moved}"]

    def what_stayed_plain(self) -> list[str]:
        return [f"{self.mismatches} forward passes that did not fit the plan"] if self.mismatches else []

    def what_was_measured(self) -> list[str]:
        return [
            f"{self.stalls} waits for a copy, {self.prefetched} storages asked for before they were needed",
            f"{show_bytes(self.bytes_skipped)} more would move if each saved tensor did",
        ]

    @classmethod
    def total(cls, reports: Sequence[OffloadReport]) -> OffloadReport | None:
        """All of these; None if there are none."""
        if not reports:
            return None
        return cls(*(sum(getattr(report, name) for report in reports) for name in cls.__dataclass_fields__))


class PlanMismatch(ScheduleError):  # noqa: N818  # callbacks take it as news, not only as an error
    """A forward pass saved other storages than the plan was made for.

    Attributes:
        saved: how many storages it saved.
        planned: how many the plan has.
    """

    def __init__(self, saved: int, planned: int) -> None:
        self.saved, self.planned = saved, planned
        super().__init__(
            f"the forward pass saved {saved} storages, but its plan has {planned}: the batch has another shape, or the "
            "model took another way. Make a plan for this shape, or bring all batches to one shape"
        )


_REFUSES_HOOKS = "support saved tensor hooks"
"""So ``torch.func`` says it."""


class NoHooksError(RuntimeError):
    """The forward pass refuses to run under saved-tensor hooks, so nothing that it saves can be offloaded."""

    def __init__(self) -> None:
        super().__init__(
            "nothing can be offloaded, because the forward pass calls torch.func.grad, vjp, jacrev or hessian, which "
            "do not run under saved-tensor hooks"
        )


@checked
@dataclass(eq=False)
class OffloadSavedTensors:
    """A context manager around a forward pass that moves what the plan names to the host.

    Use it around the forward pass only, as often as wanted; the backward pass runs outside. Tensors that are no strided
    window on one storage (sparse, nested, subclasses), zero-size ones, and those on other devices stay where they are
    and have no number, and so do storages saved while a backward pass runs.

    Hooks cost each saved tensor some microseconds. So most passes are left alone once the last storage that moves has
    been saved for the last time, as far as passes before tell; the first and every 17th are watched to their end, and
    only these are compared with the plan. So are all up to the next 17th once a pass makes another number of nodes.
    Where nothing is to move, to be compared or to be observed, and with :class:`HostNone`, there are no hooks at all.

    Args:
        plan: which storages move, numbered by when the forward pass first saves them. ``saved=0`` means that their
            number is not known: then nothing is compared.
        host: where they go.
        keep: tensors whose storages never move and have no number: parameters, buffers, the batch. May be set anew
            before each forward pass.
        in_flight_bytes: storages that a copy still reads may hold that much memory after the model has let go of them,
            which is when it begins. 0 waits for every copy. They are let go of in order and as late as this allows, so
            that the peak does not depend on the disk's mood.
        on_mismatch: called with the error when a pass that was watched to its end does not fit the plan; without it the
            error is raised at the end of the forward pass.
        observer: is told what is saved and fetched, for a profile.

    Raises:
        HostError: when the host fails; see there.
        NoHooksError: at the end of a forward pass that cannot run under hooks.
        PlanMismatch: see ``on_mismatch``.
    """

    plan: OffloadPlan
    host: HostTier
    keep: Iterable[Tensor] = ()
    in_flight_bytes: int | str = 0
    on_mismatch: Callable[[PlanMismatch], None] | None = None
    observer: SaveObserver | None = None
    _counts: OffloadReport = field(default_factory=OffloadReport, init=False)
    _pass: ForwardPass | None = field(default=None, init=False)
    _hooks: torch.autograd.graph.saved_tensors_hooks | None = field(default=None, init=False)
    _entered: bool = field(default=False, init=False)
    _planned: int = field(default=0, init=False)
    _tail: int | None = field(default=None, init=False)
    _began: int = field(default=0, init=False)
    _nodes: int | None = field(default=None, init=False)
    _steady: bool = field(default=True, init=False)

    def __post_init__(self) -> None:
        check_host(self.host)
        self.in_flight_bytes = parse_bytes("in_flight_bytes", self.in_flight_bytes, least=0)
        self._planned = 1 + max(self.plan.offload, default=-1)

    def __enter__(self) -> OffloadSavedTensors:
        if self._entered:
            raise RuntimeError("this OffloadSavedTensors is already around a forward pass: make another one to nest")
        if self._pass is not None:
            self._pass.settle()
        if self._counts.passes % _WHOLE_PASSES == 0:
            self._tail, self._nodes, self._steady = None, None, True
        # With hooks around these, ours may not leave the rest of the pass to them.
        nested = top_saved_tensors_hooks(True) is not None
        self._pass = ForwardPass(
            self.plan, self.host, self.keep, int(self.in_flight_bytes), self._counts, observer=self.observer
        )
        if self._tail is not None and self._steady and not nested and self.observer is None:
            self._pass.end_at(max(self._tail, self._planned), self._unhook)
        if self._hooked:
            # A compiled region calls them for what it saves; they are not a part of what it compiles.
            pack, unpack = (torch.compiler.disable(hook) for hook in (self._pass.pack, self._pass.unpack))  # type: ignore[no-untyped-call]
            self._hooks = torch.autograd.graph.saved_tensors_hooks(pack, unpack)
            self._hooks.__enter__()
        self._entered = True
        self._counts.passes += 1
        self._began = next_sequence_number()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._pass is not None, "left without having been entered"
        whole = self._hooks is not None or not self._hooked
        self._entered = False
        self._unhook()
        if error is not None:
            self._pass.abandon()
            if isinstance(error, RuntimeError) and _REFUSES_HOOKS in str(error):
                raise NoHooksError from error
            return
        self._pass.close()
        nodes = next_sequence_number() - self._began
        self._steady &= self._nodes in (None, nodes)
        self._nodes = nodes
        if not whole:
            return
        self._tail, saved = self._pass.tail, len(self._pass.sizes)
        if self.plan.saved in (0, saved):
            return
        self._counts.mismatches += 1
        self._tail = None
        mismatch = PlanMismatch(saved, self.plan.saved)
        if self.on_mismatch is None:
            self._pass.abandon()
            raise mismatch
        self.on_mismatch(mismatch)

    @property
    def _hooked(self) -> bool:
        needed = self.plan.saved > 0 or self.observer is not None
        return needed and not isinstance(self.host, HostNone)

    def _unhook(self) -> None:
        hooks, self._hooks = self._hooks, None
        if hooks is not None:
            hooks.__exit__(None, None, None)

    @property
    def sizes(self) -> list[int]:
        """Bytes of each storage that the last pass saved, by number, as far as it was watched."""
        return [] if self._pass is None else self._pass.sizes

    @property
    def ended(self) -> bool:
        """No forward pass is under way, and nothing that the last one moved is waited for any more."""
        return self._pass is None or self._pass.ended

    def report(self) -> OffloadReport:
        """Report of what was moved so far."""
        return replace(self._counts)
