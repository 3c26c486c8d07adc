"""Deep copies and pickles of whatever a fit holds, during it and after it: as with plain training."""

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn

import retime
from contract.models import FEATURES, Net, sgd, sines
from support.fusion import adamw, batches, network
from support.trainers import IGNORED_WARNINGS, quiet_trainer

pytestmark = [*IGNORED_WARNINGS, pytest.mark.filterwarnings("ignore:.*Checkpoint directory")]
COPIES: dict[str, Callable[[Any], Any]] = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda thing: pickle.loads(pickle.dumps(thing)),
}


def net() -> Net:
    torch.manual_seed(0)
    return Net(nn.Linear(FEATURES, FEATURES), optimizer=sgd)


class CopiesAll(Callback):
    """In the middle of the fit."""

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        if trainer.global_step == 3:
            copy_all(trainer, pl_module)


def copy_all(trainer: Trainer, module: LightningModule) -> None:
    things = (module, trainer.optimizers, trainer.strategy, trainer.callbacks, trainer)  # type: ignore[attr-defined]
    for copied in COPIES.values():
        models = [copied(thing) for thing in things]
        assert torch.equal(models[0].net.weight, module.net.weight)
        state = models[1][0].state_dict()["state"]
        assert torch.equal(
            state[0]["momentum_buffer"], trainer.optimizers[0].state_dict()["state"][0]["momentum_buffer"]
        )


def fit(strategy: Any, root: Path, *callbacks: Callback) -> Net:
    module = net()
    shown = {"enable_checkpointing": True, "enable_progress_bar": True, "default_root_dir": root}
    trainer = quiet_trainer(strategy=strategy, max_epochs=1, callbacks=[CopiesAll(), *callbacks], **shown)
    trainer.fit(module, sines(24, 4), sines(24, 4))
    copy_all(trainer, module)
    return module


WAYS: dict[str, Callable[[], tuple[Any, ...]]] = {
    "fused_optimizer": lambda: ("fused_optimizer",),
    "fused_optimizer_forward": lambda: ("fused_optimizer_forward",),
    "callback backward": lambda: ("auto", retime.FuseOptimizer("backward")),
    "callback forward": lambda: ("auto", retime.FuseOptimizer("forward")),
    "ooo_single_device": lambda: (retime.OOOSingleDeviceStrategy(threads=(1, 1)),),
    "memory_budget": lambda: (retime.MemoryBudgetStrategy("64MiB"),),
}


@pytest.mark.parametrize("name", WAYS)
def test_a_fit_can_be_copied_and_is_not_changed_by_it(name: str, tmp_path: Path) -> None:
    strategy, *callbacks = WAYS[name]()
    plain, ours = fit("auto", tmp_path), fit(strategy, tmp_path, *callbacks)
    assert torch.equal(plain.net.weight, ours.net.weight)


@pytest.mark.parametrize("copied", COPIES.values(), ids=COPIES)
@pytest.mark.parametrize("mode", ["backward", "forward"])
def test_a_copied_loop_trains_on_as_the_original(mode: str, copied: Callable[[Any], Any]) -> None:
    def loop(mode: str | None) -> list[dict[str, Tensor]]:
        model = network()
        optimizer = adamw(model.parameters())
        fusion = retime.fuse_optimizer(model, optimizer, mode) if mode else None
        everything, twin = (model, optimizer, fusion), None
        for i, x in enumerate(batches(8)):
            if i == 3:
                twin = copied(everything)
            for model, optimizer, _ in [everything, *([twin] if twin else [])]:
                model(x).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        assert twin is not None
        if fusion:
            assert twin[2].report().fused_updates > 3 * len(list(model.parameters()))
            assert twin[2].optimizer is twin[1]
        return [model.state_dict() for model, _, _ in (everything, twin)]

    plain, ours = loop(None), loop(mode)
    for expected, found in zip(plain, ours, strict=True):
        assert all(torch.equal(expected[name], found[name]) for name in expected)


def test_a_copied_trainer_fits_by_itself(tmp_path: Path) -> None:
    """Not with the original's fusions, which a callback would leave in the strategy."""

    class KeepsATwin(Callback):
        twin: Any = None

        def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
            if trainer.global_step == 3:
                KeepsATwin.twin = copy.deepcopy(trainer)

    def twin_of(*callbacks: Callback) -> Net:
        trainer = quiet_trainer(max_epochs=1, callbacks=[KeepsATwin(), *callbacks])
        trainer.fit(net(), sines(24, 4), sines(24, 4))
        twin = KeepsATwin.twin
        twin.fit_loop.max_epochs = 2
        twin.fit(net(), sines(24, 4), sines(24, 4))
        return twin.lightning_module

    plain, ours = twin_of(), twin_of(retime.FuseOptimizer("backward"))
    measured = twin_of(retime.PeakMemory(every_n_steps=1, log=False))  # in a batch that it measures
    assert torch.equal(plain.net.weight, ours.net.weight)
    assert torch.equal(plain.net.weight, measured.net.weight)
