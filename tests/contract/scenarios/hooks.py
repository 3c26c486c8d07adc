"""Modules and callbacks that override the hooks around the step."""

from typing import Any

import torch
from lightning.pytorch import Callback

from contract.models import Net, sgd
from contract.registry import fits
from contract.traits import GRADIENT_HOOK


def gradients_of(module: Net) -> list[torch.Tensor]:
    """Those that are there: a rank of a pipeline has those of its layers."""
    return [parameter.grad for parameter in module.parameters() if parameter.grad is not None]


class ScalesBeforeStep(Net):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        for gradient in gradients_of(self):
            gradient.mul_(0.5)


class ScalesAfterBackward(Net):
    def on_after_backward(self) -> None:
        for gradient in gradients_of(self):
            gradient.mul_(0.5)


class ReadsBeforeZeroGrad(Net):
    def on_before_zero_grad(self, optimizer: Any) -> None:
        if self.net[0].bias.grad is not None:
            self.trace.append({"grad": self.net[0].bias.grad.clone()})


class ClipsItself(Net):
    def configure_gradient_clipping(
        self, optimizer: Any, gradient_clip_val: Any = None, gradient_clip_algorithm: Any = None
    ) -> None:
        for gradient in gradients_of(self):
            gradient.clamp_(-0.02, 0.02)


class ClipsInItsOwnWay(Net):
    clip_gradients = ClipsItself.configure_gradient_clipping


class OwnBackward(Net):
    def backward(self, loss: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        (loss * 2).backward()


class GradientCallback(Callback):
    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        norms = {name: p.grad.norm() for name, p in pl_module.named_parameters() if p.grad is not None}
        pl_module.trace.append({"grad norms": norms})


class AfterBackwardCallback(Callback):
    def on_after_backward(self, trainer: Any, pl_module: Any) -> None:
        for parameter in pl_module.parameters():
            if parameter.grad is not None:
                parameter.grad.add_(0.01 * parameter.detach())


class EveryOtherBatch(Net):
    """Lightning's documented form: the closure always runs, the step only on odd batches."""

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        if batch_idx % 2:
            super().optimizer_step(epoch, batch_idx, optimizer, optimizer_closure)
        else:
            optimizer_closure()


class WarmUp(Net):
    """Sets the learning rate after the step, as Lightning's documentation shows warm-up."""

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        optimizer.step(closure=optimizer_closure)
        for group in optimizer.param_groups:
            group["lr"] = min(1.0, (self.trainer.global_step + 1) / 6) * 0.05


class ClampsAfterStep(Net):
    """Edits the weights right after the step, inside the step's own hook."""

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        super().optimizer_step(epoch, batch_idx, optimizer, optimizer_closure)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.clamp_(-0.3, 0.3)


class ZeroesToZero(Net):
    """Keeps the gradient tensors alive between steps instead of setting them to None."""

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        optimizer.zero_grad(set_to_none=False)


class NeverZeroes(Net):
    """Lets gradients pile up over the whole run (a crude momentum)."""

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        """Nothing."""


class ClampsBetweenBatches(Callback):
    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        with torch.no_grad():
            for parameter in pl_module.parameters():
                parameter.clamp_(-0.3, 0.3)


class ClampsBeforeBatch(Callback):
    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        for parameter in pl_module.parameters():
            parameter.data.clamp_(-0.3, 0.3)


class LogsWeightNorm(Net):
    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.log("weight_norm", torch.stack([p.detach().norm() for p in self.parameters()]).norm(), sync_dist=True)


class LogsWeightNormAtEpochEnd(Net):
    def on_train_epoch_end(self) -> None:
        self.log("weight_norm", torch.stack([p.detach().norm() for p in self.parameters()]).norm(), sync_dist=True)


fits(
    GRADIENT_HOOK,
    hook_before_optimizer_step=lambda bench: bench.fit(ScalesBeforeStep(optimizer=sgd)),
    hook_after_backward=lambda bench: bench.fit(ScalesAfterBackward(optimizer=sgd)),
    hook_before_zero_grad=lambda bench: bench.fit(ReadsBeforeZeroGrad()),
    hook_configure_gradient_clipping=lambda bench: bench.fit(ClipsItself(optimizer=sgd)),
    hook_clip_gradients=lambda bench: bench.fit(ClipsInItsOwnWay(optimizer=sgd)),
    hook_backward=lambda bench: bench.fit(OwnBackward(optimizer=sgd)),
    callback_before_optimizer_step=lambda bench: bench.fit(Net(), callbacks=[GradientCallback()]),
    callback_after_backward=lambda bench: bench.fit(
        Net(optimizer=sgd), callbacks=[AfterBackwardCallback()], accumulate_grad_batches=2
    ),
    zero_grad_keeps_tensors=lambda bench: bench.fit(ZeroesToZero(optimizer=sgd), accumulate_grad_batches=2),
    zero_grad_never=lambda bench: bench.fit(NeverZeroes(optimizer=sgd), max_epochs=1),
)


fits(
    optimizer_step_every_other_batch=lambda bench: bench.fit(EveryOtherBatch(optimizer=sgd)),
    optimizer_step_with_own_warm_up=lambda bench: bench.fit(WarmUp(optimizer=sgd)),
    optimizer_step_clamps_weights=lambda bench: bench.fit(ClampsAfterStep(optimizer=sgd)),
    weights_clamped_between_batches=lambda bench: bench.fit(Net(optimizer=sgd), callbacks=[ClampsBetweenBatches()]),
    weights_clamped_before_batch=lambda bench: bench.fit(Net(optimizer=sgd), callbacks=[ClampsBeforeBatch()]),
    weight_norm_logged_each_batch=lambda bench: bench.fit(LogsWeightNorm()),
    weight_norm_logged_each_epoch=lambda bench: bench.fit(LogsWeightNormAtEpochEnd()),
)
