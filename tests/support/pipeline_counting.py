"""One rank: logs numbers that are no means over samples, draws, and writes down what is warned of and was shown."""

import json
import math
import os
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import torchmetrics
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from retime import OOOPipelineStrategy, PipelineTimeline
from retime.foundations.messages import DifferenceWarning
from support.pipeline_fits import Classifier, loader, trainer

SAMPLES, CLASSES = 32, 8


class Counting(Classifier):
    """Logs a count, a standard deviation, and a metric in each step."""

    def __init__(self) -> None:
        super().__init__()
        self.recent = torchmetrics.MeanMetric()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("samples", float(len(batch[1])))
        self.log("spread", batch[0].std())
        self.recent(batch[0].mean())
        self.log("recent", self.recent)
        return super().training_step(batch, batch_idx)


class Perplexity(LightningModule):
    """Begins with outputs near 0, where micro-batches are alike, whatever is made of their losses."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        last = nn.Linear(32, CLASSES)
        nn.init.normal_(last.weight, std=0.02)
        nn.init.zeros_(last.bias)
        self.net = nn.Sequential(nn.Embedding(20, 32), nn.Linear(32, 32), nn.Tanh(), last)
        self.shown: list[dict[str, float]] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        logits = self.net(batch[0])
        loss = nn.functional.cross_entropy(logits, batch[1])
        right = (logits.argmax(-1) == batch[1]).float()
        self.log_dict({"loss": loss, "twice": 2 * loss.detach(), "read": loss.item()})
        self.log_dict({"right": right.mean(), "how many": right.sum(), "samples": float(len(right)), "rate": 0.5})
        self.log("largest", logits.max(), reduce_fx="max")
        self.log("summed", right.sum(), reduce_fx="sum")
        self.log("perplexity", loss.exp())
        self.log("read perplexity", math.exp(loss.item()))
        self.log("root", logits.square().mean().sqrt())
        self.log("ratio", logits.square().sum() / logits.abs().sum())
        self.log("mean of largest", logits.max())
        self.log("of the right", logits[right > 0].sum() / right.sum().clamp(min=1))
        return loss

    def on_train_batch_end(self, *_: Any) -> None:
        self.shown.append({name: float(value) for name, value in self.trainer.callback_metrics.items()})

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.5)


def shown(strategy: Any, folder: Path, devices: int) -> list[dict[str, float]]:
    """What is logged in each of 20 steps; half of the labels are random."""
    drawn = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, 20, (SAMPLES,), generator=drawn)
    labels = tokens % CLASSES
    labels[SAMPLES // 2 :] = torch.randint(0, CLASSES, (SAMPLES // 2,), generator=drawn)
    module = Perplexity()
    fit = trainer(strategy, folder, devices=devices, max_epochs=20)
    fit.fit(module, DataLoader(TensorDataset(tokens, labels), batch_size=SAMPLES))
    return module.shown


def main(folder: Path) -> None:
    draws = PipelineTimeline(2, folder / "drawn")
    said = {}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit = trainer("ooo_pipeline", folder, devices=2, max_steps=2, callbacks=[draws])
        fit.fit(Counting(), loader(), loader())
        said["counting"] = [str(one.message) for one in caught if one.category is DifferenceWarning]
        caught.clear()
        values = shown(OOOPipelineStrategy(microbatches=4), folder, 2)
        said["perplexity"] = [str(one.message) for one in caught if one.category is DifferenceWarning]
    (folder / f"{os.environ['RANK']}.json").write_text(json.dumps({"said": said, "shown": values}))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]))
