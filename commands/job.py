"""What the commands work on: a model, a batch, its loss and its optimizers, from a function's name or a config."""

import argparse
import contextlib
import importlib
import inspect
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import nn
from torch.utils.data import DataLoader

from retime.commands.reference import called
from retime.foundations.torch_private.engine import tree_map
from retime.mechanisms.memory_budget import Gradients

_BLOCKS = ("model", "data", "optimizer", "batch_size")


class _StandIn(Trainer):
    """For modules that ask their trainer: schedules of learning rates do, and have no part in a plan."""

    estimated_stepping_batches = 1000


@dataclass
class Job:
    """What to plan: a model, a batch, what computes the loss, and the optimizers.

    `gradients` says what those of the step before do; see `TrainingStep`.
    """

    model: nn.Module
    batch: Any
    loss: Callable[[Any], Any]
    optimizers: list[torch.optim.Optimizer]
    gradients: Gradients = "freed"


@dataclass
class Given:
    """What the command line names: a model, its first batch, and which optimizer, if it says so."""

    model: nn.Module
    batch: Any
    optimizer: dict[str, Any] | None


def add_job_options(command: argparse.ArgumentParser) -> None:
    """What names a job, for :func:`given_by`."""
    command.add_argument("words", nargs="*", metavar="WORD", help="package.module:function; with --config: overrides")
    command.add_argument("--config", type=Path, metavar="FILE", help="a Hydra config with model, data and so on")
    command.add_argument("--batch", type=int, help="samples in a batch")
    command.add_argument("--optimizer", help="for a plain nn.Module: a class such as torch.optim.AdamW")


def given_by(options: argparse.Namespace, words: Sequence[str]) -> Given:
    """What the command line names: with `--config` words are overrides, else the one word is a reference.

    Raises:
        ValueError: they name none.
    """
    if options.batch is not None and options.batch < 1:
        raise ValueError(f"--batch {options.batch}: give 1 or more")
    given = _from_config(options, words) if options.config else _from_reference(options, words)
    if isinstance(given.model, LightningModule):
        kind = type(given.model).__name__
        if not is_overridden("training_step", given.model):
            raise ValueError(f"{kind} has no training_step: write one, or return a plain nn.Module")
        if options.optimizer and is_overridden("configure_optimizers", given.model):
            raise ValueError(f"--optimizer {options.optimizer}: {kind} has a configure_optimizers, so drop --optimizer")
    return given


def job_of(options: argparse.Namespace, words: Sequence[str]) -> Job:
    """The job that the command line names.

    Raises:
        ValueError: it names none.
    """
    if options.accumulate < 1:
        raise ValueError(f"--accumulate {options.accumulate}: a step takes gradients of 1 batch or more")
    given = given_by(options, words)
    job = _lightning_job(given) if isinstance(given.model, LightningModule) else _supervised_job(given)
    if options.accumulate > 1:
        job.gradients = "kept"
    return job


class Supervised(LightningModule):
    """A plain nn.Module with its loss and its optimizer, for a Trainer."""

    def __init__(self, job: Job) -> None:
        super().__init__()
        self.model = job.model
        self._job_loss, self._made = job.loss, job.optimizers

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self._job_loss(batch)

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        return self._made


def module_of(given: Given) -> LightningModule:
    """What a Trainer can fit: the LightningModule that was given, or one around the plain module.

    Raises:
        ValueError: nothing says which optimizer.
    """
    model, kind = given.model, type(given.model).__name__
    own = isinstance(model, LightningModule) and is_overridden("configure_optimizers", model)
    if not own and not given.optimizer:
        raise ValueError(f"{kind} has no optimizer: give --optimizer, such as --optimizer torch.optim.AdamW")
    if not isinstance(model, LightningModule):
        return Supervised(_supervised_job(given))
    if not own:
        model.configure_optimizers = lambda: _built(given)  # type: ignore[method-assign]
    return model


