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
and each bucket's gradients are freed at once. For the freed memory to be used again, nothing small may be allocated
between two gradients and outlive them: glibc's aligned allocations would not merge again, and every gradient would take
new pages (seen as 17,000 page faults a step). So all bookkeeping of a step lives in records made once.
"""

import contextlib
import warnings
from collections.abc import Callable, Iterator
from typing import Annotated, Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from retime.mechanisms.arguments import Above, AtLeast, checked
from retime.mechanisms.fusion.bucket_bytes import check_bucket_bytes, default_bucket_bytes, parameters_of
from retime.mechanisms.fusion.clipping import clip_by_value
from retime.mechanisms.fusion.consumed import ConsumedGradient
from retime.mechanisms.fusion.followed import Followed
from retime.mechanisms.fusion.held_back import ALIASED, OTHER_HOOKS, others_read
from retime.mechanisms.fusion.python_nodes import has_python_nodes
from retime.mechanisms.fusion.report import FusionReport
from retime.mechanisms.lazy_updates import OptimizerWindow, ReplacedMethod, has_alias, nbytes
from retime.mechanisms.no_effect import NoEffectWarning
from retime.mechanisms.streams import SideStream
from retime.mechanisms.torch_private import version_of


class BackwardFusion:
    """Updates the optimizer's parameters inside ``backward()``; see :func:`retime.mechanisms.fusion.fuse_optimizer`.

    ``armed`` says whether gradients are consumed as they come (a bare loop leaves it on; an adapter switches it on for
    the one backward pass that belongs to a step). ``clip_value`` clamps every gradient element to
    [-clip_value, clip_value] first, as ``torch.nn.utils.clip_grad_value_`` does. ``guard_at_once`` says whether reads
    of a consumed gradient raise from the moment it is used up: an adapter that knows all readers up to the end of the
    step turns it off and calls :meth:`end_step`, which puts the guards then.
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
        self.optimizer = optimizer
        self._guard_at_once = guard_at_once
        self.backward_passes = backward_passes
        self.armed = armed
        self.wanted: Callable[[], bool] = _always
        """A further condition on a backward pass to be fused, for loops that know which one belongs to a step."""
        self.clip_value = clip_value
        self.bucket_bytes = check_bucket_bytes(bucket_bytes) or default_bucket_bytes(parameters_of(optimizer))
        self._side = SideStream() if side_stream else None
        self._report = FusionReport(mode="backward")
        self._followed: dict[Tensor, Followed] = {}
        self._alive_bytes = 0
        self._bucket: list[Followed] = []
        self._bucket_size = 0
        self._window: OptimizerWindow | None = None
        self._own_step: ReplacedMethod | None = None
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
        self._own_step = ReplacedMethod(self.optimizer, "step", self._rest_of_step)

    def _rest_of_step(self, closure: Callable[[], Any] | None = None) -> Any:
        assert self._own_step is not None
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.begin_rest()
        self._own_step.inner()
        self.end_step()
        return loss

    def follow_new_parameters(self) -> None:
        """Put the hook on parameters that joined the optimizer, or were unfrozen, since the last call."""
        for parameter in parameters_of(self.optimizer):
            if parameter.requires_grad and parameter not in self._followed:
                self._followed[parameter] = Followed(self, parameter)
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

    @contextlib.contextmanager
    def accumulate(self) -> Iterator[None]:
        """Backward passes in here only add to ``.grad``; the first one outside updates."""
        before, self.armed = self.armed, False
        try:
            yield
        finally:
            self.armed = before

    def arm(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        """``closure``, with fusion on while it runs."""

        def armed_closure() -> Any:
            self.armed = True
            try:
                return closure()
            finally:
                self.armed = False

        return armed_closure

    def on_gradient(self, followed: Followed) -> None:
        """A gradient was added to ``.grad`` of this parameter."""
        parameter = followed.parameter
        gradient = parameter.grad
        if gradient is None:
            return
        size = nbytes(gradient)
        self._count_alive(followed, size)
        if not (self.armed and self.wanted()):
            return
        if torch.is_grad_enabled():
            raise RuntimeError(
                "backward(create_graph=True) keeps the old parameters for a second derivative, backward fusion "
                "overwrites them: use mode='forward', or remove the fusion"
            )
        followed.fired += 1
        if followed.fired < followed.uses or not followed.uses:
            return
        if others_read(parameter):
            self._hold_back(followed, OTHER_HOOKS)
            return
        if has_alias(parameter):
            self._hold_back(followed, ALIASED)
            return
        if followed.fired > followed.uses:
            raise RuntimeError(
                f"a parameter of shape {tuple(parameter.shape)} received {followed.fired} gradients in one step, "
                f"{followed.uses} in the steps before, and may be updated already. Wrap all backward passes of a step "
                "but the last in `with fusion.accumulate():`; with checkpointing, pass use_reentrant=False; a "
                "backward() that no optimizer.step() follows needs mode='forward'; after an exception inside a "
                "backward(), call `fusion.abandon_step()` and go on with the next batch"
            )
        if self._window is None:
            self._window = OptimizerWindow(self.optimizer)
        if not self._window.holds(parameter):
            return
        self._bucket.append(followed)
        self._bucket_size += size
        if self._bucket_size >= self.bucket_bytes:
            self._update_bucket(self._window)

    def _hold_back(self, followed: Followed, why: str) -> None:
        if followed.held_back:
            return
        followed.held_back = True
        held = self._report.held_back
        if why not in held:
            warnings.warn(f"backward fusion has no effect on parameters {why}", NoEffectWarning, stacklevel=2)
        held[why] = held.get(why, 0) + 1

    def _count_alive(self, followed: Followed, size: int) -> None:
        self._alive_bytes += size - followed.alive_bytes
        followed.alive_bytes = size
        if self._alive_bytes > self._report.peak_gradient_bytes:
            self._report.peak_gradient_bytes = self._alive_bytes

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
            self._alive_bytes -= followed.alive_bytes
            followed.alive_bytes = 0
            followed.used = True
            followed.version = version_of(followed.parameter)
            if self._guard_at_once:
                followed.put_guard()
            else:
                followed.parameter.grad = None
        self._count_bucket(len(bucket), size)

    def _count_bucket(self, updates: int, size: int) -> None:
        report = self._report
        report.fused_updates += updates
        report.buckets += 1
        report.largest_bucket_bytes = max(report.largest_bucket_bytes, size)

    def _step(self, window: OptimizerWindow, parameters: list[Tensor]) -> None:
        if self.clip_value is not None:
            clip_by_value([p.grad for p in parameters if p.grad is not None], self.clip_value)
        window.update(parameters)

    def _used(self) -> list[Followed]:
        return [followed for followed in self._followed.values() if followed.used]

    def begin_rest(self) -> None:
        """Before the optimizer's own ``step``: consumed gradients read as None, so that it updates only the rest."""
        if self._side is not None:
            self._side.join()
        used = self._used()
        if self._guard_at_once and any(followed.parameter.grad is not followed.guard for followed in used):
            raise RuntimeError(
                "a gradient was cleared or replaced between backward() and optimizer.step(), but backward fusion has "
                "updated its parameter already: use mode='forward'"
            )
        if self._guard_at_once and any(version_of(followed.parameter) != followed.version for followed in used):
            raise RuntimeError(
                "a parameter was changed in place between backward() and optimizer.step(), but backward fusion has "
                "updated it already: change it before backward() or after step(), or use mode='forward'"
            )
        if self._window is not None and used and self._window.is_outdated(self.optimizer):
            raise RuntimeError(
                "a learning rate or another hyper-parameter was changed between backward() and optimizer.step(), but "
                "backward fusion has updated parameters already: change it before backward(), or use mode='forward'"
            )
        for followed in used:
            followed.parameter.grad = None
        if self.clip_value is not None:
            clip_by_value([p.grad for p in parameters_of(self.optimizer) if p.grad is not None], self.clip_value)

    def end_step(self) -> None:
        """After the optimizer's own ``step``: close the window, remember the counts of a first step, put the guards."""
        if self._side is not None:
            self._side.join()
        self._report.steps += 1
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
        if self._side is not None:
            self._side.join()
        self._close()

    def _close(self) -> None:
        self._bucket, self._bucket_size = [], 0
        for followed in self._followed.values():
            followed.close()
        self._alive_bytes = 0
        self._window = None

    def report(self) -> FusionReport:
        """What was fused so far."""
        return self._report

    def remove(self) -> None:
        """Take all hooks and guards off; the optimizer keeps its state."""
        if self._side is not None:
            self._side.join()
        if self._own_step is not None:
            self._own_step.restore()
        for followed in self._followed.values():
            followed.handle.remove()
            if isinstance(followed.parameter.grad, ConsumedGradient):
                followed.parameter.grad = None
        self._close()
        self._followed.clear()


def _always() -> bool:
    return True


def _fuse_again(optimizer: Optimizer, options: dict[str, Any], completes: bool, report: FusionReport) -> BackwardFusion:
    fusion = BackwardFusion(optimizer, **options)
    fusion._report = report
    if completes:
        fusion.complete_in_step()
    return fusion
