"""What modules do that a pipeline changes is told; a rank that dies ends the other with its name."""

import os
import signal
import warnings
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torchmetrics
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.plugins import TorchCheckpointIO
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_sequence
from torch.utils.data import DataLoader, Subset

from retime import OOOPipelineStrategy
from retime.foundations.messages import DifferenceWarning, NoEffectWarning
from retime.mechanisms.pipeline import Ownership, PipelineError
from support.pipeline_fits import CLASSES, FEATURES, Classifier, loader, trainer
from support.process_ends import in_shared_memory, runs
from support.ranks import RANK, SHARED, run_ranks
from support.time_limits import limit_s

TOLD = {
    "keeps": "training_step keeps 'losses', 'last' on the module",
    "aggregates": "MeanMetric 'mean_loss' takes a value from each micro-batch",
    "writes": "training_step writes to self.logger",
    "clamps": "'net.0.weight' has a hook on its gradient (register_hook), which runs once a micro-batch",
    "draws": "training_step draws random numbers",
    "adds": "training_step keeps 'total', 'counts' on the module",
    "clips": "under a pipeline Clips.on_after_backward sees the gradients of one rank's layers",
    "reads": "training_step logs or returns 'first', which it computes from what layers of other ranks return",
    "warmsup": "training_step computes its loss by other operations than in the first batch (Add, ",
    "averages": "refused 'average.",
    "averageslater": "refused 'average.",
    "packed": "refused 'net.0' takes or gives a PackedSequence",
}
BY_LAST = ("reads", "warmsup")
"""What the rank of the last stage tells."""
ENDS = {
    "anneals": (0, "refused 'net.0' returns numbers or texts that change (0.5 now), and ranks are sent tensors"),
    "looksback": (1, "refused the loss is nan in the first step, and was finite where all layers were on each rank"),
}
"""What the rank says that ends in the midst of a step."""
LAST = "skips"
"""Behind it the ranks are of no more use: the first one does not know why the last one ends."""


class Keeps(Classifier):
    """Fills a list, and keeps its last loss."""

    def __init__(self) -> None:
        super().__init__()
        self.losses: list[Tensor] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        output = super().training_step(batch, batch_idx)
        self.last = output["loss"].detach()
        self.losses.append(self.last)
        return output


class Aggregates(Classifier):
    """Takes the mean of its losses."""

    def __init__(self) -> None:
        super().__init__()
        self.mean_loss = torchmetrics.MeanMetric()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        output = super().training_step(batch, batch_idx)
        self.mean_loss.update(output["loss"])
        return output


class Writes(Classifier):
    """Writes to its logger by itself."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        output = super().training_step(batch, batch_idx)
        self.logger.log_metrics({"own": 1.0})  # type: ignore[union-attr]
        return output


class Clamps(Classifier):
    """Has a hook on a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.net[0].weight.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))  # type: ignore[index]


class Averages(Classifier):
    """Averages its weights into a copy."""

    def __init__(self) -> None:
        super().__init__()
        self.average = deepcopy(self.net).requires_grad_(False)

    def on_train_batch_end(self, *_: Any) -> None:
        for kept, parameter in zip(self.average.parameters(), self.net.parameters(), strict=True):
            kept.lerp_(parameter.detach(), 0.1)


class AveragesLater(Averages):
    """Averages its weights into a copy, but not behind the first batch."""

    def on_train_batch_end(self, *_: Any) -> None:
        if self.global_step == 2:
            super().on_train_batch_end()


class Draws(Classifier):
    """Has dropout that is no module."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        inputs, *rest = batch
        return super().training_step((nn.functional.dropout(inputs, 0.1), *rest), batch_idx)


class Adds(Classifier):
    """Writes into what it keeps."""

    def __init__(self) -> None:
        super().__init__()
        self.total, self.counts = torch.zeros(()), {"samples": 0}

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        output = super().training_step(batch, batch_idx)
        self.total += output["loss"].detach()
        self.counts["samples"] += len(batch[0])
        return output


class Clips(Classifier):
    """Clips by the norm of the gradients that it sees."""

    def on_after_backward(self) -> None:
        nn.utils.clip_grad_norm_(self.parameters(), 0.1)


class Reads(Classifier):
    """Logs what its first layer gives."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        hidden = firsts = batch[0]
        for number, layer in enumerate(self.net):  # type: ignore[arg-type]
            hidden = layer(hidden)
            firsts = hidden if not number else firsts
        self.log("first", firsts.abs().mean())
        return {"loss": nn.functional.cross_entropy(hidden, batch[1])}


