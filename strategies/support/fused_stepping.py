"""When Lightning's steps are fused: the decisions that the strategies and the callback share.

Backward fusion is armed inside ``Strategy.optimizer_step`` for the one backward pass that belongs to the step, so
accumulation and an overridden ``optimizer_step`` need no special case. Whatever must see gradients between the backward
pass and the update makes the step run the plain way, with one :class:`NoEffectWarning` a reason.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import StochasticWeightAveraging
from lightning.pytorch.loops.optimization.automatic import Closure
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import DDPStrategy, Strategy
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor, nn
from torch.optim import Optimizer

from retime.foundations.compatibility import Mechanism, why_aside
from retime.foundations.lazy_updates import (
    apply_pending,
    check_bucket_bytes,
    why_not_separable,
    why_not_this_step,
    why_not_this_zero_grad,
)
from retime.foundations.messages import warn_no_effect
from retime.foundations.torch_private.nn_and_optim import backward_hooks, global_backward_hooks
from retime.mechanisms.fusion import (
    BackwardFusion,
    DataParallelFusion,
    ForwardFusion,
    FusionReport,
    ReductionHook,
    check_mode,
)
from retime.strategies.support.base import hook_was_not_asked_for
from retime.strategies.support.lightning_private import averages_models, has_batch_norm, user_comm_hook

# Which mechanisms a strategy brings along, for the table of what goes together.


def mechanisms_of(strategy: Strategy) -> tuple[Mechanism, ...]:
    """Return the mechanisms of any strategy; a communication hook of the user's own counts as one."""
    ours: tuple[Mechanism, ...] = getattr(strategy, "mechanisms", ())
    hooked = isinstance(strategy, DDPStrategy) and user_comm_hook(strategy)[0] is not None
    return (*ours, Mechanism.USERS_HOOK) if hooked else ours


_MODULE_READERS = (
    "backward",
    "on_after_backward",
    "on_before_optimizer_step",
    "on_before_zero_grad",
    "optimizer_zero_grad",
    "configure_gradient_clipping",
    "clip_gradients",
)
_CALLBACK_READERS = ("on_after_backward", "on_before_optimizer_step", "on_before_zero_grad")
_USE_FORWARD = "use mode='forward' (strategy='fused_optimizer_forward')"


