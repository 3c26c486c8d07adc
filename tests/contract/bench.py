"""What a scenario may do: build a Trainer with the row's strategy, fit, and keep what should be equal."""

import random
import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch.utils.data import DataLoader, TensorDataset

from contract.models import BATCH, FEATURES
from contract.record import Record, snapshot
from contract.rows import Row
from retime.foundations.messages import DifferenceWarning, NoEffectWarning
from support.garbage import pass_over_what_is_there
from support.quiet import only_errors_logged
from support.trainers import MemoryLogger, quiet_trainer

KNOWN_WARNINGS = {
    "does not have many workers": "the data is tiny, worker processes would only cost time",
    "have no `val_dataloader`": "one module serves scenarios with and without validation",
    "LeafSpec": "Lightning calls torch's older name",
    "AMP with fp16 is not supported on CPU": "a scenario asks for 16-mixed to see what becomes of it",
    "It is recommended to use `self.log('test_loss'": "a plain Trainer in a process of a pipeline evaluates by itself",
    "Using `DistributedSampler` with the dataloaders": "two ranks evaluate here, to compare what each of them logs",
    "`broadcast_buffers` is deprecated": "newer torch renames the option, older torch has only this name",
    "functional.all_gather is deprecated": "Lightning calls torch's older name",
    "The .grad attribute of a Tensor that is not a leaf": "torch.compile looks at it, of what a function is given",
    "`training_step` returned `None`": "a scenario returns None on purpose",
}
"""Warnings that Lightning and torch give under the plain strategy too, by message, each with the reason to hide it."""


OWN_WARNINGS = (DifferenceWarning, NoEffectWarning)
OF_THE_BENCH = "training_step keeps 'trace' on the module:"
"""What pipelines rightly say of the scenarios' own list, which `contract.in_stages` puts together."""


class ResumableLoader(DataLoader[Any]):
    """Goes on after the batch at which a checkpoint was taken; Lightning asks for this before it resumes mid-epoch."""

    start = served = 0

    def __iter__(self) -> Any:
        start, self.start = self.start, 0
        for index, batch in enumerate(super().__iter__()):
            if index >= start:
                self.served = index + 1
                yield batch
        self.served = 0

    def state_dict(self) -> dict[str, int]:
        return {"served": self.served}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.start = state["served"]


@dataclass(frozen=True)
class Scenario:
    """One run to repeat under every row.

    Attributes:
        name: the function's name.
        drive: does the run on a `Bench`.
        traits: what a mechanism may have to step aside for (`contract.traits`).
        single: why it makes sense on one device only; empty if it runs on two ranks as well.
        several: whether it makes sense on several ranks only.
        ddp: keyword arguments a DDP strategy needs for it.
    """

    name: str
    drive: Callable[["Bench"], object]
    traits: frozenset[str] = frozenset()
    single: str = ""
    several: bool = False
    ddp: dict[str, Any] = field(default_factory=dict)

    @property
    def marks(self) -> frozenset[str]:
        """Its traits, and its name."""
        return self.traits | {self.name}

    def fits(self, row: Row) -> bool:
        """Whether it makes sense under this row."""
        if not self.name.startswith(row.only):
            return False
        if row.is_pipeline:  # what only DDP cannot do may be refused here
            return not self.several and (not self.single or row.refusal(self.marks) is not None)
        return not (self.single if row.on_ranks else self.several)


