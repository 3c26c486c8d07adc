"""Backward fusion: update parameters while the backward pass runs (Jiang et al. 2021, section 3, algorithm 3).

A parameter is updated once its gradient is complete and nothing needs its old value:

* Autograd adds up all uses of a parameter within one graph before its accumulation hook fires. What it cannot add up
  are several graphs: a second ``backward()`` before the step, or the nested backward of reentrant checkpointing. So the
  first step of every parameter runs the plain way while its firings are counted (``theta.count`` of algorithm 3),
  unless an adapter knows that there is one graph; later steps update it at the last one. Fewer firings leave it to
  ``optimizer.step()``; more raise an error.
* A node that still needs the old value (section B.2) either contributes to the gradient, and so ran before the hook; or
  saved an alias of the parameter, which is found and holds the update back; or saved the parameter itself, and
  autograd's version check raises. What cannot be seen is a checkpointed segment that will read, without a gradient, a
  parameter whose gradient is complete by then: use mode='forward' for such a model.

Updates go by *buckets* of gradients in order of arrival, so the optimizer's multi-tensor and fused kernels are kept,
and each bucket's gradients are freed at once; on a CPU they come from a pool where that pays (see
:mod:`~retime.mechanisms.fusion.gradient_memory`). For the freed memory to be used again without it, nothing small may
be allocated between two gradients and outlive them: glibc's aligned allocations would not merge again, and every
gradient would take new pages (seen as 17,000 page faults a step). So all bookkeeping of a step lives in records made
once.
"""

from typing import Annotated, Any

from torch import Tensor
from torch.optim import Optimizer

from retime.foundations.arguments import Above, AtLeast, checked
from retime.foundations.lazy_updates import OptimizerWindow, nbytes
from retime.foundations.no_effect import warn_no_effect
from retime.foundations.streams import SideStream
from retime.foundations.torch_private import version_of
from retime.mechanisms.fusion.alive_gradients import AliveGradients
from retime.mechanisms.fusion.arming import Arming
from retime.mechanisms.fusion.bucket_bytes import check_bucket_bytes, default_bucket_bytes, parameters_of
from retime.mechanisms.fusion.clipping import clip_by_value
from retime.mechanisms.fusion.followed import Followed
from retime.mechanisms.fusion.gradient_guard import GradientGuard
from retime.mechanisms.fusion.gradient_memory import GradientMemory
from retime.mechanisms.fusion.own_step import OwnStep
from retime.mechanisms.fusion.python_nodes import has_python_nodes
from retime.mechanisms.fusion.refusals import (
    refuse_changes,
    refuse_more_gradients,
    refuse_new_hyper_parameters,
    refuse_second_derivative,
)
from retime.mechanisms.fusion.report import FusionReport
from retime.mechanisms.fusion.unfused import why_unfused


