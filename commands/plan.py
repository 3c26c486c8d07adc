"""`retime plan`: what a byte budget would do to a training step, without training.

    retime plan my_package.models:resnet_and_batch --budget 8GiB --optimizer torch.optim.AdamW
    retime plan --config conf/train.yaml --budget 500MiB model.width=64 data=small

What is planned is either

  package.module:function   called without arguments, or with batch_size where it takes one and --batch is set. It
                            returns (model, batch) or (LightningModule, LightningDataModule). A LightningModule class
                            that has a train_dataloader is one, too.
  --config FILE.yaml        with model and data blocks (_target_: ...), batch_size and optimizer. Hydra puts it
                            together: defaults and groups in the file's folder work, and so do overrides: key=value,
                            +key=value, ~key, group=choice. data is a data set of (input, target) pairs, or a
                            LightningDataModule, which has its own batch size.

A LightningModule is planned by its own training_step and configure_optimizers, with gradients freed as a Trainer frees
them. A plain nn.Module is planned by cross_entropy(model(inputs), targets), or for a batch that is a dict by
model(**batch).loss, with the optimizer of --optimizer or of the config, and gradients that are freed before each step;
--accumulate 2 plans for a loop that keeps them, as one with zero_grad(set_to_none=False) does too.

The answer on stdout has

  plan, predicted peak, moved a step, sub-batches    what would be done
  refused                                            why no plan keeps the budget, and what would help
  floor                                              the smallest budget that is not refused
  Eq. 6, Eq. 7                                       the moDNN paper's bounds: what the largest task needs for one
                                                     sample, and that with parameters, gradients and optimizer states

stderr says what is being done, stage by stage. Exit status: 0 a plan, 1 the budget
is below the floor, 2 anything else went wrong.
"""

import argparse
from collections.abc import Callable, Sequence
from itertools import count
from pathlib import Path
from typing import Any

import torch

from retime.commands.errors import check_folder, progress
from retime.commands.job import Job, add_job_options, job_of
from retime.foundations.messages import show_bytes
from retime.foundations.parts import dry_part, samples_in
from retime.foundations.preserve_state import preserve_state
from retime.foundations.storages import strided_bytes
from retime.mechanisms.memory_budget import (
    BudgetedStep,
    PlannedShape,
    TrainingStep,
    gloo_bytes,
    parse_budget,
    parse_host,
    profile_step,
    task_graph,
)
from retime.schedules.budget import BudgetError
from retime.schedules.modnn import lower_bound

SUMMARY = "what a byte budget does to a training step, without training"
_RANKS, _CAP_MIB, _MOST_MIB = 2, 25, 2**20
"""Of DDP: ranks, and its own bucket_cap_mb."""


def run(options: argparse.Namespace, words: Sequence[str]) -> int:
    """Do what the command line asks for; 0: a plan, 1: the budget is below the floor."""
    _check_device(options.device)
    sharing = _check_ranks(options)
    check_folder("--save", options.save)  # before minutes of planning
    budget = parse_budget(options.budget, options.device, sharing)
    job = job_of(options, words)
    if not job.optimizers:
        progress("no optimizer is known, so its states are not counted: give --optimizer")
    samples = samples_in(job.batch)
    device = next(job.model.parameters()).device
    print(f"budget          {show_bytes(budget)}, batch of {samples} on {device}", flush=True)
    try:
        shape = _planned(job, options, budget)
    except BudgetError as error:
        print(f"refused         {error}")
        _print_floor(error)
        _print_bounds(job, samples)
        return 1
    choice, moved = shape.choice, shape.choice.out_bytes + shape.choice.in_bytes
    print(f"plan            {'none: the step fits' if shape.plain else choice.plan}")
    print(f"predicted peak  {show_bytes(choice.peak_bytes)}")
    if moved:
        print(f"moved a step    {show_bytes(moved)}")
    if shape.certificate is not None:
        print(f"sub-batches     {shape.certificate}")
    if shape.note:
        print(f"note            {shape.note}")
    try:
        _print_floor(_floor_of(shape, job, options))
    except Exception as error:  # the plan stands, though the step does not run on a few samples
        print(f"floor           not known: {error}")
    _print_bounds(job, samples)
    return 0


def _planned(
    job: Job, options: argparse.Namespace, budget_bytes: int, say: Callable[[str], None] = progress
) -> PlannedShape:
    host = parse_host(options.host, next(job.model.parameters()).device)
    how: dict[str, Any] = {"batchnorm": options.batchnorm, "gradients": job.gradients, "say": say}
    how |= _data_parallel(options, job)
    step = BudgetedStep(job.model, job.optimizers, budget_bytes, host, **how)
    try:
        shape = step.plan(job.loss, job.batch)
        if options.save is not None:
            step.save_plan(options.save)
        return shape
    finally:
        step.remove()