class Bench:
    """Runs fits under a row's strategy and keeps what they leave behind.

    Attributes:
        world_size: ranks that have batches of their own.
        devices: ranks.
    """

    def __init__(self, row: Row, scenario: Scenario, folder: Path, world_size: int = 1) -> None:
        self.row = row
        self.scenario = scenario
        self.folder = folder
        self.devices = world_size
        self.world_size = 1 if row.is_pipeline else world_size
        self.record = Record()
        self._retimed: list[Trainer] = []

    def keep(self, name: str, value: Any) -> None:
        """Add `value` to what must equal the plain run's."""
        if name in self.record.entries:
            raise ValueError(f"the scenario keeps two values called {name!r}")
        self.record.entries[name] = snapshot(value, self.folder)

    def loader(self, batch: int = BATCH, batches: int = 3, **kwargs: Any) -> DataLoader[Any]:
        """Fixed random inputs and targets: `batches` batches for each rank."""
        generator = torch.Generator().manual_seed(7)
        samples = batch * batches * self.world_size
        inputs = torch.randn(samples, FEATURES, generator=generator)
        return ResumableLoader(TensorDataset(inputs, inputs.roll(1, dims=1).sin()), batch_size=batch, **kwargs)

    def trainer(self, plain: bool = False, **kwargs: Any) -> Trainer:
        """A quiet Trainer with the row's strategy (`plain`: with the strategy the row is measured against)."""
        row = self.row.reference if plain else self.row
        quiet: dict[str, Any] = {
            "devices": self.devices if row.on_ranks else 1,
            "default_root_dir": self.folder,
            "logger": MemoryLogger(),
            "log_every_n_steps": 1,
            "max_epochs": 2,
            "num_sanity_val_steps": 0,
        }
        callbacks = kwargs.pop("callbacks", [])
        trainer = quiet_trainer(
            **quiet | dict(row.trainer) | kwargs,
            strategy=row.strategy(self.scenario.ddp),
            callbacks=[*callbacks, *row.callbacks()],
        )
        if row.report is not None:
            self._retimed.append(trainer)
        return trainer

    def fit(
        self,
        module: LightningModule,
        trainer: Trainer | None = None,
        loader: Any = None,
        val: Any = None,
        ckpt_path: Any = None,
        **kwargs: Any,
    ) -> Trainer:
        """Fit, and keep what it left behind, also when it raises."""
        trainer = self.trainer(**kwargs) if trainer is None else trainer
        if loader is None and not getattr(module, "serves_data", False):
            loader = self.loader()
        try:
            # Lightning's own checkpoints hold more than tensors: loading them needs weights_only=False.
            trainer.fit(module, loader, val, ckpt_path=ckpt_path, weights_only=False if ckpt_path else None)
        finally:
            self._keep_fit(trainer, module)
        return trainer

    def _keep_fit(self, trainer: Trainer, module: LightningModule) -> None:
        fits = sum(name.startswith("fit ") for name in self.record.entries)
        left = {
            "weights": module.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in trainer.optimizers],
            "schedulers": [config.scheduler.state_dict() for config in trainer.lr_scheduler_configs],
            "global_step": trainer.global_step,
            "epoch": trainer.current_epoch,
            "trace": getattr(module, "trace", []),
            "logged": trainer.logger.lines if isinstance(trainer.logger, MemoryLogger) else [],
            "metrics": dict(trainer.callback_metrics),
        }
        self.keep(f"fit {fits + 1}", left)
        if trainer in self._retimed:
            report = self.row.report(trainer)
            self.record.fused_updates.append(report.fused_updates)
            for reason, count in (report.plain_steps | getattr(report, "unfused", {})).items():
                self.record.reasons[reason] = self.record.reasons.get(reason, 0) + count


def run(row: Row, scenario: Scenario, folder: Path, world_size: int = 1) -> Record:
    """Run `scenario` under `row` from fixed seeds; unknown warnings are errors."""
    folder.mkdir(parents=True, exist_ok=True)
    pass_over_what_is_there()
    random.seed(0)
    torch.manual_seed(0)
    bench = Bench(row, scenario, folder, world_size)
    with _only_known_warnings(bench.record), only_errors_logged():
        scenario.drive(bench)
    return bench.record


@contextmanager
def _only_known_warnings(record: Record) -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for message in KNOWN_WARNINGS:
            warnings.filterwarnings("ignore", message=f"(?s).*{re.escape(message)}")
        for category in OWN_WARNINGS:
            warnings.simplefilter("always", category=category)
        show = warnings.showwarning

        def collect(message: Any, category: Any, *args: Any, **kwargs: Any) -> None:
            if str(message).startswith(OF_THE_BENCH):
                return
            if issubclass(category, OWN_WARNINGS):
                record.own_warnings.append(str(message))
            else:
                show(message, category, *args, **kwargs)

        warnings.showwarning = collect
        yield
