"""Optimizers with a ``zero_grad`` or ``step`` of somebody's own: called as in plain training, and never fused past."""

from typing import Any
from unittest import mock

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader

import retime
from support.fusion import both, network
from support.trainers import quiet_trainer

pytestmark = pytest.mark.filterwarnings("ignore:.*does not have many workers", "ignore:.*LeafSpec:FutureWarning")


class Keeps(torch.optim.SGD):
    """Clears gradients at every second call."""

    calls = 0

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.calls += 1
        if self.calls % 2 == 0:
            super().zero_grad(set_to_none)


retime.declare_per_parameter(Keeps)


class Net(LightningModule):
    def __init__(self, kind: Any = torch.optim.SGD) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net, self.kind = nn.Linear(4, 4), kind
        self.made: Any = None

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.net(batch).square().mean()  # type: ignore[no-any-return]

    def configure_optimizers(self) -> Any:
        self.made = self.kind(self.parameters(), lr=0.1)
        return self.made

    def train_dataloader(self) -> Any:
        generator = torch.Generator().manual_seed(1)
        return DataLoader(torch.randn(16, 4, generator=generator), batch_size=4)


class PatchedMethod(Net):
    """One method of the optimizer object is a mock that passes calls on, or not."""

    def __init__(self, name: str, passing_on: bool) -> None:
        super().__init__()
        self.name, self.passing_on = name, passing_on

    def configure_optimizers(self) -> Any:
        configured = super().configure_optimizers()
        wraps = getattr(configured, self.name) if self.passing_on else None
        side_effect = None if self.passing_on else lambda closure=None: closure and closure()
        setattr(configured, self.name, mock.MagicMock(wraps=wraps, side_effect=side_effect))
        return configured


def fit(module: Net, strategy: str) -> dict[str, Tensor]:
    trainer = quiet_trainer(strategy=strategy, max_epochs=2)
    trainer.fit(module)
    return module.state_dict()


def assert_equal(plain: dict[str, Tensor], ours: dict[str, Tensor]) -> None:
    assert all(torch.equal(plain[name], ours[name]) for name in plain)


def test_a_zero_grad_of_its_own_runs_the_plain_way() -> None:
    plain = fit(Net(Keeps), "auto")
    with pytest.warns(retime.NoEffectWarning, match="zero_grad of this Keeps") as told:
        ours = fit(Net(Keeps), "fused_optimizer")
    assert len([one for one in told if one.category is retime.NoEffectWarning]) == 1
    assert_equal(plain, ours)


@pytest.mark.parametrize("strategy", ["fused_optimizer", "fused_optimizer_forward"])
@pytest.mark.parametrize("passing_on", [True, False])
@pytest.mark.parametrize("name", ["zero_grad", "step"])
@pytest.mark.filterwarnings("ignore::retime.NoEffectWarning")
def test_a_patched_method_is_called_as_in_a_plain_run(name: str, passing_on: bool, strategy: str) -> None:
    plain, ours = PatchedMethod(name, passing_on), PatchedMethod(name, passing_on)
    assert_equal(fit(plain, "auto"), fit(ours, strategy))
    assert getattr(plain.made, name).call_count == getattr(ours.made, name).call_count == 8


@pytest.mark.filterwarnings("ignore::retime.NoEffectWarning")
def test_a_patched_class_is_called_as_in_a_plain_run() -> None:
    run = mock.patch("torch.optim.SGD.step", side_effect=lambda closure: closure())
    with mock.patch("torch.optim.SGD.zero_grad") as zero_grad, run as step:
        fit(Net(), "fused_optimizer")
    assert (zero_grad.call_count, step.call_count) == (8, 8)


def test_a_loop_of_ones_own_is_told_before_the_first_step() -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with mock.patch.object(optimizer, "zero_grad"), pytest.raises(ValueError, match="zero_grad of this SGD"):
        retime.fuse_optimizer(model, optimizer)
    with mock.patch.object(optimizer, "step"), pytest.raises(ValueError, match="step method of this SGD was replaced"):
        retime.fuse_optimizer(model, optimizer, "forward")
    plain = optimizer.step.__func__  # type: ignore[attr-defined]
    optimizer.step = (lambda self: plain(self)).__get__(optimizer)  # type: ignore[method-assign]
    torch.optim.lr_scheduler.StepLR(optimizer, 1)  # whose wrapper does not hide it
    with pytest.raises(ValueError, match="step method of this SGD was replaced"):
        retime.fuse_optimizer(model, optimizer)


@retime.declare_per_parameter
class ZeroesInPlace(torch.optim.SGD):
    def zero_grad(self, set_to_none: bool = True) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.grad.data.zero_()


def test_forward_fusion_updates_before_a_zero_grad_of_its_own() -> None:
    both("forward", lambda p: ZeroesInPlace(p, lr=0.1))