class FusedStepping:
    """Fuses the optimizers of one Trainer; the strategy calls :meth:`start`, :meth:`step` and :meth:`stop`.

    Args:
        side_stream: whether updates have a stream of their own.
        distributed: whether the model is wrapped in DistributedDataParallel; :meth:`reduce_through` or
            :meth:`leave_plain` then say who reduces what backward fusion updates from.
        make_fusion: builds the fusion of an optimizer, of this mode, for strategies that put updates in another place.
        mechanism: what this is called in messages; None: after the mode.
    """

    def __init__(
        self,
        mode: str,
        bucket_bytes: int | str | None = None,
        side_stream: bool = False,
        *,
        distributed: bool = False,
        make_fusion: Callable[[Optimizer, LightningModule], BackwardFusion | ForwardFusion] | None = None,
        mechanism: str | None = None,
    ) -> None:
        self.mode = check_mode(mode)
        if side_stream and self.mode == "forward":
            raise ValueError("side_stream=True is for mode='backward': forward fusion updates before a layer's forward")
        self._reduction: ReductionHook | None = None
        self._no_reduction: str | None = None
        self._distributed = distributed
        self._make_fusion = make_fusion
        self._mechanism = mechanism or f"{mode} fusion"
        self._options: dict[str, Any] = {"bucket_bytes": check_bucket_bytes(bucket_bytes)}
        self._side_stream = side_stream
        self._fusions: dict[Optimizer, BackwardFusion | ForwardFusion] = {}
        self._plain = FusionReport(mode=self.mode)
        """Report of fits that have ended, and of steps that ran the plain way."""
        self._dropped: dict[weakref.ref[Optimizer], FusionReport] = {}
        """Reports of this fit's ended fusions: their optimizers may be fused again, and must not live on for this."""
        self._warned: set[str] = set()
        self._modules: list[tuple[str, nn.Module]] = []
        self._owners: tuple[LightningModule | Callback, ...] = ()
        self._reader: str | None = None
        self._standing: str | None = None
        """Why the strategy lets no step of this fit be fused."""
        self._is_on = False

    def __getstate__(self) -> dict[str, Any]:
        """A copy, made in the middle of a fit too, has the counts; it fuses the copied optimizers by itself."""
        self.flush()
        state = self.__dict__ | {"_fusions": {}, "_plain": self.report(), "_dropped": {}, "_modules": [], "_owners": ()}
        state["_is_on"] = False
        if self._reduction is not None:
            state |= {"_reduction": None, "_no_reduction": "a copy of DDP's model has no reduction hook before a fit"}
        return state

    def reduce_through(self, reduction: ReductionHook) -> None:
        """Until the end of the fit backward fusion updates what this hook has reduced."""
        self._distributed, self._reduction, self._no_reduction = True, reduction, None

    def leave_plain(self, reason: str) -> None:
        """Until the end of the fit nothing reduces gradients for backward fusion: all steps run the plain way."""
        self._distributed, self._reduction, self._no_reduction = True, None, reason

    def start(self, trainer: Trainer) -> str:
        """Before the first step: warn of what will run the plain way, and fuse what can be.

        Returns:
            What will be done, for the fit's log.

        Raises:
            RuntimeError: gradients of several ranks would be used before they are reduced.
        """
        self._check_reduction(trainer)
        module = trainer.lightning_module
        self._modules = []
        self._standing = why_aside(Mechanism.fusion(self.mode), mechanisms_of(trainer.strategy))
        if self._standing is None and averages_models(trainer.strategy):
            self._standing = "post-local SGD averages the parameters that have a gradient after the step"
        for optimizer in trainer.strategy.optimizers:
            reason = self._why_plain(trainer, module, optimizer)
            if reason is not None:
                self._warn(reason)
            else:
                self._fusion_of(optimizer, trainer)
        self._is_on = True
        return f"{self._mechanism} of {len(self._fusions)} of {len(trainer.strategy.optimizers)} optimizers"

    def _check_reduction(self, trainer: Trainer) -> None:
        """Under DDP, gradients that the backward pass leaves are one rank's own: updates need the reduction hook."""
        if not self._distributed or self.mode == "forward" or self._no_reduction is not None:
            return
        if self._reduction is None or not self._reduction.reduces(trainer.strategy.model):
            raise RuntimeError(
                hook_was_not_asked_for(
                    f"{self._mechanism} would use gradients that no other rank has added to",
                    "use Trainer(strategy='ddp', callbacks=[FuseOptimizer()]) meanwhile",
                )
            )

    def step(
        self,
        trainer: Trainer,
        optimizer: Optimizer,
        closure: Callable[[], Any],
        plain_step: Callable[[Callable[[], Any]], Any],
        arguments: dict[str, Any],
    ) -> Any:
        """One optimizer step. ``plain_step(closure)`` is what the strategy would do without us.

        ``arguments`` are further ones of the optimizer's ``step``, which a fused update could not hand on.
        """
        module = trainer.lightning_module
        reason = self._why_plain(trainer, module, optimizer) or self._why_plain_now(closure, arguments)
        fusion = self._fusions.get(optimizer)
        if reason is not None:
            if isinstance(fusion, ForwardFusion):
                self._drop(optimizer)
            elif fusion is not None:
                fusion.abandon_step()
            self._plain.note_plain(reason)
            self._warn(reason)
            return plain_step(closure)
        fusion = self._fusion_of(optimizer, trainer)
        if isinstance(fusion, ForwardFusion):
            return plain_step(closure)  # the optimizer's own step is the deferring one
        return self._step_in_backward(trainer, fusion, closure, plain_step)

    def before_training_step(self, module: LightningModule) -> None:
        """Bring the module's own parameters up to date, which its code may read as nobody sees (``torch.tensor``)."""
        if self.mode == "forward":
            apply_pending(module.parameters(recurse=False))

    def before_backward(self, loss: Tensor) -> None:
        """Called with the loss of every backward pass."""
        for fusion in self._fusions.values():
            if isinstance(fusion, ForwardFusion):
                if self._distributed:
                    fusion.flush()  # gradients may live in DDP's buckets, which this backward pass overwrites
            elif fusion.armed:
                fusion.expect_one_graph(loss)

    def _step_in_backward(
        self,
        trainer: Trainer,
        fusion: BackwardFusion,
        closure: Callable[[], Any],
        plain_step: Callable[[Callable[[], Any]], Any],
    ) -> Any:
        # clipping, if any, is by value here: fusion does it, gradient by gradient, in Lightning's place
        clip_value = trainer.gradient_clip_val
        fusion.clip_value = clip_value or None

        def closure_then_rest() -> Any:
            fusion.armed = True
            try:
                result = closure()
            finally:
                fusion.armed = False
            if trainer.gradient_clip_val != clip_value:
                raise RuntimeError(
                    f"trainer.gradient_clip_val was set to {trainer.gradient_clip_val} when backward fusion had begun "
                    f"its step with {clip_value}: set it before, as in on_train_batch_start, or {_USE_FORWARD}"
                )
            trainer.gradient_clip_val = None
            fusion.begin_rest()
            return result

        try:
            result = plain_step(closure_then_rest)
        except BaseException as error:
            fusion.abandon_step()
            if "modified by an inplace operation" in str(error):
                error.add_note(
                    f"retime: backward fusion had updated this parameter already. {_USE_FORWARD.capitalize()}"
                )
            raise
        finally:
            trainer.gradient_clip_val = clip_value
        fusion.end_step()
        return result

    def _fusion_of(self, optimizer: Optimizer, trainer: Trainer) -> BackwardFusion | ForwardFusion:
        fusion = self._fusions.get(optimizer)
        if fusion is not None:
            return fusion
        for swapped in [key for key in self._fusions if key not in trainer.strategy.optimizers]:
            self._drop(swapped)
        if self._make_fusion is not None:
            fusion = self._make_fusion(optimizer, trainer.lightning_module)
        elif self.mode == "forward":
            held = {"gradients_in_buckets": self._distributed}
            fusion = ForwardFusion(optimizer, trainer.lightning_module, **held, **self._options)
        elif self._reduction is not None:
            fusion = DataParallelFusion(optimizer, self._reduction, armed=False, **self._options)
        else:
            fusion = BackwardFusion(optimizer, side_stream=self._side_stream, armed=False, **self._options)
        self._fusions[optimizer] = fusion
        return fusion

    def _why_plain(self, trainer: Trainer, module: LightningModule, optimizer: Optimizer) -> str | None:
        reason = why_not_separable(optimizer) or why_not_this_step(optimizer)
        if reason is not None:
            return reason
        if self.mode == "forward":
            return None
        return (
            why_not_this_zero_grad(optimizer)
            or _why_not_in_backward(trainer, module)
            or self._standing
            or self._why_not_beside_readers(trainer, module)
            or self._why_not_beside_hooks(module)
            or self._no_reduction
        )

    def _why_not_beside_readers(self, trainer: Trainer, module: LightningModule) -> str | None:
        owners = (module, *trainer.callbacks)  # type: ignore[attr-defined]
        if owners != self._owners:
            self._owners, self._reader = owners, _gradient_reader(owners)
        return self._reader

    def _why_not_beside_hooks(self, owner: LightningModule) -> str | None:
        self._modules = self._modules or list(owner.named_modules())
        if any(global_backward_hooks()):
            return f"a global module backward hook may read weights updated already; {_USE_FORWARD}"
        for name, module in self._modules:
            if any(backward_hooks(module)):
                return f"the backward hook of {name or 'the module'} may read weights updated already; {_USE_FORWARD}"
        return None

    def _why_plain_now(self, closure: Callable[[], Any], arguments: dict[str, Any]) -> str | None:
        if arguments:
            return f"optimizer.step is called with further arguments ({', '.join(arguments)})"
        if self.mode == "forward" or type(closure) is Closure:
            return None
        return "optimizer_step passes a closure of its own, which may read gradients; pass on Lightning's closure"

    def _warn(self, reason: str) -> None:
        if reason not in self._warned:
            self._warned.add(reason)
            warn_no_effect(f"{self._mechanism} has no effect on these steps: {reason}")

    def flush(self) -> None:
        """Bring all parameters up to date."""
        for fusion in self._fusions.values():
            if isinstance(fusion, ForwardFusion):
                fusion.flush()

    def stop(self) -> bool:
        """Bring all parameters up to date and leave no hook behind; counts stay for :meth:`report`.

        Returns:
            Whether a fit had begun.
        """
        was_on, self._is_on = self._is_on, False
        for optimizer in list(self._fusions):
            self._drop(optimizer)
        self._plain = self.report()
        self._dropped.clear()
        self._modules, self._owners = [], ()
        if self._reduction is not None:
            self._reduction.close(failed=sys.exc_info()[0] is not None)
        self._reduction = self._no_reduction = None
        return was_on

    def _drop(self, optimizer: Optimizer) -> None:
        fusion = self._fusions.pop(optimizer)
        fusion.remove()
        self._dropped[weakref.ref(optimizer)] = self._report_of(optimizer, fusion)

    def _report_of(self, optimizer: Optimizer, fusion: BackwardFusion | ForwardFusion) -> FusionReport:
        before = self._dropped.get(weakref.ref(optimizer))
        return fusion.report() if before is None else before.followed_by(fusion.report())

    def take_report(self, report: FusionReport) -> None:
        """Go on from the counts of a fit that another process has run."""
        self._plain = report

    def report(self) -> FusionReport:
        """Report of what was fused, over all optimizers."""
        living = {weakref.ref(one): self._report_of(one, fusion) for one, fusion in self._fusions.items()}
        now = (self._dropped | living).values()
        return self._plain.followed_by(functools.reduce(FusionReport.beside, now, FusionReport(mode=self.mode)))


