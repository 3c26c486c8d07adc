"""The smoke set: what is installed trains a small model by every strategy and door, as plain training does.

    python -P tests/support/smoke.py [--json FILE]

It needs nothing but the package, and tries Accelerate, transformers and a recipe where these are installed. A line a
check says whether weights and logs have the plain ones' bits, or how far off they are where rounding is promised.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import sysconfig
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from io import StringIO
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import StrategyRegistry
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.classification import MulticlassAccuracy

import retime
from retime.commands.main import main as command
from retime.foundations.cpu_pool import MemoryPool
from retime.mechanisms.two_streams import TwoStreamBackward
from retime.strategies import STRATEGIES

OTHERS = ("torchmetrics", "psutil", "hydra-core", "matplotlib", "rich", "scikit-learn", "numpy")
PACKAGES = ("torch", "lightning", "accelerate", "transformers", "lightning-retime", *OTHERS)
ROUNDING = 1e-5
"""Relative and absolute, for what is promised up to rounding."""
PROMISED_UP_TO_ROUNDING = ("ooo_single_device",)
WARN = ("ooo_single_device", "transformers, backward fusion")
"""Of a search that finds no core for a second stream here, and of a log without the gradients' norm."""

Weights = list[Tensor]
Check = Callable[[], tuple[Weights, Weights, float]]
"""Returns weights, those of plain training, and how far off they may be: 0 compares bits."""


class Net(LightningModule):
    """Four layers; with `recurrent` a GRU before them. Logs by an object of torchmetrics, which a bare loop ignores."""

    def __init__(self, recurrent: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.recurrent = nn.GRU(8, 8, batch_first=True) if recurrent else None
        self.accuracy = MulticlassAccuracy(num_classes=4)
        sizes = (8, 32, 32, 32, 4)
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(i, o), nn.Tanh()) for i, o in pairwise(sizes)))

    def forward(self, x: Tensor) -> Tensor:
        if self.recurrent is not None:
            x = self.recurrent(x.unsqueeze(1).expand(-1, 20, -1))[0][:, -1]
        return self.layers(x)

    def training_step(self, batch: Any, batch_idx: int = 0) -> Tensor:
        out = self(batch[0])
        self.accuracy(out, batch[1])
        self.log("accuracy", self.accuracy, on_step=False, on_epoch=True)
        return nn.functional.cross_entropy(out, batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def data(batch_size: int = 8) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randn(8 * batch_size, 8, generator=generator), torch.randint(4, (8 * batch_size,), generator=generator)
    return DataLoader(TensorDataset(x, y), batch_size=batch_size)


def weights_of(model: nn.Module) -> Weights:
    return [parameter.detach().clone() for parameter in model.parameters()]


@contextmanager
def environment_as_before() -> Iterator[None]:
    """Addresses and ranks that a fit leaves in the environment mislead the next one, and Accelerate."""
    before = dict(os.environ)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def fit(strategy: Any = "auto", convert: bool | None = None, batch_size: int = 8, **options: Any) -> Weights:
    """Weights and log of training by Lightning; with `convert` the model is recurrent, and converted or not."""
    model = Net(recurrent=convert is not None)
    if convert:
        retime.convert(model)
    quiet = {"enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
    with environment_as_before():
        how = {"accelerator": "cpu", "devices": 1, "strategy": strategy, "max_epochs": 2, "logger": False}
        trainer = Trainer(**{**how, **quiet, **options})
        trainer.fit(model, data(batch_size))
    return [*weights_of(model), trainer.callback_metrics["accuracy"]]


@cache
def plain_ddp() -> Weights:
    return fit("ddp_fork", devices=2)


@cache
def plain() -> Weights:
    return fit()


def on_two_ranks(name: str) -> tuple[Weights, Weights, float]:
    if name == "ooo_pipeline":
        return fit("ooo_pipeline_fork", devices=2), plain(), ROUNDING
    return fit(f"{name}_fork", devices=2), plain_ddp(), 0.0


def loop(prepare: Callable[[nn.Module, torch.optim.Optimizer], Any]) -> tuple[Weights, Weights, float]:
    """A bare loop, with what `prepare` returns removed behind it."""
    model = Net()
    optimizer: Any = model.configure_optimizers()
    prepared = prepare(model, optimizer)
    for _ in range(2):
        for batch in data():
            model.training_step(batch).backward()
            optimizer.step()
            optimizer.zero_grad()
    prepared.remove()
    return weights_of(model), plain()[:-1], 0.0


def pool() -> tuple[Weights, Weights, float]:
    own = MemoryPool()
    if not own.install():
        raise RuntimeError(own.why_not)
    own.remove()
    return fit(callbacks=[retime.CPUMemoryPool()]), plain(), 0.0


def with_accelerate(door: str, **options: Any) -> tuple[Weights, Weights, float]:
    """A loop of Accelerate with one of its objects; two batches an update."""
    from accelerate import Accelerator

    from retime.integrations import accelerate as doors

    def train(door: str | None) -> Weights:
        model = Net()
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
        prepared, optimizer, loader = accelerator.prepare(model, model.configure_optimizers(), data())
        last = () if door == "TwoStreams" else (optimizer,)
        retimed = getattr(doors, door)(accelerator, prepared, *last, **options) if door else None
        for batch in loader:
            with accelerator.accumulate(prepared):
                loss = nn.functional.cross_entropy(prepared(batch[0]), batch[1])
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
        if retimed is not None:
            retimed.remove()
        return weights_of(model)

    return train(door), train(None), 0.0


def with_transformers(door: str, *arguments: Any, **options: Any) -> tuple[Weights, Weights, float]:
    """transformers.Trainer with one of its objects, on a GPT-2 made from its configuration.

    Without clipping by norm, its default, under which backward fusion is refused.
    """
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

    from retime.integrations import transformers as doors

    def train(door: str | None) -> Weights:
        torch.manual_seed(0)
        sizes = {"n_embd": 16, "n_layer": 2, "n_head": 2, "vocab_size": 31, "n_positions": 8}
        model = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))
        rows = torch.randint(31, (32, 8), generator=torch.Generator().manual_seed(1))
        with tempfile.TemporaryDirectory() as folder:
            settings = {"use_cpu": True, "report_to": "none", "save_strategy": "no", "disable_tqdm": True}
            trainer = Trainer(
                model=model,
                args=TrainingArguments(output_dir=folder, num_train_epochs=1, max_grad_norm=0.0, **settings),
                train_dataset=[{"input_ids": row, "labels": row} for row in rows],
            )
            if door:
                getattr(doors, door)(trainer, *arguments, **options)
            trainer.train()
        return weights_of(model)

    return train(door), train(None), 0.0


