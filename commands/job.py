"""What the commands work on: a model, a batch, its loss and its optimizers, from a function's name or a config."""

import argparse
import contextlib
import copy
import importlib
import inspect
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.utilities import CombinedLoader
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

from retime.foundations.torch_private.engine import tree_leaves, tree_map
from retime.mechanisms.memory_budget import Gradients

Make = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
_FORM = "write package.module:function, of a function that returns (model, batch)"
_STARRED = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


class _StandIn(Trainer):
    """For modules that ask their trainer: schedules of learning rates do, and have no part in a plan."""

    estimated_stepping_batches = 1000


@dataclass
class Job:
    """Job to plan: a model, a batch, what computes the loss, and the optimizers.

    `gradients` says what those of the step before do; see `TrainingStep`.
    """

    model: nn.Module
    batch: Any
    loss: Callable[[Any], Any]
    optimizers: list[torch.optim.Optimizer]
    gradients: Gradients = "freed"


@dataclass
class Given:
    """Model that the command line names, its first batch, and what makes an optimizer, if it says which."""

    model: nn.Module
    batch: Any
    optimizer: Make | None


def add_job_options(command: argparse.ArgumentParser) -> None:
    """Add the options that name a job, for :func:`given_by`."""
    command.add_argument("words", nargs="*", metavar="WORD", help="package.module:function; with --config: overrides")
    command.add_argument("--config", type=Path, metavar="FILE", help="a Hydra config with model, data and so on")
    command.add_argument("--batch", type=int, help="samples in a batch")
    command.add_argument("--optimizer", help="for a plain nn.Module: a class such as torch.optim.AdamW")


def given_by(options: argparse.Namespace, words: Sequence[str]) -> Given:
    """Model and batch of the command line: with `--config` words are overrides, else the one word is a reference.

    Raises:
        ValueError: they name none.
    """
    if options.batch is not None and options.batch < 1:
        raise ValueError(f"--batch {options.batch}: give 1 or more")
    given = _from_config(options, words) if options.config else _from_reference(options, words)
    makes_layers_later = isinstance(given.model, LightningModule) and is_overridden("configure_model", given.model)
    if not makes_layers_later and not any(one.requires_grad for one in given.model.parameters()):
        kind = type(given.model).__name__
        raise ValueError(f"{kind} has no parameters to train: give it some, or requires_grad_() to those that it has")
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
        raise ValueError(f"--accumulate {options.accumulate}: give 1 batch or more")
    given = given_by(options, words)
    job = _lightning_job(given) if isinstance(given.model, LightningModule) else _supervised_job(given)
    if options.accumulate > 1:
        job.gradients = "kept"
    return job


class Supervised(LightningModule):
    """A model with its loss and its optimizer, for a Trainer; its forward pass is the whole step's."""

    def __init__(self, job: Job) -> None:
        super().__init__()
        self.model = job.model
        self._job_loss, self._made = job.loss, job.optimizers

    def forward(self, batch: Any) -> Any:
        return self._job_loss(batch)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self._job_loss(batch)

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        return self._made


def module_of(given: Given) -> LightningModule:
    """Module that a Trainer can fit: the LightningModule that was given, or one around the plain module.

    Raises:
        ValueError: nothing says which optimizer.
    """
    model, make = given.model, given.optimizer
    if isinstance(model, LightningModule) and is_overridden("configure_optimizers", model):
        return model
    if make is None:
        kind = type(model).__name__
        raise ValueError(f"{kind} has no optimizer: give --optimizer, such as --optimizer torch.optim.AdamW")
    if not isinstance(model, LightningModule):
        return Supervised(_supervised_job(given))
    model.configure_optimizers = lambda: make(model.parameters())  # type: ignore[method-assign]
    return model


def optimizers_in(result: Any) -> list[torch.optim.Optimizer]:
    """The optimizers in what a `configure_optimizers` returned."""
    if isinstance(result, torch.optim.Optimizer):
        return [result]
    if isinstance(result, dict):
        return [result["optimizer"]]
    several: Any = result or ()
    optimizers = [
        one for part in several if isinstance(part, dict | torch.optim.Optimizer) for one in optimizers_in(part)
    ]
    return optimizers or (optimizers_in(several[0]) if several else [])  # ([optimizers], [schedulers])


def _from_reference(options: argparse.Namespace, words: Sequence[str]) -> Given:
    if len(words) != 1 or ":" not in words[0]:
        raise ValueError(f"{' '.join(words)!r} names no model: write package.module:function, or give --config FILE")
    (reference,) = words
    model, batch = _called(reference, options.batch)
    model = model.to(options.device)
    if not isinstance(model, LightningModule):  # a Trainer leaves frozen parts in the mode that they have
        model.train()
    return Given(model, _first_batch(batch, options.device), _named_optimizer(options))


def _called(reference: str, batch_size: int | None) -> tuple[nn.Module, Any]:
    """The model and the batch that the function returns, with a batch size that it then has to take."""
    function = _function(reference)
    takes = inspect.signature(function).parameters
    needed = [name for name, one in takes.items() if one.default is one.empty and one.kind not in _STARRED]
    if set(needed) - {"batch_size"} or (needed and batch_size is None):
        more = "" if needed != ["batch_size"] else ", or --batch"
        raise ValueError(f"{reference} needs {', '.join(needed)}: give each a default{more}; it is called without")
    if batch_size is not None and "batch_size" not in takes:
        raise ValueError(f"--batch {batch_size}: {reference} takes no batch_size; add that argument, or drop --batch")
    result = function(**({} if batch_size is None else {"batch_size": batch_size}))
    if isinstance(result, LightningModule) and is_overridden("train_dataloader", result):
        result.prepare_data()
        _set_up(result)
        result = result, result.train_dataloader()
    if not (isinstance(result, tuple) and len(result) == 2 and isinstance(result[0], nn.Module)):
        kinds = ", ".join(type(one).__name__ for one in (result if isinstance(result, tuple) else (result,)))
        raise ValueError(f"{reference} returned ({kinds}): return (model, batch)")
    return result


