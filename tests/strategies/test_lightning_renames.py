"""A Lightning that calls its private hooks by other names: strategies that live in them refuse to train without."""

import pytest
from lightning.pytorch import Trainer
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.strategies import DDPStrategy

from retime import FusedOptimizerDDPStrategy, OOODataParallelStrategy
from support.trainers import IGNORED_WARNINGS, quiet_trainer

pytestmark = IGNORED_WARNINGS
RENAMED = r"without calling DDPStrategy\._register_ddp_hooks.*"


@pytest.fixture
def renamed(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the next release called the method by another name."""

    def configure_ddp(self: DDPStrategy) -> None:
        assert self.model is not None
        self.model = self._setup_model(self.model)
        self._register_hooks()

    monkeypatch.setattr(DDPStrategy, "_register_hooks", DDPStrategy._register_ddp_hooks, raising=False)
    monkeypatch.setattr(DDPStrategy, "configure_ddp", configure_ddp)


def trainer(strategy: DDPStrategy) -> Trainer:
    return quiet_trainer(strategy=strategy, max_steps=2, limit_val_batches=0)


def fit(strategy: DDPStrategy) -> None:
    trainer(strategy).fit(BoringModel())


def test_backward_fusion_does_not_use_gradients_of_one_rank(renamed: None) -> None:
    with pytest.raises(RuntimeError, match=RENAMED + "gradients that no other rank has added to"):
        fit(FusedOptimizerDDPStrategy())


def test_a_hook_of_an_earlier_fit_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    strategy = FusedOptimizerDDPStrategy()
    monkeypatch.setattr(strategy, "teardown", lambda: None)  # as when a tuner has ended the fit
    fitting = trainer(strategy)
    fitting.fit(BoringModel())
    assert strategy.report().fused_updates
    monkeypatch.setattr(strategy, "_register_ddp_hooks", lambda: None)
    with pytest.raises(RuntimeError, match=RENAMED):
        fitting.fit(BoringModel())


def test_forward_fusion_needs_no_hook(renamed: None) -> None:
    strategy = FusedOptimizerDDPStrategy(mode="forward")
    fit(strategy)
    assert strategy.report().fused_updates


@pytest.mark.parametrize("cross_iteration", [True, False])
def test_out_of_order_training_does_not_become_ddp(
    renamed: None, monkeypatch: pytest.MonkeyPatch, cross_iteration: bool
) -> None:
    monkeypatch.setattr(OOODataParallelStrategy, "_is_alone", False)  # one process trains plainly by intent
    with pytest.raises(RuntimeError, match=RENAMED + "that of plain ddp"):
        fit(OOODataParallelStrategy(k=0, cross_iteration=cross_iteration))


def test_lightning_calls_what_the_strategies_override() -> None:
    called = []

    class Listening(DDPStrategy):
        def _register_ddp_hooks(self) -> None:
            called.append(type(self.model).__name__)

    fit(Listening())
    assert called == ["DistributedDataParallel"]
