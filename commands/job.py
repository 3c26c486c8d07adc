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
from lightning.pytorch.core.hooks import DataHooks
from lightning.pytorch.utilities import CombinedLoader
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

from retime.foundations.torch_private.engine import tree_leaves, tree_map
from retime.mechanisms.memory_budget import Gradients

Make = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
_FORM = "write package.module:function, of a function that returns (model, batch)"
_STARRED = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


class _StandIn(Trainer):
    """For modules that ask their trainer, which trains."""

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
    """Model that the command line names, its first batch as loaded, and what makes an optimizer, if it says which.

    `data` is the data module of the batch, whose hooks have a part in its transfer to `device`.
    """

    model: nn.Module
    batch: Any
    optimizer: Make | None
    data: LightningDataModule | None
    device: str


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
    model, data, make = _from_config(options, words) if options.config else _from_reference(options, words)
    module = data if isinstance(data, LightningDataModule) else None
    _attach_trainer(model, module)
    given, kind = Given(model, _first_batch(data), make, module, options.device), type(model).__name__
    makes_layers_later = isinstance(model, LightningModule) and is_overridden("configure_model", model)
    if not makes_layers_later and not any(one.requires_grad for one in model.parameters()):
        raise ValueError(f"{kind} has no parameters to train: give it some, or requires_grad_() to those that it has")
    if isinstance(model, LightningModule):
        if not is_overridden("training_step", model):
            raise ValueError(f"{kind} has no training_step: write one, or return a plain nn.Module")
        if options.optimizer and is_overridden("configure_optimizers", model):
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


def _from_reference(options: argparse.Namespace, words: Sequence[str]) -> tuple[nn.Module, Any, Make | None]:
    if len(words) != 1 or ":" not in words[0]:
        raise ValueError(f"{' '.join(words)!r} names no model: write package.module:function, or give --config FILE")
    (reference,) = words
    model, data = _called(reference, options.batch)
    model = model.to(options.device)
    if not isinstance(model, LightningModule):  # a Trainer leaves frozen parts in the mode that they have
        model.train()
    return model, data, _named_optimizer(options)


def _called(reference: str, batch_size: int | None) -> tuple[nn.Module, Any]:
    """The model and its data that the function returns, with a batch size that it then has to take."""
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
        result = result, result
    if not (isinstance(result, tuple) and len(result) == 2 and isinstance(result[0], nn.Module)):
        kinds = ", ".join(type(one).__name__ for one in (result if isinstance(result, tuple) else (result,)))
        raise ValueError(f"{reference} returned ({kinds}): return (model, batch)")
    return result


def _attach_trainer(*owners: Any) -> None:
    """Give a LightningModule and a data module a trainer to ask."""
    hooked: list[Any] = [one for one in owners if isinstance(one, DataHooks)]
    if hooked:
        with quiet():
            steps = _StandIn.estimated_stepping_batches
            trainer: Any = _StandIn(accelerator="cpu", logger=False, barebones=True, max_steps=steps)
        trainer.training = True
        for one in hooked:
            one.trainer = trainer
            if isinstance(one, LightningModule):
                trainer.strategy.connect(one)
            else:
                trainer.datamodule = one


def _set_up(owner: Any) -> None:
    """Call ``prepare_data`` and ``setup`` of a module, or a data module, as a Trainer does; later calls do nothing."""
    owner.prepare_data()
    owner.setup("fit")
    owner.prepare_data, owner.setup = lambda: None, lambda stage: None


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


def _from_config(options: argparse.Namespace, overrides: Sequence[str]) -> tuple[nn.Module, Any, Make | None]:
    from retime.commands.configured import from_config

    named = _named_optimizer(options)
    model, data, configured = from_config(options.config, overrides, options.device, options.batch, named is not None)
    return model, data, named or configured


def _first_batch(data: Any) -> Any:
    """First batch of loaders, or of a module or data module that has them; anything else is a batch."""
    has_loaders = isinstance(data, DataHooks)
    if has_loaders:
        _set_up(data)
        data = data.train_dataloader()
    if isinstance(data, CombinedLoader):
        has_loaders, data = True, data.iterables
    if has_loaders or any(isinstance(leaf, DataLoader) for leaf in tree_leaves(data)):
        data, *_ = next(iter(CombinedLoader(tree_map(_in_one_process, data), "max_size_cycle")))
    return data


def _transferred(given: Given) -> Any:
    """The batch as a Trainer gives it to `training_step`: hooks of the data module go before the module's."""
    batch = given.batch
    for name in ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer"):
        owners = [one for one in (given.data, given.model) if isinstance(one, DataHooks) and is_overridden(name, one)]
        more = (torch.device(given.device), 0) if name.startswith("transfer") else (0,)
        batch = getattr([*owners, DataHooks()][0], name)(batch, *more)
    return batch


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
    model, batch = given.model, _transferred(given)
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


def _cross_entropy(outputs: Any, targets: torch.Tensor) -> torch.Tensor:
    """Cross entropy of logits `(..., classes)`; maps `(samples, classes, height, width)` have them in dimension 1."""
    if not isinstance(outputs, torch.Tensor):
        raise TypeError(
            f"the model returned a {type(outputs).__name__}: let a plain nn.Module return logits, or give a "
            "LightningModule, whose training_step returns the loss"
        )
    if outputs.dim() != 4:
        outputs, targets = outputs.reshape(-1, outputs.shape[-1]), targets.reshape(-1)
    return cross_entropy(outputs, targets)


def _lightning_job(given: Given) -> Job:
    """By its own training step, with its own optimizers where it makes some; gradients as the Trainer has them."""
    model = given.model
    assert isinstance(model, LightningModule)
    if not model.automatic_optimization:
        raise ValueError(f"{type(model).__name__} has manual optimization: a plan needs automatic optimization")
    trainer = model.trainer
    _set_up(model)
    if is_overridden("configure_model", model):
        model.configure_model()
    model.to(given.device)
    if is_overridden("configure_optimizers", model):
        trainer.strategy.setup_optimizers(trainer)  # with their schedules, for a step that asks for them
    elif given.optimizer:
        trainer.optimizers = [given.optimizer(model.parameters())]
    more = (0,) if is_param_in_hook_signature(model.training_step, "batch_idx", min_args=2) else ()  # as a Trainer asks
    for name in ("log", "log_dict"):  # there is no trainer to log to
        model.__dict__[name] = lambda *_, **__: None
    batch = _transferred(given)
    kept = is_overridden("optimizer_zero_grad", model)  # it may leave zeros
    gradients: Gradients = "kept" if kept else "freed after forward"
    return Job(model, batch, lambda part: model.training_step(part, *more), trainer.optimizers, gradients)


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