def plain_job() -> tuple[nn.Module, list[Tensor]]:
    """For `retime plan`."""
    return Net().layers, next(iter(data()))


def planned() -> tuple[Weights, Weights, float]:
    """`retime plan` of a module without a step of its own, which needs no extra."""
    words = ("plan", f"{__name__}:plain_job", "--optimizer", "torch.optim.AdamW", "--budget", "1GiB")
    with redirect_stdout(StringIO()):
        status = command(words)
    return [torch.tensor(status)], [torch.tensor(0)], 0.0


def recipe() -> tuple[Weights, Weights, float]:
    """Two steps of a recipe that loads digits, and makes tables and a picture."""
    short = ("experiment=bppsa_fig6", "steps=2", "evaluate_every=1", "precisions=[float32]")
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([sys.executable, "-P", "-m", "retime.recipes", *short], cwd=folder, check=True)
        pictures = [*Path(folder).rglob("result.png")]
    return [torch.tensor(len(pictures))], [torch.tensor(1)], 0.0


def checks() -> dict[str, Check]:
    """Those on two ranks come first: they fork this process, before it has started threads of its own."""
    found: dict[str, Check] = {}
    for name, *_ in (one for one in STRATEGIES if one[2]):
        found[f"{name}, two ranks"] = lambda name=name: on_two_ranks(name)
    for name, *_ in (one for one in STRATEGIES if not one[2]):
        near = ROUNDING if name in PROMISED_UP_TO_ROUNDING else 0.0
        found[name] = lambda name=name, near=near: (fit(name), plain(), near)
    parts, large = retime.MemoryBudgetStrategy("600KiB"), {"batch_size": 2048}  # which is too much for the whole batch
    found |= {
        "MemoryBudgetStrategy, in parts": lambda: (fit(parts, **large), fit(**large), ROUNDING),
        "OOOSingleDeviceStrategy": lambda: (fit(retime.OOOSingleDeviceStrategy(threads=(1, 1))), plain(), 0.0),
        "FuseOptimizer": lambda: (fit(callbacks=[retime.FuseOptimizer()]), plain(), 0.0),
        "CPUMemoryPool": pool,
        "retime plan": planned,
        "convert": lambda: (fit(convert=True), fit(convert=False), ROUNDING),
        "bare loop, backward fusion": lambda: loop(lambda *both: retime.fuse_optimizer(*both, mode="backward")),
        "bare loop, forward fusion": lambda: loop(lambda *both: retime.fuse_optimizer(*both, mode="forward")),
        "bare loop, two streams": lambda: loop(lambda model, _: TwoStreamBackward(model, threads=(1, 1))),
    }
    if find_spec("accelerate"):
        found |= {
            "Accelerate, backward fusion": lambda: with_accelerate("FusedOptimizer", mode="backward"),
            "Accelerate, forward fusion": lambda: with_accelerate("FusedOptimizer", mode="forward"),
            "Accelerate, two streams": lambda: with_accelerate("TwoStreams", threads=(1, 1)),
        }
    if find_spec("accelerate") and find_spec("transformers"):
        found |= {
            "transformers, backward fusion": lambda: with_transformers("FusedOptimizer", mode="backward"),
            "transformers, forward fusion": lambda: with_transformers("FusedOptimizer", mode="forward"),
            "transformers, memory budget": lambda: with_transformers("MemoryBudget", "1GiB"),
        }
    has_all = all(find_spec(module) for module in ("hydra", "matplotlib", "rich", "sklearn", "transformers"))
    if has_all and sys.version_info < (3, 14):  # Hydra 1.3 does not start there
        found["recipe"] = recipe
    return found


