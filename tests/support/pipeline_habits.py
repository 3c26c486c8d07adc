"""One rank of fits by modules with habits that a pipeline changes: `python pipeline_habits.py FOLDER HABIT...`.

Behind each one's name it prints what is warned of, or refused.
"""

import sys
import warnings
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
import torchmetrics
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_sequence

from retime.foundations.messages import DifferenceWarning, NoEffectWarning
from retime.mechanisms.pipeline import PipelineError
from support.pipeline_fits import CLASSES, FEATURES, Classifier, loader, trainer


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


def main(name: str, folder: Path) -> None:
    print("==", name, flush=True)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        logger = CSVLogger(folder) if name == "writes" else False
        fit = trainer("ooo_pipeline", folder, devices=2, max_epochs=1, logger=logger, log_every_n_steps=1)
        try:
            fit.fit(HABITS[name](), loader())
        except PipelineError as error:
            print("refused", error)
    for warning in caught:
        if issubclass(warning.category, DifferenceWarning | NoEffectWarning):
            print(Path(warning.filename).name, warning.message)


if __name__ == "__main__":
    torch.set_num_threads(1)
    for habit in sys.argv[2:]:
        main(habit, Path(sys.argv[1]))