def optimizers_in(made: Any) -> list[torch.optim.Optimizer]:
    """The optimizers in what a `configure_optimizers` returned."""
    if isinstance(made, torch.optim.Optimizer):
        return [made]
    if isinstance(made, dict):
        return [made["optimizer"]]
    first = made[0] if isinstance(made, tuple | list) and made and isinstance(made[0], list | tuple) else made
    several: Any = first or ()
    return [one for one in several if isinstance(one, torch.optim.Optimizer)]


def _from_reference(options: argparse.Namespace, words: Sequence[str]) -> Given:
    if len(words) != 1 or ":" not in words[0]:
        raise ValueError(f"{' '.join(words)!r} names no model: write package.module:function, or give --config FILE")
    (reference,) = words
    model, batch = called(reference, options.batch)
    if next(model.parameters(), None) is None:
        raise ValueError(f"{reference} returned a {type(model).__name__} without parameters: nothing of it is trained")
    model = model.to(options.device).train()
    if isinstance(batch, LightningDataModule):
        batch = _first_batch(batch)
    elif isinstance(batch, DataLoader):
        batch = next(iter(batch))
    return Given(model, _on(options.device, batch), _optimizer_block(options))


def _from_config(options: argparse.Namespace, overrides: Sequence[str]) -> Given:
    from retime.recipes.core import build

    blocks = _blocks(options.config, overrides, options.device)
    _need(options.config, blocks, "model", "data")
    device = torch.device(options.device)
    model = build.build_model(blocks["model"], device, seed=0)
    batch = _batch_of(options, blocks, device)
    optimizer = _optimizer_block(options) or blocks["optimizer"]
    if not isinstance(model, LightningModule):
        _need(options.config, blocks | {"optimizer": optimizer}, "optimizer")
    return Given(model, batch, optimizer)


def _blocks(file: Path, overrides: Sequence[str], device: str) -> dict[str, Any]:
    """The parts of a configuration that a plan needs; interpolations elsewhere in it may need a running Hydra."""
    from omegaconf import OmegaConf

    hardware = {"name": "cuda" if device.startswith("cuda") else "cpu"}
    settings = OmegaConf.merge({"hardware": hardware}, _composed(file, overrides))
    found = {key: OmegaConf.select(settings, key) for key in _BLOCKS}
    return {
        key: OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value
        for key, value in found.items()
    }


def _composed(file: Path, overrides: Sequence[str]) -> Any:
    """The configuration as Hydra puts it together: defaults, groups in the file's folder, overrides.

    Raises:
        ValueError, OSError: Hydra cannot read it, or does not know what is overridden.
    """
    from hydra import compose, initialize_config_dir
    from hydra.errors import HydraException
    from yaml import YAMLError  # type: ignore[import-untyped]  # comes with OmegaConf, without types

    from retime.recipes.core.schema import register_all

    if not file.is_file():
        raise FileNotFoundError(f"--config {file}: there is no such file")
    if file.suffix != ".yaml":
        raise ValueError(f"--config {file}: Hydra reads files whose names end in .yaml")
    register_all()
    try:
        with initialize_config_dir(str(file.parent.resolve()), version_base="1.3"):
            return compose(file.stem, overrides=list(overrides))
    except (HydraException, YAMLError) as error:
        because = f": {error.__cause__}" if error.__cause__ else ""
        raise ValueError(f"--config {file}: {error}{because}") from error


def _need(file: Path, blocks: dict[str, Any], *keys: str) -> None:
    missing = [key for key in keys if not blocks[key]]
    if missing:
        raise ValueError(
            f"{file} has no {', '.join(missing)}: a plan needs a model and data, for a data set a batch_size, and for "
            "a plain nn.Module an optimizer"
        )


def _batch_of(options: argparse.Namespace, blocks: dict[str, Any], device: torch.device) -> Any:
    """The first training batch of a LightningDataModule, or of a data set of `(input, target)` pairs."""
    from hydra.utils import get_object

    from retime.recipes.core import build

    block = blocks["data"]
    target = get_object(block["_target_"]) if "_target_" in block else None
    if isinstance(target, type) and issubclass(target, LightningDataModule):
        sized = {"batch_size": options.batch} if options.batch else {}
        return _on(device, _first_batch(build.build({**block, **sized})))
    sized = {"batch_size": options.batch or blocks["batch_size"]}
    _need(options.config, sized, "batch_size")
    (batch,) = build.build_batches(block, sized["batch_size"], 1, device)
    return batch


