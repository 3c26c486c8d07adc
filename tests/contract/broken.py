"""Strategies that are wrong on purpose: what the table must catch. Each breaks one promise."""

import time
from types import SimpleNamespace
from typing import Any

import torch
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy

from contract.pipelines import PIPELINE, wrong_on_one_rank
from contract.rows import Row


class ScalesGradients(SingleDeviceStrategy):
    """Every gradient is a ten-thousandth too large."""

    def post_backward(self, closure_loss: Any) -> None:
        for parameter in self.lightning_module.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(1.0001)


class SkipsAStep(SingleDeviceStrategy):
    """The third step computes gradients and updates nothing."""

    calls = 0

    def optimizer_step(self, optimizer: Any, closure: Any, model: Any = None, **kwargs: Any) -> Any:
        self.calls += 1
        return closure() if self.calls == 3 else super().optimizer_step(optimizer, closure, model, **kwargs)


class UpdatesLate(SingleDeviceStrategy):
    """Updates just before the next forward pass and at the end of the fit, and never for a reader in between."""

    waiting: Any = None

    def optimizer_step(self, optimizer: Any, closure: Any, model: Any = None, **kwargs: Any) -> Any:
        self._update()
        result = closure()
        self.waiting = optimizer
        return result

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        self._update()
        return super().training_step(*args, **kwargs)

    def on_train_end(self) -> None:
        self._update()

    def _update(self) -> None:
        optimizer, self.waiting = self.waiting, None
        if optimizer is not None:
            optimizer.step()


class ForgetsState(SingleDeviceStrategy):
    """Saves checkpoints without the optimizer's moments, as one optimizer a parameter would."""

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        return {**super().optimizer_state(optimizer), "state": {}}


class LeavesAHook(SingleDeviceStrategy):
    """Trains rightly, but a hook stays on the module and eats gradients after the fit."""

    def teardown(self) -> None:
        for parameter in self.lightning_module.parameters():
            parameter.register_post_accumulate_grad_hook(self._eat)
        super().teardown()

    @staticmethod
    def _eat(parameter: torch.Tensor) -> None:
        parameter.grad.zero_()


class FailsOnOneRank(DDPStrategy):
    """Rank 1 trains wrongly with SGD, raises with Adam and stands still with momentum."""

    def optimizer_step(self, optimizer: Any, closure: Any, model: Any = None, **kwargs: Any) -> Any:
        result = super().optimizer_step(optimizer, closure, model, **kwargs)
        if self.global_rank == 1:
            if isinstance(optimizer, torch.optim.Adam):
                raise RuntimeError("rank 1 broke")
            if optimizer.defaults["momentum"]:
                time.sleep(600)
            for parameter in self.lightning_module.parameters():
                parameter.data.mul_(1.001)
        return result


def _report(updates: int, **plain_steps: int) -> Any:
    return lambda _: SimpleNamespace(fused_updates=updates, plain_steps=plain_steps)


SILENTLY_OFF = Row("silently_off", lambda _: "auto", report=_report(0))
NEVER_OFF = Row("never_off", lambda _: "auto", report=_report(10), unfused=frozenset({"a trait"}))
OFF_WITHOUT_WARNING = Row("no_warning", lambda _: "auto", report=_report(0, why=3), unfused=frozenset({"a trait"}))
WRONG_IN_STAGES = Row("wrong_in_stages", wrong_on_one_rank, **PIPELINE)
FAILS_ON_ONE_RANK = Row("fails_on_one_rank", lambda ddp: FailsOnOneRank(**ddp), plain="ddp")
