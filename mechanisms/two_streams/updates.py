"""Updates on the sub-stream, each right behind its weight gradient (Oh et al. 2022, section 4.1).

Section 4.1 puts weight gradients and weight updates on the sub-stream. It is backward fusion (Jiang et al. 2021,
Table 1: locality and parallelism) with another place for some updates, so the rest is backward fusion's: which step is
fused, gradients of several passes, guards in place of used-up gradients, errors.

An update writes the weight that the layer's output gradient reads. So a layer hands its weight gradient on behind its
output gradient: then a CUDA stream waits for it, and on a CPU it has run. Other readers hold the update back: another
call of the layer that waits for its backward pass, and an alias of the weight. Who else reads the weight gives it a
gradient too, in the first step mostly, and then the layer stays in order; later that ends with backward fusion's error.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from retime.foundations.lazy_updates import PartialOptimizer
from retime.foundations.torch_private.tensors import version_of
from retime.mechanisms.fusion import BackwardFusion, FusedParameter, fusion_blockers, refuse_more_gradients

Compute = Callable[[], Sequence[Tensor | None]]


class TwoStreams(Protocol):
    """What asks a fusion of each weight gradient that goes to the sub-stream."""

    def begin_pass(self) -> object:
        """From now on a failure of the backward pass that is under way abandons its updates."""

    def leave(self, fusion: SubStreamFusion) -> None:
        """Ask this fusion no more."""

    def forget_calls(self) -> None:
        """A step has ended, or failed: no weight is kept for a backward pass."""

    def end_jobs(self) -> None:
        """Drop what a backward pass left behind that failed, and wait for what is under way."""


class SubStreamFusion(BackwardFusion):
    """Backward fusion whose updates run on the sub-stream where the weight gradient does, and else as they come.

    Args:
        options: of :class:`retime.mechanisms.fusion.BackwardFusion`.
    """

    def __init__(self, optimizer: Optimizer, two_streams: TwoStreams, **options: Any) -> None:
        super().__init__(optimizer, **options)
        self._two_streams = two_streams
        self._sub_window: PartialOptimizer | None = None
        """As an update changes its window, each thread has one."""
        self._main_thread = 0
        self._beside: set[FusedParameter] = set()
        """Whose gradients go to the sub-stream in this pass; autograd calls their hooks all the same."""
        self._handles: list[RemovableHandle] = []

    def take(self, parameters: Sequence[Tensor | None], *, update: bool) -> list[FusedParameter]:
        """Hear that the gradients of a layer's parameters go to the sub-stream.

        Args:
            parameters: that get one.
            update: whether nothing but the output gradient, which has been computed, reads them in this pass.

        Returns:
            Those whose update is to follow; their gradients are counted.
        """
        followed = [self._followed[p] for p in parameters if p is not None and p in self._followed]
        self._beside.update(followed)
        if not update or not self.fuses_now():
            return []
        if self._window is None:
            self._window = PartialOptimizer(self.optimizer)
        if self._sub_window is None:  # on this thread: it looks into the state, which updates change
            self._sub_window = PartialOptimizer(self.optimizer)
        self._main_thread = threading.get_ident()
        last = [
            one
            for one in followed
            if one.uses and one.fired + 1 == one.uses and not one.used and id(one.parameter) in self._window.group_of
        ]
        taken = [one for one, blocker in zip(last, fusion_blockers(last), strict=True) if blocker is None]
        for one in taken:
            one.fired += 1
            one.used = True
            self._refuse_other_uses(one)
        return taken

    def _refuse_other_uses(self, followed: FusedParameter) -> None:
        def came(total: Tensor | None) -> None:
            if total is not None:
                followed.fired += 1
                refuse_more_gradients(followed)

        self._handles.append(followed.parameter.register_hook(came))  # type: ignore[no-untyped-call]

    def on_gradient(self, followed: FusedParameter, parameter: Tensor) -> None:
        if followed not in self._beside:
            self._two_streams.begin_pass()
            super().on_gradient(followed, parameter)

    def compute(self, compute: Compute, parameters: Sequence[Tensor | None], taken: list[FusedParameter]) -> Any:
        """Compute gradients and update what was taken, on either thread; returns the gradients that are left."""
        gradients = list(compute())
        for index, parameter in enumerate(parameters):
            gradient = gradients[index]
            if gradient is not None and any(one.parameter is parameter for one in taken):
                assert parameter is not None
                add_gradient(parameter, gradient)
                gradients[index] = None
        del gradient
        window = self._window if threading.get_ident() == self._main_thread else self._sub_window
        assert window is not None
        self._step(window, [one.parameter for one in taken])
        for one in taken:
            one.version = version_of(one.parameter)
            if self._guard_at_once:
                one.put_guard()
            else:
                one.parameter.grad = None
        return gradients

    def note(self, taken: list[FusedParameter]) -> None:
        """Count these updates, which have run."""
        self._beside.difference_update(taken)
        self._remove_handles()
        for one in taken:
            self._live_bytes -= one.live_bytes
            one.live_bytes = 0
        self._note_bucket(len(taken), sum(one.parameter.nbytes for one in taken))

    def gradient_came(self, parameter: Tensor) -> None:
        """A gradient that was not taken has come from the sub-stream."""
        followed = self._followed.get(parameter)
        if followed is not None:
            self._beside.discard(followed)
            super().on_gradient(followed, parameter)

    def _close(self) -> None:
        super()._close()
        self._sub_window = None
        self._beside.clear()
        self._remove_handles()
        self._two_streams.forget_calls()

    def _remove_handles(self) -> None:
        while self._handles:
            self._handles.pop().remove()

    def _join(self) -> None:
        super()._join()
        self._two_streams.end_jobs()

    def remove(self) -> None:
        """Take all hooks and guards off; the optimizer keeps its state."""
        self._two_streams.leave(self)
        super().remove()


def add_gradient(parameter: Tensor, gradient: Tensor) -> None:
    """Add to ``.grad`` as autograd does."""
    there = parameter.grad
    if there is not None:
        there.add_(gradient)
    elif gradient.stride() == parameter.stride():
        parameter.grad = gradient
    else:
        parameter.grad = torch.empty_like(parameter).copy_(gradient)