class BackwardFusion(Arming):
    """Updates the optimizer's parameters inside ``backward()``; see :func:`retime.mechanisms.fusion.fuse_optimizer`.

    Args:
        optimizer: its parameters' hooks are taken until :meth:`remove`.
        bucket_bytes: of gradients gathered before one multi-tensor update, or a text such as ``"4MiB"``; None: by the
            parameters' size and device.
        clip_value: clamps every gradient element to [-clip_value, clip_value] first, as
            ``torch.nn.utils.clip_grad_value_`` does.
        side_stream: on CUDA: updates on a stream of their own.
        backward_passes: in each step; None: the first step counts them.
        armed: whether gradients are used up as they come. A bare loop leaves it on; an adapter switches it on for the
            one backward pass that belongs to a step.
        guard_at_once: whether reads of a used-up gradient raise from that moment on. An adapter that knows all readers
            up to the end of the step turns it off and calls :meth:`end_step`, which puts the guards then.
    """

    @checked
    def __init__(
        self,
        optimizer: Optimizer,
        *,
        bucket_bytes: int | str | None = None,
        clip_value: Annotated[float, Above(0)] | None = None,
        side_stream: bool = False,
        backward_passes: Annotated[int, AtLeast(1)] | None = None,
        armed: bool = True,
        guard_at_once: bool = True,
    ) -> None:
        super().__init__(armed=armed)
        self.optimizer = optimizer
        self._guard_at_once = guard_at_once
        self.backward_passes = backward_passes
        self.clip_value = clip_value
        self.bucket_bytes = check_bucket_bytes(bucket_bytes) or default_bucket_bytes(parameters_of(optimizer))
        self._side = SideStream() if side_stream else None
        self._report = FusionReport(mode="backward")
        self._followed: dict[Tensor, Followed] = {}
        self._alive = AliveGradients(self._report)
        self._memory = self._gradient_memory()
        self._bucket: list[Followed] = []
        self._bucket_size = 0
        self._window: OptimizerWindow | None = None
        self._own_step: OwnStep | None = None
        self.follow_new_parameters()

    def __reduce__(self) -> Any:
        """A copy fuses the copied optimizer, and counts a first step of its own."""
        if type(self) is not BackwardFusion:
            raise TypeError("a fusion under DDP cannot be copied: fuse the copied optimizer, or call .remove() first")
        options = {
            "bucket_bytes": self.bucket_bytes,
            "clip_value": self.clip_value,
            "side_stream": self._side is not None,
            "backward_passes": self.backward_passes,
            "armed": self.armed,
            "guard_at_once": self._guard_at_once,
        }
        return _fuse_again, (self.optimizer, options, self._own_step is not None, self._report)

    def complete_in_step(self) -> None:
        """Let ``optimizer.step()`` of a hand-written loop update what the backward pass left over."""
        self._own_step = OwnStep(self.optimizer, self.begin_rest, self.end_step)

    def follow_new_parameters(self) -> None:
        """Put the hook on parameters that joined the optimizer, or were unfrozen, since the last call."""
        for parameter in parameters_of(self.optimizer):
            if parameter.requires_grad and parameter not in self._followed:
                self._followed[parameter] = Followed(parameter, self.backward_passes or 0, self.on_gradient)
        self._report.parameters = len(self._followed)

    def expect_one_graph(self, loss: Tensor) -> None:
        """Tell that this step's one backward pass starts at ``loss``: no parameter need be counted first.

        Unless the graph has nodes written in Python, such as reentrant checkpointing's, which may run a backward pass
        of their own.
        """
        unknown = [followed for followed in self._followed.values() if not followed.uses]
        if unknown and not has_python_nodes(loss):
            for followed in unknown:
                followed.uses = 1

    def on_gradient(self, followed: Followed) -> None:
        """A gradient was added to ``.grad`` of this parameter."""
        parameter = followed.parameter
        gradient = parameter.grad
        if gradient is None:
            return
        size = nbytes(gradient)
        self._alive.note(followed, size)
        if not self.fuses_now():
            return
        self._memory.first_gradient()
        refuse_second_derivative()
        followed.fired += 1
        if followed.fired < followed.uses or not followed.uses:
            return
        reason = why_unfused(parameter)
        if reason is not None:
            self._hold_back(followed, reason)
            return
        refuse_more_gradients(followed)
        if self._window is None:
            self._window = OptimizerWindow(self.optimizer)
        if not self._window.holds(parameter):
            return
        self._bucket.append(followed)
        self._bucket_size += size
        if self._bucket_size >= self.bucket_bytes:
            self._update_bucket(self._window)

    def _hold_back(self, followed: Followed, why: str) -> None:
        if followed.unfused:
            return
        followed.unfused = True
        if why not in self._report.unfused:
            warn_no_effect(f"backward fusion has no effect on parameters {why}")
        self._report.note_unfused(why)

    def _update_bucket(self, window: OptimizerWindow) -> None:
        bucket, size = self._bucket, self._bucket_size
        self._bucket, self._bucket_size = [], 0
        parameters = [followed.parameter for followed in bucket]
        for followed in bucket:
            followed.note_layout()
        if self._side is None:
            self._step(window, parameters)
        else:
            with self._side.after_current(hold=[p.grad for p in parameters]):
                self._step(window, parameters)
        for followed in bucket:
            self._alive.note(followed, 0)
            followed.used = True
            followed.version = version_of(followed.parameter)
            if self._guard_at_once:
                followed.put_guard()
            else:
                followed.parameter.grad = None
        self._report.note_bucket(len(bucket), size)

    def _step(self, window: OptimizerWindow, parameters: list[Tensor]) -> None:
        if self.clip_value is not None:
            clip_by_value([p.grad for p in parameters if p.grad is not None], self.clip_value)
        window.update(parameters)

    def _gradient_memory(self) -> GradientMemory:
        return GradientMemory(parameters_of(self.optimizer))

    def _used(self) -> list[Followed]:
        return [followed for followed in self._followed.values() if followed.used]

    def _join(self) -> None:
        if self._side is not None:
            self._side.join()

    def begin_rest(self) -> None:
        """Before the optimizer's own ``step``: it finds None for used-up gradients, and updates only the rest."""
        self._join()
        used = self._used()
        if self._guard_at_once:
            refuse_changes(used)
        if self._window is not None and used:
            refuse_new_hyper_parameters(self._window, self.optimizer)
        for followed in used:
            followed.parameter.grad = None
        if self.clip_value is not None:
            clip_by_value([p.grad for p in parameters_of(self.optimizer) if p.grad is not None], self.clip_value)

    def end_step(self) -> None:
        """After the optimizer's own ``step``: close the window, remember the counts of a first step, put the guards."""
        self._join()
        self._report.steps += 1
        self._report.gradient_memory = self._memory.decision or self._report.gradient_memory
        for followed in self._followed.values():
            if followed.used:
                self._show(followed)
            elif followed.fired:
                self._report.late_updates += 1
            followed.uses = max(followed.uses, followed.fired)
        self._close()
        self.follow_new_parameters()

    def _show(self, followed: Followed) -> None:
        """What ``.grad`` holds after a step in which the gradient was used."""
        if followed.parameter.grad is None:
            followed.put_guard()

    def abandon_step(self) -> None:
        """After an exception inside backward: forget the half-done step. Gradients not yet used stay in ``.grad``."""
        self._join()
        self._close()

    def _close(self) -> None:
        self._bucket, self._bucket_size = [], 0
        for followed in self._followed.values():
            followed.close()
        self._alive.forget()
        self._memory.interrupted()
        self._window = None

    def go_on_from(self, report: FusionReport) -> None:
        """Count on in this report of a fusion before."""
        self._report, self._alive = report, AliveGradients(report)

    def report(self) -> FusionReport:
        """What was fused so far."""
        return self._report

    def remove(self) -> None:
        """Take all hooks and guards off; the optimizer keeps its state."""
        self._join()
        if self._own_step is not None:
            self._own_step.restore()
        for followed in self._followed.values():
            followed.handle.remove()
            if isinstance(followed.parameter.grad, GradientGuard):
                followed.parameter.grad = None
        self._close()
        self._memory.remove()
        self._followed.clear()


def _fuse_again(optimizer: Optimizer, options: dict[str, Any], completes: bool, report: FusionReport) -> BackwardFusion:
    fusion = BackwardFusion(optimizer, **options)
    fusion.go_on_from(report)
    if completes:
        fusion.complete_in_step()
    return fusion