class WarmsUp(Classifier):
    """Has another term in its loss behind the first batch."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        logits = self.net(batch[0])
        loss = nn.functional.cross_entropy(logits, batch[1])
        return {"loss": loss + logits.var(0).mean() if batch_idx else loss}


class Scales(nn.Module):
    """Takes a number along."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, given: tuple[Tensor, float]) -> tuple[Tensor, float]:
        return self.layer(given[0]) * given[1], given[1]


class Anneals(Classifier):
    """Gives its layers a number that changes."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(*map(Scales, self.net))  # type: ignore[arg-type]

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        logits, _ = self.net((batch[0], 1 / (1 + batch_idx)))
        return {"loss": nn.functional.cross_entropy(logits, batch[1])}


class LooksBack(Classifier):
    """Reads a frozen weight of its first layer behind the last one."""

    def __init__(self) -> None:
        super().__init__()
        self.net[0].requires_grad_(False)  # type: ignore[index]

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        logits = self.net(batch[0]) + self.net[0].weight[0, 0]  # type: ignore[index]
        return {"loss": nn.functional.cross_entropy(logits, batch[1])}


class Skips(Classifier):
    """Has no loss for the third batch."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        output = super().training_step(batch, batch_idx)
        return None if batch_idx == 2 else output


class Packs(nn.Module):
    """Gives packed sequences on."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(FEATURES, FEATURES)

    def forward(self, inputs: Any) -> Any:
        return pack_sequence([self.linear(one)[None] for one in inputs])


class Packed(Classifier):
    """Packed sequences go between its layers."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(Packs(), _Unpacks())


class _Unpacks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(FEATURES, CLASSES)

    def forward(self, packed: Any) -> Tensor:
        return self.linear(packed.data)


HABITS: dict[str, Callable[[], Classifier]] = {one.__name__.lower(): one for one in Classifier.__subclasses__()} | {
    "averageslater": AveragesLater
}


def fit_by(habit: str) -> None:
    """What is warned of is printed, or refused."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        logger = CSVLogger(SHARED) if habit == "writes" else False
        fit = trainer("ooo_pipeline", SHARED, devices=2, max_epochs=1, logger=logger, log_every_n_steps=1)
        try:
            fit.fit(HABITS[habit](), loader())
        except PipelineError as error:
            print("refused", error)
            if habit == LAST or habit in ENDS:
                raise
    for warning in caught:
        if issubclass(warning.category, DifferenceWarning | NoEffectWarning):
            print(Path(warning.filename).name, warning.message)


@pytest.fixture(scope="module")
def said() -> list[dict[str, str]]:
    """What each rank prints, by habit; one start for all of them."""
    ranks = run_ranks(2, __file__, *(f"fit_by|{habit}" for habit in (*TOLD, LAST)), joined=False)
    return [dict(one.partition("\n")[::2] for one in f"\n{rank.stdout}".split("\n== fit_by|")[1:]) for rank in ranks]


@pytest.mark.parametrize("habit", TOLD)
def test_the_first_rank_warns_at_the_users_line_and_both_refuse(habit: str, said: list[dict[str, str]]) -> None:
    for rank, one in enumerate(said):
        refused = TOLD[habit].startswith("refused")
        wanted = TOLD[habit] if refused else f"test_ooo_pipeline_habits.py {TOLD[habit]}"
        assert one[habit].count(wanted) == (refused or rank == (habit in BY_LAST)), one
        others = [said for said in TOLD.values() if said != TOLD[habit]]
        assert not any(other in one[habit] for other in others), one


def test_a_batch_cannot_be_skipped(said: list[dict[str, str]]) -> None:
    assert "a pipeline cannot skip batches: return 0 * loss in place of None" in said[1][LAST]


@pytest.mark.parametrize("habit", ENDS)
def test_what_only_a_step_shows_is_refused(habit: str) -> None:
    rank, said = ENDS[habit]
    assert said in run_ranks(2, __file__, f"fit_by|{habit}", joined=False)[rank].stdout


@dataclass
class Batch:
    """Of a class of the user's own."""

    inputs: Tensor
    labels: Tensor


