"""What modules may do in a plain Trainer, and a pipeline changes, is told: by a warning, or by an error."""

import warnings
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torchmetrics
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_sequence

from retime.foundations.messages import DifferenceWarning, NoEffectWarning
from retime.mechanisms.pipeline import PipelineError
from support.pipeline_fits import CLASSES, FEATURES, Classifier, loader, trainer
from support.ranks import SHARED, run_ranks

TOLD = {
    "keeps": "training_step keeps 'losses', 'last' on the module",
    "aggregates": "MeanMetric 'mean_loss' takes a value from each micro-batch",
    "writes": "training_step writes to self.logger",
    "clamps": "'net.0.weight' has a hook on its gradient (register_hook), which runs once a micro-batch",
    "averages": "refused 'average.",
    "packed": "refused 'net.0' takes or gives a PackedSequence",
}
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
        logits: Tensor = self.linear(packed.data)
        return logits


HABITS: dict[str, Callable[[], Classifier]] = {
    one.__name__.lower(): one for one in (Keeps, Aggregates, Writes, Clamps, Averages, Packed, Skips)
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
            if habit == LAST:
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
        assert one[habit].count(wanted) == (refused or rank == 0), one
        others = [said for said in TOLD.values() if said != TOLD[habit]]
        assert not any(other in one[habit] for other in others), one


def test_a_batch_cannot_be_skipped(said: list[dict[str, str]]) -> None:
    assert "a pipeline cannot skip batches: return 0 * loss in place of None" in said[1][LAST]
