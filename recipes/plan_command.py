"""`retime plan`: what a byte budget would do to a training step, without training.

    retime plan my_package.models:resnet_and_batch --budget 8GiB --optimizer torch.optim.AdamW
    retime plan --config conf/experiment/fusion_fig3.yaml --budget 500MiB --batch 64

The reference names a function without required arguments that returns `(model, batch)` or
`(LightningModule, LightningDataModule)`. It is given `batch_size` where it takes one and `--batch` is set.
"""

import argparse
import importlib
import inspect
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningDataModule, LightningModule
from torch import nn
from torch.utils._pytree import tree_map

from retime.mechanisms.memory.budget import parse_budget, show_bytes
from retime.mechanisms.memory.budgeted_step import BudgetedStep
from retime.mechanisms.memory.dry_part import dry_part
from retime.mechanisms.memory.floor import MemoryFloor, StepMemory
from retime.mechanisms.memory.host import parse_host
from retime.mechanisms.memory.replay import TrainingStep, profile_step
from retime.mechanisms.memory.separability_probe import loss_of as loss_in
from retime.mechanisms.memory.split import samples_in
from retime.mechanisms.memory.task_graph import task_graph
from retime.mechanisms.memory.undisturbed import undisturbed
from retime.schedules.errors import ScheduleError
from retime.schedules.memory import lower_bound
from retime.schedules.memory.errors import BudgetError

_OF_RECIPES = ("hydra", "omegaconf", "sklearn", "transformers", "matplotlib", "rich")
"""Packages of the recipes extra. Without them a LightningModule can be planned for, which brings its own optimizers."""
_INSTALL = ': pip install "lightning-retime[recipes]"'