def _first_batch(data: LightningDataModule) -> Any:
    data.prepare_data()
    data.setup("fit")
    return next(iter(data.train_dataloader()))


def _on(device: torch.device | str, batch: Any) -> Any:
    return tree_map(lambda leaf: leaf.to(device) if isinstance(leaf, torch.Tensor) else leaf, batch)


def _optimizer_block(options: argparse.Namespace) -> dict[str, Any] | None:
    """What `--optimizer` names, with a learning rate, which every optimizer takes and no plan depends on.

    Raises:
        ValueError: it names no optimizer.
    """
    if not options.optimizer:
        return None
    module, _, name = options.optimizer.rpartition(".")
    try:
        found = getattr(importlib.import_module(module), name) if module else None
    except (ImportError, AttributeError):
        found = None
    if not (isinstance(found, type) and issubclass(found, torch.optim.Optimizer)):
        raise ValueError(f"--optimizer {options.optimizer}: there is no such class; write one as torch.optim.AdamW")
    return {"_target_": options.optimizer, "lr": 0.01}


def _built(given: Given) -> torch.optim.Optimizer:
    from retime.recipes.core import build

    assert given.optimizer is not None
    return build.build_optimizer(given.optimizer, given.model.parameters(), {})


def _supervised_job(given: Given) -> Job:
    from retime.recipes.core import build

    model, batch = given.model, given.batch
    optimizers = [_built(given)] if given.optimizer else []
    if not isinstance(batch, Mapping) and not (isinstance(batch, list | tuple) and len(batch) > 1):
        size = f" of {len(batch)}" if isinstance(batch, list | tuple) else ""
        raise ValueError(
            f"the batch is a {type(batch).__name__}{size}: for a plain nn.Module give (inputs, targets), or a dict of "
            "what its forward takes; a LightningModule takes any batch"
        )
    if isinstance(batch, Mapping):  # as models of transformers take it, which return their loss
        return Job(model, batch, lambda part: model(**part), optimizers)
    return Job(model, batch, lambda part: build.loss_of(model(part[0]), part[1]), optimizers)


def _lightning_job(given: Given) -> Job:
    """By its own training step, with its own optimizers where it makes some; gradients as the Trainer has them."""
    model = given.model
    assert isinstance(model, LightningModule)
    with quiet():
        model.trainer = _StandIn(
            accelerator="cpu", logger=False, barebones=True, max_steps=_StandIn.estimated_stepping_batches
        )
    optimizers: list[torch.optim.Optimizer] = []
    if is_overridden("configure_optimizers", model):
        optimizers = optimizers_in(model.configure_optimizers())
    elif given.optimizer:
        optimizers = [_built(given)]
    kept = is_overridden("optimizer_zero_grad", model)  # it may leave zeros
    return Job(model, given.batch, _training_step(model), optimizers, "kept" if kept else "freed after forward")


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """A Trainer tells what it leaves out and which devices it found; no training follows here."""
    loggers = [logging.getLogger(name) for name in ("lightning.pytorch", "lightning.fabric")]
    levels = [logger.level for logger in loggers]
    try:
        for logger in loggers:
            logger.setLevel(logging.WARNING)
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def _training_step(model: LightningModule) -> Callable[[Any], Any]:
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    named = [one for one in inspect.signature(model.training_step).parameters.values() if one.kind in kinds]
    more = (0,) * (len(named) - 1)  # the batch's number, and the loader's: a Trainer gives them by position
    for name in ("log", "log_dict"):  # there is no trainer to log to
        model.__dict__[name] = lambda *_, **__: None
    return lambda batch: model.training_step(batch, *more)