def _floor_of(shape: PlannedShape, job: Job, options: argparse.Namespace) -> BudgetError:
    """Error that would refuse this step. A step that fits was not asked what it needs at least."""
    if shape.choice.floor is not None:
        return shape.choice.floor.refusal(0)
    progress("the step fits; searching for the smallest budget")
    lines = count()
    try:
        _planned(job, options, 1, lambda text: progress(text) if next(lines) else None)  # the first tells the budget
    except BudgetError as refusal:
        return refusal
    raise AssertionError("a plan that needs no memory")


def _print_floor(refusal: BudgetError) -> None:
    """To the byte: what is printed can be given as the budget."""
    at_once = f", {refusal.samples} sample{'s' if refusal.samples > 1 else ''} at a time"
    where = f"largest task {refusal.task} of layer {refusal.layer!r}{at_once}"
    print(f"floor           {refusal.floor_bytes} bytes ({show_bytes(refusal.floor_bytes)}): {where}")


def _print_bounds(job: Job, samples: int) -> None:
    """The paper's bounds (moDNN, Eq. 6 and 7), from dry runs of two parts of the batch."""
    dry = TrainingStep(job.model, job.batch, samples, loss=job.loss, optimizers=job.optimizers, split=dry_part)
    few = max(1, samples // 4)
    try:
        with preserve_state(job.model):
            small, large = (profile_step(dry.of_size(size)) for size in (few, max(2, samples // 2)))
            bound = lower_bound(task_graph(small, large))
    except (ValueError, RuntimeError) as error:  # some layers refuse one sample, and some steps read values
        print(f"Eq. 7           not known: {error}")
        return
    print(f"Eq. 6           {show_bytes(bound.working_bytes)}: task {bound.task} of layer {bound.layer!r}, one sample")
    print(f"Eq. 7           {show_bytes(bound.bytes)} (the paper's bound)")


def add_options(command: argparse.ArgumentParser) -> None:
    """Say what `retime plan` takes."""
    add_job_options(command)
    command.add_argument("--budget", default="90%", help="bytes, '8GiB' or '90%%' of the device (default)")
    command.add_argument("--accumulate", type=int, default=1, metavar="N", help="batches whose gradients add up")
    command.add_argument("--ddp", action="store_true", help="one rank of DDP, with its buckets and gloo's sums")
    of_ddp = "with --ddp: DDP's argument of that name"
    command.add_argument("--gradient-as-bucket-view", action="store_const", const=True, help=of_ddp)
    command.add_argument("--ranks", type=int, metavar="N", help="with --ddp: on one machine (default 2)")
    command.add_argument("--bucket-cap-mb", type=float, metavar="MIB", help=f"{of_ddp} (default 25)")
    command.add_argument("--save", type=Path, metavar="FILE", help="write the plan, to be given as plan=FILE")
    command.add_argument("--device", default="cpu")
    command.add_argument("--host", help="where activations go: 'memory' or 'disk:FOLDER'")
    command.add_argument(
        "--batchnorm", default="offload", choices=["offload", "ghost"],
        help="in train mode: batches whole (default), or statistics of sub-batches",
    )  # fmt: skip


def _check_ranks(options: argparse.Namespace) -> int:
    """Processes that share the machine."""
    if not options.ddp:
        for name in ("gradient_as_bucket_view", "ranks", "bucket_cap_mb"):
            if getattr(options, name) is not None:
                raise ValueError(f"--{name.replace('_', '-')} is about DDP: give --ddp too")
        return 1
    if options.ranks is not None and options.ranks < 1:
        raise ValueError(f"--ranks {options.ranks}: give 1 or more")
    if options.bucket_cap_mb is not None and not 0 < options.bucket_cap_mb <= _MOST_MIB:
        raise ValueError(f"--bucket-cap-mb {options.bucket_cap_mb:g}: give MiB above 0, at most {_MOST_MIB}")
    return int(options.ranks or _RANKS)


def _data_parallel(options: argparse.Namespace, job: Job) -> dict[str, Any]:
    """Memory that DDP holds beside the model, as on each of its ranks; a plan that is saved says so."""
    if not options.ddp:
        return {}
    sums = 0
    if torch.device(options.device).type == "cpu":
        gradient_bytes = strided_bytes(one for one in job.model.parameters() if one.requires_grad)
        cap_mib = _CAP_MIB if options.bucket_cap_mb is None else options.bucket_cap_mb
        sums = gloo_bytes(gradient_bytes, int(cap_mib * 2**20), options.ranks or _RANKS)
    return {"buckets": "gradients" if options.gradient_as_bucket_view else "beside", "reduction_bytes": sums}


def _check_device(name: str) -> None:
    try:
        device = torch.device(name)
    except RuntimeError:
        device = torch.device("meta")
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"--device {name}: give cpu, cuda or cuda:<number>")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ValueError(f"--device {name}: torch sees {torch.cuda.device_count()} CUDA devices here; use cpu")