class NormsBetween(Classifier):
    """Normalises between its layers, by modules without parameters, and gets batches of a class of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.ModuleList([nn.Linear(FEATURES, FEATURES) for _ in range(4)])
        self.norms = nn.ModuleList([nn.BatchNorm1d(FEATURES, affine=False) for _ in range(4)])

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        hidden = batch.inputs
        for layer, norm in zip(self.net, self.norms, strict=True):  # type: ignore[arg-type]
            hidden = norm(layer(hidden))
        return {"loss": nn.functional.cross_entropy(hidden, batch.labels)}


def fit_norms_between(strategy: Any, folder: Path, devices: int) -> dict[str, Any]:
    def collate(rows: list[Any]) -> Batch:
        inputs, labels = zip(*rows, strict=True)
        return Batch(torch.stack(inputs), torch.stack(labels))

    data = DataLoader(Subset(loader().dataset, range(20)), 8, collate_fn=collate)  # the last one has 4
    fit = trainer(strategy, folder, devices=devices, max_epochs=2)
    module = NormsBetween()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of validation that is not there
        fit.fit(module, data)
    return module.state_dict()


def save_norms_between(folder: str) -> None:
    state = fit_norms_between(OOOPipelineStrategy(microbatches=1), Path(folder), devices=2)
    torch.save(state, f"{folder}/{RANK}.pt")


def test_buffers_between_the_layers_and_batches_of_a_class_of_ones_own(tmp_path: Path) -> None:
    run_ranks(2, __file__, f"save_norms_between|{tmp_path}")
    plain = fit_norms_between("auto", tmp_path, devices=1)
    for rank in range(2):
        ours = torch.load(tmp_path / f"{rank}.pt")
        for name, value in plain.items():
            torch.testing.assert_close(
                ours[name], value, rtol=1e-4, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}"
            )


LOST = "RankLostError a message of"
FAULTS = {
    "gathers": (0, f"{LOST} rank 1 did not come"),
    "writes": (1, f"{LOST} rank 0 did not come"),
    "raises": (0, f"{LOST} rank 1 (stage"),
}


class Raises(Classifier):
    """On one rank, in the third batch."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if RANK == 1 and self.global_step == 2:
            raise ArithmeticError("of the module's own")
        return super().training_step(batch, batch_idx)


def kill(*_: Any, **__: Any) -> Any:
    os.kill(os.getpid(), signal.SIGKILL)


def fit_fails(how: str, given: str) -> None:
    """Print the process and the error that the fit ends with."""
    print(os.getpid(), flush=True)
    folder = Path(given)
    if how == "gathers" and RANK == 1:
        Ownership.gather = kill  # type: ignore[method-assign]
    if how == "writes" and RANK == 0:
        TorchCheckpointIO.save_checkpoint = kill  # type: ignore[method-assign]
    saves = [ModelCheckpoint(folder, every_n_train_steps=1)] if how != "raises" else []
    strategy = OOOPipelineStrategy(timeout=timedelta(seconds=limit_s(20)))
    fit = trainer(strategy, folder, devices=2, max_epochs=1, callbacks=saves, enable_checkpointing=bool(saves))
    try:
        fit.fit(Raises() if how == "raises" else Classifier(), loader())
    except Exception as error:
        print(type(error).__name__, error, flush=True)
    try:
        if how == "raises":
            fit.save_checkpoint(folder / "part.ckpt")
    except Exception as error:
        print(type(error).__name__, error, flush=True)
    os._exit(0)


@pytest.mark.parametrize("how", [pytest.param("gathers", marks=pytest.mark.long), "writes", "raises"])
def test_the_other_rank_ends_with_its_name(how: str, tmp_path: Path) -> None:
    ranks = run_ranks(2, __file__, f"fit_fails|{how}|{tmp_path}", timeout_s=60, joined=False)
    printed = [one.stdout.partition("\n")[2] for one in ranks]
    other, said = FAULTS[how]
    pid, _, error = printed[other].partition("\n")
    assert error.startswith(said), ranks[other].stderr[-2000:]
    failed, of_failed = ranks[1 - other], printed[1 - other]
    if how == "raises":
        assert of_failed.partition("\n")[2].startswith("ArithmeticError of the module's own")
        for one in ranks:  # behind it, a checkpoint would have a part of the model
            assert "PipelineError 'net." in one.stdout
            assert "lies on another rank, since training over ranks that ended with an exception" in one.stdout
        assert not (tmp_path / "part.ckpt").exists()
    else:
        assert failed.returncode == -9
    for process in (pid, of_failed.split()[0]):
        assert not runs(process)
        assert not in_shared_memory(process)