@dataclass
class Job:
    """What to plan: a model, a batch, what computes the loss, and the optimizers."""

    model: nn.Module
    batch: Any
    loss: Callable[[Any], Any]
    optimizers: list[torch.optim.Optimizer]


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point of the `retime` script; 0: a plan, 1: the budget is below the floor, 2: anything else went wrong."""
    options = _parser().parse_args(arguments)
    try:
        _check_device(options.device)
        job = _from_config(options) if options.config else _from_reference(options)
        budget = parse_budget(options.budget, options.device)
        return plan(job, budget, options.host, options.batchnorm)
    except ModuleNotFoundError as error:
        extra = (error.name or "").partition(".")[0] in _OF_RECIPES
        print(f"retime plan: {error}{_INSTALL if extra else ''}", file=sys.stderr)
    except (ValueError, TypeError, OSError, ImportError, AttributeError) as error:
        print(f"retime plan: {error}", file=sys.stderr)
    except Exception:  # the user's own step, most likely: where it happened is what they need
        traceback.print_exc()
    return 2


def plan(job: Job, budget_bytes: int, host: str | None = None, batchnorm: str = "offload") -> int:
    """Print what a budget asks for; returns the exit status.

    Raises:
        ValueError, OSError: `host` or `batchnorm` is no use here.
        Exception: whatever the step raises.
    """
    device = next(job.model.parameters()).device
    samples = samples_in(job.batch)
    print(f"budget          {show_bytes(budget_bytes)}, batch of {samples} on {device}")
    step = BudgetedStep(
        job.model, job.optimizers, budget_bytes, parse_host(host, device), batchnorm=batchnorm, say=lambda _: None
    )
    try:
        shape = step.plan(job.loss, job.batch)
    except BudgetError as error:
        print(f"refused         {error}")
        print(f"floor           {show_bytes(error.floor_bytes)}, largest task {error.task} of layer {error.layer!r}")
        return 1
    finally:
        step.remove()
    choice, costs = shape.choice, shape.costs
    print(f"plan            {choice.plan}")
    print(f"predicted peak  {show_bytes(choice.peak_bytes)}")
    moved = choice.out_bytes + choice.in_bytes
    if moved:
        print(f"moved a step    {show_bytes(moved)}")
    times = f"{choice.step_ms / choice.plain_ms:.2f} x the unlimited step's time" if costs else "none: the step fits"
    print(f"slowdown        {times}")
    _print_bounds(job, samples, choice.floor)
    if shape.certificate is not None:
        print(f"sub-batches     {shape.certificate}")
    if shape.note:
        print(f"note            {shape.note}")
    return 0


def _print_bounds(job: Job, samples: int, floor: MemoryFloor | None) -> None:
    """A step that fits was not asked whether it can be split, so its floor is that of whole batches."""
    dry = TrainingStep(
        job.model,
        job.batch,
        samples,
        loss=lambda part: loss_in(job.loss(part)),
        optimizers=job.optimizers,
        split=dry_part,
    )
    with undisturbed(job.model):
        whole = " (of whole batches: sub-batches were not looked at)" if floor is None else ""
        floor = floor or StepMemory(dry, (samples,)).floor
        where = f"largest task {floor.task}, {floor.sub_batch} sample{'s' if floor.sub_batch > 1 else ''} at a time"
        print(f"floor           {show_bytes(floor.bytes)}: {where}{whole}")
        try:
            small, large = (profile_step(dry.of_size(size)) for size in (max(1, samples // 4), max(2, samples // 2)))
            print(f"Eq. 7           {show_bytes(lower_bound(task_graph(small, large)).bytes)} (the paper's bound)")
        except (ScheduleError, RuntimeError) as error:
            print(f"Eq. 7           not known: {error}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="retime", description="Re-order one training step.")
    command = parser.add_subparsers(required=True, metavar="plan").add_parser(
        "plan", help="what a byte budget does to a training step, without training", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    command.add_argument("model", nargs="?", help="package.module:function, returns (model, batch)")
    command.add_argument("--config", type=Path, help="an experiment's YAML: model, data, optimizer, batch_size")
    command.add_argument("--budget", default="90%", help="bytes, '8GiB' or '90%%' (default)")
    command.add_argument("--batch", type=int, help="samples in a batch")
    command.add_argument("--optimizer", help="for a plain nn.Module: a class such as torch.optim.AdamW")
    command.add_argument("--device", default="cpu")
    command.add_argument("--host", help="where activations go: 'memory' or 'disk:FOLDER'")
    command.add_argument("--batchnorm", default="offload", choices=["offload", "ghost", "exact"])
    return parser


def _check_device(name: str) -> None:
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ValueError(f"--device {name}: {error}") from None
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ValueError(f"--device {name}: torch sees {torch.cuda.device_count()} CUDA devices here; use cpu")


def _from_reference(options: argparse.Namespace) -> Job:
    if not options.model or ":" not in options.model:
        raise ValueError(f"{options.model!r} names no model: write package.module:function, or give --config FILE")
    module, _, name = options.model.partition(":")
    sys.path.insert(0, "")  # a module beside the user
    function = getattr(importlib.import_module(module), name)
    takes = "batch_size" in inspect.signature(function).parameters
    made = function(**({"batch_size": options.batch} if takes and options.batch else {}))
    if not (isinstance(made, tuple) and len(made) == 2 and isinstance(made[0], nn.Module)):
        raise ValueError(f"{options.model} returned a {type(made).__name__}: return (model, batch)")
    model, batch = made
    if isinstance(batch, LightningDataModule):
        batch.prepare_data()
        batch.setup("fit")
        batch = next(iter(batch.train_dataloader()))
    model = model.to(options.device).train()
    batch = tree_map(lambda leaf: leaf.to(options.device) if isinstance(leaf, torch.Tensor) else leaf, batch)
    if isinstance(model, LightningModule):
        return Job(model, batch, _training_step(model), _optimizers_of(model))
    from retime.recipes import build

    optimizer = {"_target_": options.optimizer, "lr": 0.01} if options.optimizer else None
    optimizers = [build.build_optimizer(optimizer, model.parameters(), {})] if optimizer else []
    return Job(model, batch, _supervised(model), optimizers)


def _from_config(options: argparse.Namespace) -> Job:
    from omegaconf import OmegaConf

    from retime.recipes import build
    from retime.recipes.schema import register_all

    register_all()
    config: Any = OmegaConf.load(options.config)
    missing = [key for key in ("model", "data", "optimizer", "batch_size") if key not in config]
    if missing:
        raise ValueError(f"{options.config} has no {', '.join(missing)}: a plan needs a model, data and an optimizer")
    hardware = "cuda" if options.device.startswith("cuda") else "cpu"
    settings = OmegaConf.merge({"hardware": {"name": hardware}}, config)
    blocks: Any = OmegaConf.to_container(settings, resolve=True)
    device = torch.device(options.device)
    model = build.build_model(blocks["model"], device, seed=0)
    (batch,) = build.build_batches(blocks["data"], options.batch or blocks["batch_size"], 1, device)
    return Job(model, batch, _supervised(model), [build.build_optimizer(blocks["optimizer"], model.parameters(), {})])


def _supervised(model: nn.Module) -> Callable[[Any], Any]:
    from retime.recipes.build import loss_of

    return lambda batch: loss_of(model(batch[0]), batch[1])


def _training_step(model: LightningModule) -> Callable[[Any], Any]:
    more = (0,) if "batch_idx" in inspect.signature(model.training_step).parameters else ()
    for name in ("log", "log_dict"):  # there is no trainer to log to
        model.__dict__[name] = lambda *_, **__: None
    return lambda batch: model.training_step(batch, *more)


def _optimizers_of(model: LightningModule) -> list[torch.optim.Optimizer]:
    made = model.configure_optimizers()
    if isinstance(made, torch.optim.Optimizer):
        return [made]
    if isinstance(made, dict):
        return [made["optimizer"]]
    first = made[0] if isinstance(made, tuple | list) and made and isinstance(made[0], list | tuple) else made
    several: Any = first or ()
    return [one for one in several if isinstance(one, torch.optim.Optimizer)]


if __name__ == "__main__":
    sys.exit(main())