def _set_up(model: LightningModule) -> None:
    """Call its ``setup`` as a Trainer does, whose later call then does nothing."""
    model.setup("fit")
    model.setup = lambda stage: None  # type: ignore[method-assign]


def _function(reference: str) -> Callable[..., Any]:
    name, _, attribute = reference.partition(":")
    if not (name and attribute):
        raise ValueError(f"{reference!r} names no model: {_FORM}, or give --config FILE")
    if name.endswith(".py") or "/" in name:
        dotted = ".".join(Path(name).with_suffix("").parts)
        raise ValueError(f"{reference!r} names a file: write {dotted}:{attribute}, from the folder that it is under")
    module = importlib.import_module(name)
    if not hasattr(module, attribute):
        own = [key for key, one in vars(module).items() if inspect.isfunction(one) and one.__module__ == name]
        has = f"; its functions are {', '.join(own)}" if own else ""
        raise ValueError(f"{reference}: module {name!r} has no attribute {attribute!r}{has}")
    function = getattr(module, attribute)
    if isinstance(function, nn.Module) or not callable(function):
        raise ValueError(f"{reference} is a {type(function).__name__}: {_FORM}")
    if isinstance(function, type) and issubclass(function, nn.Module) and not issubclass(function, LightningModule):
        raise ValueError(f"{reference} is a class of modules: {_FORM}")
    return function  # type: ignore[no-any-return]


def _from_config(options: argparse.Namespace, overrides: Sequence[str]) -> Given:
    from retime.commands.configured import from_config

    named = _named_optimizer(options)
    model, data, configured = from_config(options.config, overrides, options.device, options.batch, named is not None)
    return Given(model, _first_batch(data, options.device), named or configured)


def _first_batch(data: Any, device: torch.device | str) -> Any:
    """First batch of a LightningDataModule or of loaders, on a device; anything else is a batch."""
    is_module = isinstance(data, LightningDataModule)
    if is_module:
        data.prepare_data()
        data.setup("fit")
        data = data.train_dataloader()
    if any(isinstance(leaf, DataLoader) for leaf in tree_leaves(data)):  # perhaps several, as Lightning combines them
        data, *_ = next(iter(CombinedLoader(tree_map(_in_one_process, data), "max_size_cycle")))
    elif is_module:
        data = next(iter(data))
    return tree_map(lambda leaf: leaf.to(device) if isinstance(leaf, torch.Tensor) else leaf, data)


def _in_one_process(loader: Any) -> Any:
    """Copy of a loader without workers, which a process that is to end with another one may not have."""
    if not isinstance(loader, DataLoader):
        return loader
    alone = copy.copy(loader)
    alone.num_workers, alone.timeout = 0, 0
    return alone


def _named_optimizer(options: argparse.Namespace) -> Make | None:
    """Optimizer that `--optimizer` names, with a learning rate, which every optimizer takes and no plan depends on."""
    if not options.optimizer:
        return None
    module, _, name = options.optimizer.rpartition(".")
    try:
        optimizer = getattr(importlib.import_module(module), name) if module else None
    except (ImportError, AttributeError):
        optimizer = None
    if not (isinstance(optimizer, type) and issubclass(optimizer, torch.optim.Optimizer)):
        raise ValueError(f"--optimizer {options.optimizer}: there is no such class; write one as torch.optim.AdamW")
    kind: Any = optimizer
    return lambda parameters: kind(list(parameters), lr=0.01)


def _supervised_job(given: Given) -> Job:
    model, batch = given.model, given.batch
    optimizers = [given.optimizer(model.parameters())] if given.optimizer else []
    if not isinstance(batch, Mapping) and not (isinstance(batch, list | tuple) and len(batch) > 1):
        size = f" of {len(batch)}" if isinstance(batch, list | tuple) else ""
        raise ValueError(
            f"the batch is a {type(batch).__name__}{size}: for a plain nn.Module give (inputs, targets), or a dict of "
            "what its forward takes; a LightningModule takes any batch"
        )
    if isinstance(batch, Mapping):  # as models of transformers take it, which return their loss
        return Job(model, batch, lambda part: model(**part), optimizers)
    return Job(model, batch, lambda part: _cross_entropy(model(part[0]), part[1]), optimizers)


def _cross_entropy(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Cross entropy of logits `(..., classes)`; maps `(samples, classes, height, width)` have them in dimension 1."""
    if outputs.dim() != 4:
        outputs, targets = outputs.reshape(-1, outputs.shape[-1]), targets.reshape(-1)
    return cross_entropy(outputs, targets)


def _lightning_job(given: Given) -> Job:
    """By its own training step, with its own optimizers where it makes some; gradients as the Trainer has them."""
    model = given.model
    assert isinstance(model, LightningModule)
    if not model.automatic_optimization:
        raise ValueError(f"{type(model).__name__} has manual optimization: a plan needs automatic optimization")
    steps = _StandIn.estimated_stepping_batches
    with quiet():
        model.trainer = _StandIn(accelerator="cpu", logger=False, barebones=True, max_steps=steps)
    _set_up(model)
    if is_overridden("configure_model", model):
        model.configure_model()
    optimizers = [given.optimizer(model.parameters())] if given.optimizer else []
    if is_overridden("configure_optimizers", model):
        optimizers = optimizers_in(model.configure_optimizers())
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
