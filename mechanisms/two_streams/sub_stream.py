"""The stream beside the main one: a second thread with cores of its own on a CPU, a CUDA stream on CUDA.

Both take jobs in the order in which they are given and end them all in :meth:`join`. A job reads tensors that the main
stream wrote before it was given, and its result is read behind ``join`` only.

Section 4.1 of Oh et al. (2022) puts weight gradients and weight updates on the sub-stream. An update there, right
behind its weight gradient, is backward fusion (Jiang et al. 2021, Table 1: locality and parallelism) with another place
for some updates, so the rest is backward fusion's: which step is fused, gradients of several passes, guards in place of
used-up gradients, errors.

An update writes the weight that the layer's output gradient reads. So a layer hands its weight gradient on behind its
output gradient: then a CUDA stream waits for it, and on a CPU it has run. Other readers hold the update back: another
call of the layer that waits for its backward pass, and an alias of the weight. Who else reads the weight gives it a
gradient too, in the first step mostly, and then the layer stays in order; later that ends with backward fusion's error.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from retime.foundations.lazy_updates import PartialOptimizer
from retime.foundations.streams import SideStream, has_streams
from retime.mechanisms.fusion import BackwardFusion, FusedParameter, fusion_blockers, refuse_more_gradients

Compute = Callable[[], Sequence[Tensor | None]]


class Job:
    """Weight gradients of one call of a layer.

    Args:
        compute: returns them; it holds what they are computed from.
        size_bytes: of the tensors that would be free without it.
        layer: its name.
    """

    def __init__(self, compute: Compute, size_bytes: int, layer: str) -> None:
        self.compute: Compute | None = compute
        """None: it has run, or is at it."""
        self.size_bytes = size_bytes
        self.layer = layer
        self.gradients: Sequence[Tensor | None] = ()
        self.error: BaseException | None = None
        self.on_sub_stream = False

    def run(self, *, on_sub_stream: bool) -> None:
        """Compute; what fails is kept for :meth:`SubStream.join`, whichever thread this is."""
        compute, self.compute = self.compute, None
        self.on_sub_stream = on_sub_stream
        try:
            if compute is not None:
                with torch.no_grad():
                    self.gradients = compute()
        except BaseException as error:
            self.error = error


class CoreStream:
    """A thread that runs jobs on cores of its own while the main thread goes on: PyTorch's kernels release the GIL.

    In :meth:`join` the main thread runs what is left, from the other end, so that neither waits while there is work.

    Args:
        threads: of each kernel here; the number decides how oneDNN rounds.
    """

    def __init__(self, threads: int) -> None:
        self._threads = threads
        self._queue = _Queue()
        self._process = 0
        self._thread: threading.Thread | None = None
        self._close = weakref.finalize(self, self._queue.close)

    def give(self, job: Job) -> None:
        """Let the thread run it; the first job starts the thread, also in a process that was forked since."""
        if self._thread is None or self._process != os.getpid():
            self._start()
        self._queue.put(job)

    @property
    def held_bytes(self) -> int:
        """Return the bytes that jobs hold which have not begun."""
        return self._queue.held_bytes

    def run_oldest(self) -> bool:
        """Run the job that has waited longest on the calling thread; False: none waits."""
        job = self._queue.take_first()
        if job is not None:
            job.run(on_sub_stream=False)
        return job is not None

    def join(self) -> None:
        """Run what is left on the calling thread too, and wait for the other's last job."""
        while (job := self._queue.take_last()) is not None:
            job.run(on_sub_stream=False)
        self._queue.wait_for_thread()

    def drop(self) -> None:
        """Run nothing more of what was given; the job that is running ends."""
        while self._queue.take_last() is not None:
            pass
        self._queue.wait_for_thread()

    def close(self) -> None:
        """End the thread."""
        self._close()
        if self._thread is not None and self._process == os.getpid():
            self._thread.join()
        self._thread = None

    def _start(self) -> None:
        if self._thread is not None:  # that process's
            self._close.detach()
            self._queue = _Queue()
            self._close = weakref.finalize(self, self._queue.close)
        self._process = os.getpid()
        threads_here = torch.get_num_threads()
        ready = threading.Event()
        self._thread = threading.Thread(
            target=_run_jobs, args=(self._queue, self._threads, ready), name="retime sub-stream", daemon=True
        )
        self._thread.start()
        ready.wait()
        torch.set_num_threads(threads_here)  # threads that start later take the number that was set last


