"""Checkpoints, resuming, crossing between strategies, and what is left on a module afterwards."""

import copy
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint

from contract.bench import Bench
from contract.models import FEATURES, Net, sgd
from contract.record import differences, snapshot
from contract.registry import fits, scenario
from contract.scenarios.schedules import _by, _halve
from contract.traits import NORM_CLIP


def _saved(folder: Path) -> dict[str, Any]:
    return {path.name: torch.load(path, weights_only=False) for path in sorted(folder.glob("*.ckpt"))}


def _scheduled(**kwargs: Any) -> Net:
    return Net(schedule=_by("step", _halve), **kwargs)


@scenario()
def checkpoints_mid_epoch(bench: Bench) -> None:
    saver = ModelCheckpoint(bench.folder, "{step}", every_n_train_steps=2, save_top_k=-1, save_last=True)
    bench.fit(_scheduled(), callbacks=[saver], enable_checkpointing=True)
    bench.keep("checkpoints", _saved(bench.folder))


@scenario()
def checkpoints_mid_window(bench: Bench) -> None:
    saver = ModelCheckpoint(bench.folder, "{step}", every_n_train_steps=1, save_top_k=-1)
    bench.fit(Net(), callbacks=[saver], enable_checkpointing=True, accumulate_grad_batches=2)
    bench.keep("checkpoints", _saved(bench.folder))


@scenario()
def checkpoint_of_best_validation(bench: Bench) -> None:
    saver = ModelCheckpoint(bench.folder, "best", monitor="val_loss", save_weights_only=True)
    bench.fit(Net(), val=bench.loader(batches=2), callbacks=[saver], enable_checkpointing=True, val_check_interval=2)
    bench.keep("checkpoints", _saved(bench.folder))
    bench.keep("best", [saver.best_model_score, saver.best_model_path])


class SavesEachBatch(Callback):
    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        trainer.save_checkpoint(self.folder / f"{trainer.global_step}.ckpt")


@scenario()
def checkpoints_by_hand(bench: Bench) -> None:
    bench.fit(Net(optimizer=sgd), callbacks=[SavesEachBatch(bench.folder)])
    bench.keep("checkpoints", _saved(bench.folder))


def _resume(bench: Bench, first_plain: bool = False, then_plain: bool = False, **kwargs: Any) -> None:
    """Stop in the middle of epoch 1, save, and go on in a new Trainer with a new module."""
    torch.manual_seed(1)
    path = bench.folder / "5.ckpt"
    trainer = bench.trainer(
        plain=first_plain, max_steps=5, max_epochs=3, callbacks=[SavesEachBatch(bench.folder)], **kwargs
    )
    bench.fit(_scheduled(), trainer)
    bench.keep("checkpoint", torch.load(path, weights_only=False))
    bench.fit(_scheduled(), bench.trainer(plain=then_plain, max_epochs=3, **kwargs), ckpt_path=path)


@scenario()
def resume_mid_epoch(bench: Bench) -> None:
    torch.manual_seed(1)
    bench.fit(_scheduled(), max_epochs=3)
    _resume(bench)
    weights, optimizers = (bench.record.entries["fit 3"][part] for part in ("weights", "optimizers"))
    uninterrupted = bench.record.entries["fit 1"]
    assert not list(differences(uninterrupted["weights"], weights)), "resuming changed the weights"
    assert not list(differences(uninterrupted["optimizers"], optimizers)), "resuming changed the optimizer"


fits(
    plain_resumes_ours=lambda bench: _resume(bench, then_plain=True),
    ours_resumes_plain=lambda bench: _resume(bench, first_plain=True),
)

fits(NORM_CLIP, resume_with_norm_clipping=lambda bench: _resume(bench, gradient_clip_val=0.05))


@scenario()
def fit_twice(bench: Bench) -> None:
    module, trainer = _scheduled(), bench.trainer()
    bench.fit(module, trainer)
    trainer.fit_loop.max_epochs = 4
    bench.fit(module, trainer)


@scenario()
def fit_again_in_a_new_trainer(bench: Bench) -> None:
    module = Net(optimizer=sgd)
    bench.fit(module)
    bench.fit(module, accumulate_grad_batches=2)


@scenario()
def fit_ours_then_plain(bench: Bench) -> None:
    """Nothing of the mechanism stays on the module: the plain Trainer trains it as if it were new."""
    module = Net(optimizer=sgd)
    bench.fit(module)
    bench.fit(module, bench.trainer(plain=True, gradient_clip_val=0.05))


@scenario()
def bare_loop_after_fit(bench: Bench) -> None:
    """After the fit, gradients stay where backward puts them, and the module can be copied."""
    module = Net()
    optimizer = bench.fit(module).optimizers[0]
    module.zero_grad()
    for net in (module.net, copy.deepcopy(module.net)):
        loss = net(torch.linspace(-1, 1, FEATURES).repeat(3, 1)).square().sum()
        loss.backward()
        bench.keep(f"gradients {len(bench.record.entries)}", [parameter.grad for parameter in net.parameters()])
    optimizer.step()
    bench.keep("stepped", snapshot(module.state_dict()))