def outcome(check: Check, may_warn: bool) -> tuple[bool, str]:
    """Whether it passed, and what to say of it; a warning of ours is a failure, unless it may warn."""
    try:
        with warnings.catch_warnings():
            for category in (retime.NoEffectWarning, retime.DifferenceWarning):
                warnings.simplefilter("ignore" if may_warn else "error", category)
            ours, theirs, near = check()
    except Exception as error:
        traceback.print_exc()
        return False, f"{type(error).__name__}: {error}".splitlines()[0]
    off = max(float((one - other).abs().max()) for one, other in zip(ours, theirs, strict=True))
    if not off:
        return True, "same bits"
    within = all(torch.allclose(one, other, near, near) for one, other in zip(ours, theirs, strict=True))
    return within, f"{off:.1e} off" + ("" if within else f", {near:g} are promised")


def versions() -> dict[str, str]:
    """Of Python and of the packages that are installed."""
    there = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            there[package] = version(package)
        except PackageNotFoundError:
            there[package] = "none"
    return there


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="where to write versions, outcomes and seconds")
    options = parser.parse_args()
    installed = Path(retime.__file__)
    if Path(sysconfig.get_path("purelib")) not in installed.parents:
        sys.exit(f"this tries what is installed, and `import retime` has found {installed}: run it with `python -P`")
    began = time.monotonic()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    named = {name for name in StrategyRegistry if name.startswith(tuple(one[0] for one in STRATEGIES))}
    print(", ".join(f"{package} {number}" for package, number in versions().items()), f"from {installed}", flush=True)
    outcomes: dict[str, str] = {}
    failed = [] if len(named) == sum(3 if one[2] else 1 for one in STRATEGIES) else ["names of strategies"]
    for name, check in checks().items():
        passed, outcomes[name] = outcome(check, name in WARN)
        print(f"{'passed' if passed else 'FAILED'}: {name}: {outcomes[name]}", flush=True)
        if not passed:
            failed.append(name)
    seconds = time.monotonic() - began
    print(f"{len(outcomes) - len(failed)} passed, {len(failed)} failed in {seconds:.0f} s")
    if options.json:
        result = {"versions": versions(), "failed": failed, "outcomes": outcomes, "seconds": round(seconds)}
        options.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