class _Queue:
    """Jobs that wait, and whether the thread is at one."""

    def __init__(self) -> None:
        self._jobs: deque[Job] = deque()
        self._changed = threading.Condition()
        self._is_running = False
        self._is_closed = False
        self.held_bytes = 0

    def put(self, job: Job) -> None:
        with self._changed:
            self._jobs.append(job)
            self.held_bytes += job.size_bytes
            self._changed.notify()

    def take_first(self) -> Job | None:
        with self._changed:
            return self._take(self._jobs.popleft) if self._jobs else None

    def take_last(self) -> Job | None:
        with self._changed:
            return self._take(self._jobs.pop) if self._jobs else None

    def _take(self, one: Callable[[], Job]) -> Job:
        job = one()
        self.held_bytes -= job.size_bytes
        return job

    def wait_for_job(self) -> Job | None:
        """Return the thread's next job; None: it is to end."""
        with self._changed:
            self._is_running = False
            self._changed.notify_all()
            while not self._jobs and not self._is_closed:
                self._changed.wait()
            if self._is_closed:
                return None
            self._is_running = True
            return self._take(self._jobs.popleft)

    def wait_for_thread(self) -> None:
        with self._changed:
            while self._is_running:
                self._changed.wait()

    def close(self) -> None:
        with self._changed:
            self._is_closed = True
            self._jobs.clear()
            self._changed.notify_all()


def _run_jobs(queue: _Queue, threads: int, ready: threading.Event) -> None:
    torch.get_num_threads()  # from here on another thread's number is no longer taken over, as with the first kernel
    torch.set_num_threads(threads)
    ready.set()
    while True:
        job = queue.wait_for_job()
        if job is None:
            return
        job.run(on_sub_stream=True)
        del job  # what it holds, before the next is waited for


class DeviceStream:
    """A CUDA stream of the lowest priority.

    A job waits for the event of its output gradient. What it reads is held until the main stream waits for the job,
    instead of being marked with ``record_stream``; what it writes is used behind that wait. Its memory comes from the
    allocator's pool of this stream, of which each job waits for the main stream first.

    Args:
        device: a CUDA device.
        places: by names of layers whose jobs are held back, those of the layers whose jobs they are issued before; a
            name that no layer has: at the end.
    """

    def __init__(self, device: torch.device, places: Mapping[str, str]) -> None:
        self._device = device
        self._places = places
        self._side = SideStream(device)
        self._given_on: set[torch.cuda.Stream] = set()
        self._held_back: dict[str, list[Job]] = {}
        """Jobs that are not issued yet, by the layer that they wait for."""
        self.held_bytes = 0
        """Of jobs that the main stream has not waited for."""

    def give(self, job: Job) -> None:
        """Issue what waits for its layer, and it behind all that the current stream has been given, or hold it back."""
        self.held_bytes += job.size_bytes
        for earlier in self._held_back.pop(job.layer, ()):
            self._issue(earlier)
        if job.layer in self._places:
            self._held_back.setdefault(self._places[job.layer], []).append(job)
        else:
            self._issue(job)

    def _issue(self, job: Job) -> None:
        self._given_on.add(torch.cuda.current_stream(self._device))
        with self._side.after_current(hold=[job.compute]):
            job.run(on_sub_stream=True)

    def run_oldest(self) -> bool:
        """Let the main stream wait for all jobs, whose tensors are free then; False: there is none."""
        some = self.held_bytes > 0
        self.join()
        return some

    def join(self) -> None:
        """Issue what is held back, and let the streams wait for all jobs."""
        for jobs in self._held_back.values():
            for job in jobs:
                self._issue(job)
        self.drop()

    def drop(self) -> None:
        """Issue nothing more, and let the streams wait for what was.

        They are those that gave jobs, and the current one, which is another one in autograd's thread.
        """
        self._held_back.clear()
        for stream in self._given_on | {torch.cuda.current_stream(self._device)}:
            with torch.cuda.stream(stream):
                self._side.join()
        self._given_on.clear()
        self.held_bytes = 0

    close = drop


SubStream = CoreStream | DeviceStream


def sub_stream_of(device: torch.device, threads: int, places: Iterable[tuple[str, str]]) -> SubStream:
    """Return a stream beside the current one of this device: on a CPU with so many threads a kernel, on CUDA with these
    places of jobs."""
    return DeviceStream(device, dict(places)) if has_streams(device) else CoreStream(threads)


# Updates on the sub-stream, each right behind its weight gradient.


class TwoStreams(Protocol):
    """Caller that asks a fusion of each weight gradient that goes to the sub-stream."""

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
            one.updated = one.writes()
            one.put_guard()
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