class StepsFused(Strategy):
    """Hands backward passes and optimizer steps to the stepping of a strategy, where it has one."""

    _stepping: FusedStepping | None

    @property
    def fuses_steps(self) -> bool:
        """Return whether this fit's steps go through the stepping."""
        return self._stepping is not None

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        if self._stepping is not None and self.lightning_module is not None:
            self._stepping.before_training_step(self.lightning_module)
        return super().training_step(*args, **kwargs)

    def pre_backward(self, closure_loss: Tensor) -> None:
        if self._stepping is not None:
            self._stepping.before_backward(closure_loss)
        super().pre_backward(closure_loss)

    def optimizer_step(
        self,
        optimizer: Optimizer,
        closure: Callable[[], Any],
        model: LightningModule | nn.Module | None = None,
        **kwargs: Any,
    ) -> Any:
        plain = super().optimizer_step
        if self._stepping is None or not self.fuses_steps:
            return plain(optimizer, closure, model, **kwargs)
        module = self.lightning_module
        assert module is not None
        return self._stepping.step(
            module.trainer, optimizer, closure, lambda chosen: plain(optimizer, chosen, model, **kwargs), kwargs
        )


def _why_not_in_backward(trainer: Trainer, module: LightningModule) -> str | None:
    if not module.automatic_optimization:
        return f"manual optimization decides by itself when to step; {_USE_FORWARD}"
    if trainer.gradient_clip_val and str(trainer.gradient_clip_algorithm or "norm").lower().endswith("norm"):
        return (
            "clipping by global norm needs all gradients before the first update; "
            f"{_USE_FORWARD} or gradient_clip_algorithm='value'"
        )
    plugin: Precision = trainer.precision_plugin
    if getattr(plugin, "scaler", None) is not None:
        return (
            "a GradScaler has to see all gradients before the first update; use precision='bf16-mixed', "
            f"or {_USE_FORWARD}"
        )
    if not type(plugin).__module__.startswith("lightning."):
        return f"the precision plug-in {type(plugin).__name__} may read gradients; {_USE_FORWARD}"
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if (
            isinstance(callback, StochasticWeightAveraging)
            and has_batch_norm(callback)
            and trainer.current_epoch >= callback.swa_end
        ):
            return "StochasticWeightAveraging steps once more with the last gradients after its BatchNorm epoch"
    return None


def _gradient_reader(owners: tuple[LightningModule | Callback, ...]) -> str | None:
    for owner in owners:
        for hook in _MODULE_READERS if isinstance(owner, LightningModule) else _CALLBACK_READERS:
            if is_overridden(hook, owner):
                return f"{type(owner).__name__}.{hook} may read gradients; {_USE_FORWARD}"
    return None
