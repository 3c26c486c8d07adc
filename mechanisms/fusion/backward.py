"""Backward fusion: update parameters while the backward pass runs (Jiang et al. 2021, section 3, algorithm 3).

A parameter is updated once its gradient is complete and nothing needs its old value:

* Autograd adds up all uses of a parameter within one graph before its accumulation hook fires. What it cannot add up
  are several graphs: a second ``backward()`` before the step, or the nested backward of reentrant checkpointing. So the
  first step of every parameter runs the plain way while its firings are counted (``theta.count`` of algorithm 3); later
  steps update it at the last one. Fewer firings leave it to ``optimizer.step()``; more raise an error.
* A node that still needs the old value (section B.2) either contributes to the gradient, and so ran before the hook, or
  saved the parameter, and autograd's version check raises.

Updates go by *buckets* of gradients in order of arrival, so the optimizer's multi-tensor and fused kernels are kept,
and each bucket's gradients are freed at once.
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from retime.mechanisms.fusion.consumed import ConsumedGradient
from retime.mechanisms.fusion.narrow import OptimizerWindow, nbytes
from retime.mechanisms.fusion.replaced import ReplacedMethod
from retime.mechanisms.fusion.report import FusionReport
from retime.mechanisms.fusion.side_stream import SideStream

CPU_BUCKET_BYTES = 1 << 20
CUDA_BUCKET_BYTES = 8 << 20


def parameters_of(optimizer: Optimizer) -> Iterator[Tensor]:
    """All parameters of the optimizer, group by group."""
    for group in optimizer.param_groups:
        yield from group["params"]


def default_bucket_bytes(parameters: Iterable[Tensor]) -> int:
    """Bucket size when the user names none: enough to keep the kernels busy, little enough to stay in the caches.

    A small model gets at least four buckets, or nothing would be left to fuse.
    """
    everything = list(parameters)
    most = CUDA_BUCKET_BYTES if any(parameter.is_cuda for parameter in everything) else CPU_BUCKET_BYTES
    return max(1, min(most, sum(map(nbytes, everything)) // 4))


class BackwardFusion:
    """Updates the optimizer's parameters inside ``backward()``; see :func:`retime.mechanisms.fusion.fuse_optimizer`.

    ``armed`` says whether gradients are consumed as they come (a bare loop leaves it on; an adapter switches it on for
    the one backward pass that belongs to a step). ``clip_value`` clamps every gradient element to
    [-clip_value, clip_value] first, as ``torch.nn.utils.clip_grad_value_`` does.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        *,
        bucket_bytes: int | None = None,
        clip_value: float | None = None,
        side_stream: bool = False,
        armed: bool = True,
    ) -> None:
        self.optimizer = optimizer
        self.armed = armed
        self.wanted: Callable[[], bool] = lambda: True
        """A further condition on a backward pass to be fused, for loops that know which one belongs to a step."""
        self.clip_value = clip_value
        self.bucket_bytes = bucket_bytes or default_bucket_bytes(parameters_of(optimizer))
        self._side = SideStream() if side_stream else None
        self._report = FusionReport(mode="backward")
        self._handles: dict[Tensor, RemovableHandle] = {}
        self._uses: dict[Tensor, int] = {}
        self._fired: dict[Tensor, int] = {}
        self._alive: dict[Tensor, int] = {}
        self._alive_bytes = 0
        self._bucket: list[Tensor] = []
        self._bucket_size = 0
        self._consumed: list[Tensor] = []
        self._window: OptimizerWindow | None = None
        self._own_step: ReplacedMethod | None = None
        self.follow_new_parameters()

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
            if parameter.requires_grad and parameter not in self._handles:
                self._handles[parameter] = parameter.register_post_accumulate_grad_hook(self._on_gradient)
        self._report.parameters = len(self._handles)

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

    def _on_gradient(self, parameter: Tensor) -> None:
        gradient = parameter.grad
        if isinstance(gradient, ConsumedGradient):
            parameter.grad = gradient = gradient.received
        if gradient is None:
            return
        self._count_alive(parameter, nbytes(gradient))
        if not (self.armed and self.wanted()):
            return
        if torch.is_grad_enabled():
            raise RuntimeError(
                "backward(create_graph=True) keeps the old parameters for a second derivative, backward fusion "
                "overwrites them: use mode='forward', or remove the fusion"
            )
        fired = self._fired[parameter] = self._fired.get(parameter, 0) + 1
        uses = self._uses.get(parameter)
        if uses is None or fired < uses or self._others_read(parameter):
            return
        if fired > uses:
            raise RuntimeError(
                f"a parameter of shape {tuple(parameter.shape)} received {fired} gradients in one step, {uses} in the "
                "steps before, and may be updated already. Wrap all backward passes of a step but the last in "
                "`with fusion.accumulate():`; with checkpointing, pass use_reentrant=False"
            )
        if self._window is None:
            self._window = OptimizerWindow(self.optimizer)
        if not self._window.holds(parameter):
            return
        self._bucket.append(parameter)
        self._bucket_size += nbytes(gradient)
        if self._bucket_size >= self.bucket_bytes:
            self._update_bucket(self._window)

    def _count_alive(self, parameter: Tensor, size: int) -> None:
        self._alive_bytes += size - self._alive.get(parameter, 0)
        self._alive[parameter] = size
        if self._alive_bytes > self._report.peak_gradient_bytes:
            self._report.peak_gradient_bytes = self._alive_bytes

    def _others_read(self, parameter: Tensor) -> bool:
        hooks = parameter._post_accumulate_grad_hooks
        return hooks is not None and len(hooks) > 1

    def _update_bucket(self, window: OptimizerWindow) -> None:
        bucket, size = self._bucket, self._bucket_size
        self._bucket, self._bucket_size = [], 0
        if self._side is None:
            self._step(window, bucket)
        else:
            with self._side.after_current(hold=[p.grad for p in bucket]):
                self._step(window, bucket)
        for parameter in bucket:
            parameter.grad = None
            self._alive_bytes -= self._alive.pop(parameter)
        if self.guard_at_once:
            self._put_guards(bucket)
        self._consumed += bucket
        self._report.fused_updates += len(bucket)
        self._report.buckets += 1
        self._report.largest_bucket_bytes = max(self._report.largest_bucket_bytes, size)

    def _step(self, window: OptimizerWindow, bucket: list[Tensor]) -> None:
        if self.clip_value is not None:
            clip_by_value([p.grad for p in bucket if p.grad is not None], self.clip_value)
        window.update(bucket)

    guard_at_once = True
    """Whether reads of a consumed gradient raise from the moment it is used up. An adapter that knows all readers up to
    the end of the step turns it off and calls :meth:`end_step`, which puts the guards then."""

    def _put_guards(self, parameters: list[Tensor]) -> None:
        for parameter in parameters:
            parameter.grad = ConsumedGradient(parameter)  # type: ignore[abstract]

    def begin_rest(self) -> None:
        """Before the optimizer's own ``step``: consumed gradients read as None, so that it updates only the rest."""
        if self._side is not None:
            self._side.join()
        for parameter in self._consumed:
            parameter.grad = None
        self._clip_rest()

    def _clip_rest(self) -> None:
        if self.clip_value is not None:
            clip_by_value([p.grad for p in parameters_of(self.optimizer) if p.grad is not None], self.clip_value)

    def end_step(self) -> None:
        """After the optimizer's own ``step``: close the window, remember the counts of a first step, put the guards."""
        if self._side is not None:
            self._side.join()
        report = self._report
        report.steps += 1
        report.late_updates += len(self._fired) - len(self._consumed)
        for parameter, fired in self._fired.items():
            if fired > self._uses.get(parameter, 0):
                self._uses[parameter] = fired
        self._put_guards([p for p in self._consumed if p.grad is None])
        self._reset()
        self.follow_new_parameters()

    def abandon_step(self) -> None:
        """After an exception inside backward: forget the half-done step. Gradients not yet used stay in ``.grad``."""
        if self._side is not None:
            self._side.join()
        self._reset()

    def _reset(self) -> None:
        self._bucket, self._bucket_size = [], 0
        self._consumed = []
        self._fired.clear()
        self._alive.clear()
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
        for parameter, handle in self._handles.items():
            handle.remove()
            if isinstance(parameter.grad, ConsumedGradient):
                parameter.grad = parameter.grad.received
        self._handles.clear()
        self._reset()


def clip_by_value(gradients: list[Tensor], clip_value: float) -> None:
    """Clamp in place, with the kernels that ``torch.nn.utils.clip_grad_value_`` uses on parameters."""
    if not gradients:
        return
    with torch.no_grad():
        torch._foreach_clamp_min_(gradients, -clip_value)
        torch._foreach_clamp_max_(gradients, clip_value)
