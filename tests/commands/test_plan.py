"""`retime plan`: what is printed, and the exit status."""

import os
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningDataModule, LightningModule
from lightning.pytorch.utilities import CombinedLoader
from torch import nn

from retime.commands.job import Job
from retime.commands.main import main
from retime.mechanisms.memory_budget.planner import PlanningStages
from retime.mechanisms.memory_budget.search import MOST_TRIALS
from retime.schedules.budget import OffloadPlan
from support import memory_budget as support
from support.memory_budget import BATCH, SPLITS, norm, use_costs
from support.time_limits import limit_s
from support.warm_start import Warm

pytestmark = [*support.IGNORED, pytest.mark.usefixtures("splits")]
BELOW, TIGHT = "2000", "50000"  # the plain step needs 86,700 bytes, the floor is 25,600
Run = Callable[..., tuple[int, dict[str, str], str]]


class Net(support.Net):
    """Planning takes as long as a model is deep."""

    def __init__(self, norm: Any = None) -> None:
        super().__init__(norm, depth=1)


def plain_model(batch_size: int = 256) -> Any:
    net = Net().net
    return net, (torch.randn(batch_size, support.FEATURES), torch.zeros(batch_size, dtype=torch.long))


def lightning_model() -> Any:
    return Net(), next(iter(support.loader()))


def normed_model() -> Any:
    return Net(norm), next(iter(support.loader()))


class Tripled(Net):
    """Its training step needs more than the cross-entropy of its outputs does."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(batch) + self.loss(batch) + self.loss(batch)


class Later(Net):
    """Makes its layers in a hook."""

    def __init__(self) -> None:
        LightningModule.__init__(self)
        self.lr = 0.1

    def configure_model(self) -> None:
        self.net = Net().net


class Bare(Net):
    """Leaves its optimizer to the config, and has a frozen part."""

    configure_optimizers = LightningModule.configure_optimizers

    def __init__(self) -> None:
        super().__init__()
        self.net[0].eval()


class Batches(LightningDataModule):
    def __init__(self, batch_size: int = 48) -> None:
        super().__init__()
        self.batch_size = batch_size

    def train_dataloader(self) -> Any:
        return support.loader(batch=self.batch_size)


def samples() -> Any:
    return support.loader().dataset


def tiny() -> nn.Module:
    return nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(3, 1000))


class Fails(nn.Linear):
    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        raise ZeroDivisionError("not this step's fault")


def needs_a_path(path: str) -> Any:
    return lightning_model()


def frozen() -> Any:
    return nn.Linear(2, 2).requires_grad_(False), (torch.ones(4, 2), torch.zeros(4, dtype=torch.long))


def no_targets() -> Any:
    return Net().net, (torch.ones(4, support.FEATURES),)


def two_outputs() -> Any:
    return nn.GRU(3, 2), (torch.ones(4, 2, 3), torch.zeros(4, 2, dtype=torch.long))


class Stepless(Net):
    training_step = LightningModule.training_step


def stepless() -> Any:
    return Stepless(), next(iter(support.loader()))


class Manual(Net):
    """Steps by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


def manual() -> tuple[nn.Module, Any]:
    return Manual(), samples()


class ByPosition(Net):
    def training_step(self, b: Any, i: int) -> Any:  # type: ignore[override]
        assert i == 0
        return self.loss(b)

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        steps = self.trainer.estimated_stepping_batches
        return [optimizer], [torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=int(steps))]


def by_position() -> Any:
    return ByPosition(), next(iter(support.loader(1)))


class Language(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.out = nn.Embedding(20, 8), nn.Linear(8, 20)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> Any:
        logits = self.out(self.words(input_ids))
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return SimpleNamespace(loss=loss, logits=logits)


def language() -> Any:
    ids = torch.randint(20, (16, 5))
    return Language(), {"input_ids": ids, "labels": ids}


class Hooked(Batches):
    """As data modules put batches together on the device; they ask their trainer, and combine loaders."""

    def setup(self, stage: str) -> None:
        assert self.trainer.datamodule is self
        assert isinstance(self.trainer.lightning_module, Net)
        self.batch_size //= self.trainer.world_size

    def train_dataloader(self) -> Any:
        return CombinedLoader({"a": super().train_dataloader(), "b": range(2)}, "min_size")

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return [*batch["a"], batch["b"]]

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return [one.repeat(2, *[1] * (one.dim() - 1)) for one in batch[:2]]


def hooked() -> Any:
    return AsksItsTrainer(), Hooked()


class AsksItsTrainer(Net):
    """In a step behind a decorator that takes any arguments."""

    def setup(self, stage: str) -> None:
        assert self.trainer.world_size == 1

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return [one[:10] for one in batch]

    def training_step(self, *given: Any, **_: Any) -> Any:
        batch, number = given
        schedule, optimizer = self.lr_schedulers(), self.optimizers()
        assert schedule.get_last_lr() == [optimizer.param_groups[number]["lr"]]  # type: ignore[union-attr]
        return self.loss(batch)

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 10)]


class Streams(AsksItsTrainer):
    def train_dataloader(self) -> Any:
        return map(list, support.loader())


class Unpacks(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        one, two, _ = batch
        return self.loss((one, two))

    def train_dataloader(self) -> Any:
        return support.loader()


def no_optimizer() -> Any:
    return Bare(), support.loader()


a_module = nn.Linear(2, 2)


def fails() -> Any:
    return Fails(2, 2), (torch.ones(4, 2), torch.zeros(4, dtype=torch.long))


def bytes_in(line: str) -> int:
    return int(line.partition(" bytes (")[0])


def kib(line: str) -> float:
    return float(line.removesuffix(" KiB"))


def answer(out: str) -> dict[str, str]:
    return {line[:15].strip(): line[16:] for line in out.splitlines()}


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """The exit status, what is printed by its first words, and what is told."""

    def call(*arguments: str) -> tuple[int, dict[str, str], str]:
        status = main(["plan", *arguments])
        out, errors = capsys.readouterr()
        return status, answer(out), errors

    return call


def planned(run: Run, *arguments: str) -> dict[str, str]:
    """What is printed of a step that fits."""
    status, said, errors = run(*arguments, "--budget", "1GiB")
    assert status == 0, errors
    return said


def test_a_small_budget_and_what_takes_long(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("support.memory_budget.step_planner.PlanTrial.step_ms", lambda *_: 1.0)
    status, said, told = run(f"{__name__}:lightning_model", "--budget", TIGHT)
    assert status == 0
    assert said["plan"].startswith("sub-batch 86")
    assert said["predicted peak"].endswith("KiB")
    assert said["floor"].endswith("1 sample at a time")
    assert said["Eq. 6"].endswith("one sample")
    assert "the paper's bound" in said["Eq. 7"]
    assert "separable" in said["sub-batches"]
    assert str(BATCH) in said["budget"]
    lines = [line.removeprefix("retime: ") for line in told.splitlines() if line.startswith("retime: ")]
    words = [
        *("planning a batch", "finding out whether", "measuring on a few samples what"),
        *("measuring on a few samples how", "searching among plans", "trying plan 1: ", "trying plan 2: "),
    ]
    assert [next(line for line in lines if line.startswith(word)) for word in words] == lines[: len(words)]
    assert said["plan"] in lines[-1]


@pytest.mark.parametrize("model", ["plain_model", "normed_model"])
def test_the_same_floor_is_printed_with_a_plan_and_with_a_refusal(
    run: Run, monkeypatch: pytest.MonkeyPatch, model: str
) -> None:
    use_costs(monkeypatch, replace(SPLITS, spare_bytes=1000))
    (below, refusal, _), (_, fits, _) = (run(f"{__name__}:{model}", "--budget", one) for one in (BELOW, "1GiB"))
    assert below == 1
    assert "below this step's floor" in refusal["refused"]
    assert "largest task" in refusal["floor"]
    assert refusal["Eq. 6"].endswith("one sample")
    assert "the paper's bound" in refusal["Eq. 7"]
    tight = run(f"{__name__}:{model}", "--budget", str(bytes_in(refusal["floor"])))
    assert tight[0] == 0
    assert refusal["floor"] == fits["floor"] == tight[1]["floor"]


def test_a_floor_that_cannot_be_found_does_not_take_the_plan_away(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> Any:
        raise RuntimeError("not with so few samples")

    monkeypatch.setattr(support.step_planner, "least_costs", fail)
    status, said, _ = run(f"{__name__}:plain_model", "--budget", "1GiB")
    assert status == 0
    assert said["floor"] == "not known: not with so few samples"


@pytest.mark.parametrize(("name", "more"), [("by_position", ()), ("language", ("--optimizer", "torch.optim.SGD"))])
def test_steps_as_people_write_them(run: Run, name: str, more: tuple[str, ...]) -> None:
    assert planned(run, f"{__name__}:{name}", *more)["plan"] == "none: the step fits"


STAGE = re.compile(r"(.*) \(stage (\d+) of at most (\d+)\)")


def test_the_floor_of_a_step_that_fits_has_stages_too(run: Run) -> None:
    _, _, told = run(f"{__name__}:lightning_model", "--budget", "1GiB")
    found = [match for line in told.splitlines() if (match := STAGE.search(line))]
    assert [int(match[2]) for match in found][:2] == [2, 3], told
    assert {match[3] for match in found} == {"10"}


@pytest.mark.parametrize(("probed", "timed"), [(True, True), (False, True), (True, False)])
def test_stages_are_counted_and_nothing_is_estimated(probed: bool, timed: bool) -> None:
    lines: list[str] = []
    stages = PlanningStages(lines.append, probed=probed, timed=timed)
    for text in ["finding out"] * probed + ["what is needed", "what it costs", "which plan"]:
        stages.begin(text)
    for number in range(MOST_TRIALS if timed else 0):
        stages.trial(OffloadPlan(number + 1))
    found = [STAGE.fullmatch(line) for line in lines]
    assert [int(match[2]) for match in found if match] == [*range(2, len(lines) + 2)]
    assert {match[3] for match in found if match} == {str(len(lines) + 1)}


@pytest.mark.long
def test_gradients_that_stay_and_buckets_count(run: Run) -> None:
    def peak(*more: str) -> float:
        return kib(run(f"{__name__}:plain_model", "--budget", "1GiB", *more)[1]["predicted peak"])

    trained = sum(parameter.nbytes for parameter in Net().parameters()) / 1024
    alone = "--ddp", "--ranks", "1"
    kept, bucket = peak("--accumulate", "4"), peak(*alone, "--gradient-as-bucket-view")
    assert peak() < kept
    assert kept == pytest.approx(bucket, rel=0.01)
    assert peak("--accumulate", "4", *alone) == pytest.approx(kept + trained, rel=0.01)
    assert peak("--accumulate", "4", "--ddp") == pytest.approx(kept + 2 * trained, rel=0.02), "four pieces of a fourth"
    assert peak("--ddp", "--bucket-cap-mb", "0.001") < peak("--ddp")


DEEP = """
import torch
from torch import nn
def deep():
    layers = [nn.Linear(32, 64), *(layer for _ in range(4) for layer in (nn.Linear(64, 64), nn.Tanh()))]
    return nn.Sequential(*layers, nn.Linear(64, 4)), (torch.randn(2048, 32), torch.zeros(2048, dtype=torch.long))
"""


@pytest.mark.long
def test_the_printed_floor_gets_a_plan_in_a_process_of_its_own(tmp_path: Path) -> None:
    """As a user runs it: a real model, nothing patched."""
    (tmp_path / "my_models.py").write_text(DEEP)

    def plan(budget: int | str) -> tuple[int | None, dict[str, str], str]:
        arguments = ["plan", "my_models:deep", "--budget", str(budget), "--optimizer", "torch.optim.AdamW"]
        out, errors = tmp_path / f"{budget}.out", tmp_path / f"{budget}.errors"
        variables = {**os.environ, "PYTHONPATH": str(tmp_path)}
        with Warm("retime.commands.main", arguments, variables, out, errors) as process:
            process.wait(limit_s(60))
        return process.returncode, answer(out.read_text()), errors.read_text()

    status, refused, told = plan("1KiB")
    assert status == 1, told
    assert f"at least {bytes_in(refused['floor'])} bytes" in refused["refused"]
    status, planned, told = plan(bytes_in(refused["floor"]))
    assert status == 0, (refused, told)
    assert re.match(r"sub-batch \d+, ", planned["plan"])
    status, fits, told = plan("1GiB")
    assert status == 0, told
    assert fits["plan"] == "none: the step fits"
    status, _, told = plan(bytes_in(fits["floor"]))  # also the floor that a step is told that fits
    assert status == 0, told


BLOCKS = {
    "model": "{_target_: retime.recipes.models.residual_mlp, depth: 2, width: 64}",
    "data": "{_target_: retime.recipes.data.digits}",
    "optimizer": "{_target_: torch.optim.SGD, lr: 0.1}",
    "batch_size": "64",
}


def write(file: Path, **blocks: str) -> str:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(f"{key}: {value}\n" for key, value in blocks.items() if value))
    return str(file)


def here(name: str, **arguments: Any) -> str:
    more = "".join(f", {key}: {value}" for key, value in arguments.items())
    return f"{{_target_: {__name__}.{name}{more}}}"


@pytest.fixture
def built(run: Run, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The job that a command line makes, which is not planned."""

    def make(*arguments: str) -> tuple[Job, dict[str, str]]:
        jobs: list[Job] = []

        def stop(job: Job, *_: Any, **__: Any) -> Any:
            jobs.append(job)
            raise ValueError("not planned")

        with monkeypatch.context() as patched:
            patched.setattr("retime.commands.plan._planned", stop)
            _, said, errors = run(*arguments, "--budget", "1GiB")
        assert errors.endswith("ValueError: not planned\n"), errors
        return jobs[0], said

    return make


def test_defaults_groups_and_overrides(built: Any, run: Run, tmp_path: Path) -> None:
    target = "retime.recipes.models.residual_mlp"
    for name, width in (("small", "16"), ("large", "256")):
        write(tmp_path / "model" / f"{name}.yaml", _target_=target, depth="1", width=width)
    config = "--config", write(tmp_path / "mine.yaml", defaults="[{model: small}, _self_]", **BLOCKS | {"model": ""})
    assert "batch of 64" in planned(run, *config)["budget"]

    def shapes(*overrides: str) -> list[int]:
        job, _ = built(*config, *overrides)
        return [layer.out_features for layer in job.model.modules() if isinstance(layer, nn.Linear)]

    small = shapes()
    assert max(small) == 16 < max(shapes("model.width=32")) == 32 < max(shapes("model=large")) == 256
    deep = shapes("model.width=32", "model.depth=4")
    assert max(deep) == 32
    assert len(deep) > len(small)


def test_an_experiment_of_the_recipes(run: Run) -> None:
    import retime.conf

    config = str(Path(retime.conf.__file__).parent / "experiment" / "fusion_fig3.yaml")
    overrides = ("batch_size=4", "data.image_size=32", f"model._target_={__name__}.tiny")
    assert "batch of 4 " in planned(run, "--config", config, *overrides)["budget"]


def test_a_lightning_module_in_a_config_is_planned_by_its_own_step(built: Any, run: Run, tmp_path: Path) -> None:
    def config(model: str, **blocks: str) -> tuple[str, str]:
        texts = BLOCKS | {"data": here("samples"), "model": here(model)} | blocks
        return "--config", write(tmp_path / "mine.yaml", **texts)

    def peak(model: str) -> float:
        return kib(planned(run, *config(model, optimizer=""))["predicted peak"])

    assert peak("Tripled") > 1.5 * peak("Net")
    for model, kind in (("Net", torch.optim.SGD), ("Later", torch.optim.SGD), ("Bare", torch.optim.Adam)):
        job, _ = built(*config(model, optimizer="{_target_: torch.optim.Adam}"))
        (optimizer,) = job.optimizers
        assert type(optimizer) is kind, "a module's own is used if it has one"
        assert optimizer.param_groups[0]["params"] == list(job.model.parameters())
        assert job.model.net[0].training == (model != "Bare"), "a Trainer leaves the modes"  # type: ignore


def test_a_data_module_in_a_config_brings_its_batches(built: Any, tmp_path: Path) -> None:
    config = write(tmp_path / "mine.yaml", model=here("Net"), data=here("Batches"))
    assert "batch of 48" in built("--config", config)[1]["budget"]
    assert "batch of 24" in built("--config", config, "--batch", "24")[1]["budget"]


@pytest.mark.parametrize(("name", "samples"), [("hooked", 96), ("Streams", 10)])
def test_batches_and_steps_are_those_of_a_trainer(built: Any, name: str, samples: int) -> None:
    job, said = built(f"{__name__}:{name}")
    assert f"batch of {samples} " in said["budget"]
    assert job.loss(job.batch).requires_grad


@pytest.mark.parametrize(
    ("left_out", "overrides", "pattern"),
    [
        ("model", (), "has no model"),
        ("batch_size", (), "has no batch_size"),
        ("optimizer", (), "has no optimizer"),
        ("", ("modl.width=3",), "Could not override 'modl.width'"),
        ("", ("package:function",), "package:function"),
        ("", ("~model.widht",), "Could not delete"),
        ("", ("~batch_size=65",), "Could not delete from config"),
        ("", ("batch_size=[",), "override_grammar"),
        ("", ("model.width=${wide}",), "model.width: Interpolation key 'wide' not found; write it there"),
        ("", ("optimizer.lr=???",), "optimizer.lr: Missing mandatory value: lr; write it there, or override it"),
        ("", ("model.widht=3",), "append to your config use +model.widht=3"),
    ],
)
def test_bad_configs(run: Run, tmp_path: Path, left_out: str, overrides: tuple[str, ...], pattern: str) -> None:
    config = write(tmp_path / "mine.yaml", **BLOCKS | {left_out: ""})
    status, _, errors = run("--config", config, "--budget", "1GiB", *overrides)
    assert status == 2
    assert errors.startswith("retime plan: ")
    assert pattern in errors


def test_a_config_that_is_no_yaml(run: Run, tmp_path: Path) -> None:
    status, _, errors = run("--config", write(tmp_path / "mine.yaml", model="{depth: ???}"))
    assert status == 2
    assert errors.startswith("retime plan: --config ")


@pytest.mark.parametrize(
    ("arguments", "pattern"),
    [
        ((), "names no model"),
        ((f"{__name__}:plain_model", "model.width=3"), "give --config FILE"),
        ((f"{__name__}:plain_model", "--accumulate", "0"), "1 batch or more"),
        ((f"{__name__}:plain_model", "--gradient-as-bucket-view"), "give --ddp too"),
        ((f"{__name__}:plain_model", "--ranks", "3"), "--ranks is about DDP: give --ddp too"),
        ((f"{__name__}:plain_model", "--ddp", "--ranks", "0"), "--ranks 0: give 1 or more"),
        ((f"{__name__}:plain_model", "--ddp", "--bucket-cap-mb", "0"), "--bucket-cap-mb 0: give MiB above 0"),
        (("no_such_module:f",), "No module named"),
        ((f"{__name__}:plain_model", "--budget", "lots"), "cannot be read"),
        (("--config", "missing.yaml"), "missing.yaml"),
        ((f"{__name__}:plain_model", "--host", "tape"), "host='tape' names no place"),
        ((f"{__name__}:plain_model", "--host", "disk:/no/such/folder"), "/no/such/folder"),
        ((f"{__name__}:plain_model", "--device", "abacus"), "--device abacus: "),
        ((f"{__name__}:plain_model", "--device", "cuda:99"), "--device cuda:99: torch sees"),
        ((f"{__name__}:fails",), "ZeroDivisionError"),
        (("mine.py:f",), "'mine.py:f' names a file: write mine:f"),
        ((":f",), "names no model"),
        ((f"{__name__}:nothing",), "has no attribute 'nothing'; its functions are plain_model, "),
        ((f"{__name__}:BATCH",), "is a int: write package.module:function"),
        ((f"{__name__}:a_module",), "is a Linear: write package.module:function"),
        ((f"{__name__}:Fails",), "is a class of modules: write"),
        ((f"{__name__}:Net",), "returned (Net): return (model, batch)"),
        ((f"{__name__}:needs_a_path",), "needs path: give each a default"),
        ((f"{__name__}:frozen",), "Linear has no parameters to train: give it some, or requires_grad_()"),
        ((f"{__name__}:two_outputs",), "the model returned a tuple: let a plain nn.Module return logits"),
        ((f"{__name__}:no_targets",), "a tuple of 1: for a plain nn.Module give (inputs, targets)"),
        ((f"{__name__}:stepless",), "Stepless has no training_step"),
        ((f"{__name__}:manual",), "Manual has manual optimization: a plan needs automatic optimization"),
        ((f"{__name__}:plain_model", "--batch", "0"), "--batch 0: give 1 or more"),
        ((f"{__name__}:lightning_model", "--batch", "8"), "lightning_model takes no batch_size"),
        ((f"{__name__}:lightning_model", "--optimizer", "torch.optim.Adam"), "Net has a configure_optimizers"),
        ((f"{__name__}:plain_model", "--optimizer", "Adam"), "--optimizer Adam: there is no such class"),
        ((f"{__name__}:plain_model", "--optimizer", "torch.nn.Linear"), "Linear: there is no such class"),
        ((f"{__name__}:plain_model", "--device", "meta"), "--device meta: give cpu, cuda"),
        ((f"{__name__}:plain_model", "--save", "/no/such/plan.json"), "there is no folder /no/such"),
    ],
)
def test_bad_arguments(run: Run, arguments: tuple[str, ...], pattern: str) -> None:
    status, _, errors = run(*arguments)
    assert status == 2
    (line,) = [line for line in errors.splitlines() if line.startswith("retime plan: ")]
    assert pattern in line
    assert line == errors.splitlines()[-1]
    assert "lightning-retime[recipes]" not in errors, "another missing module is no matter of the extra"


def test_an_error_of_the_users_own_step_says_where(run: Run) -> None:
    _, _, errors = run(f"{__name__}:Unpacks")
    last = errors.splitlines()[-1]
    assert re.search(r"test_plan\.py, line \d+, in training_step: ValueError: not enough values to unpack", last)
    assert "Traceback" not in errors


def test_a_loader_is_taken_for_its_first_batch_and_a_lacking_optimizer_is_told(run: Run) -> None:
    status, said, errors = run(f"{__name__}:no_optimizer", "--budget", "1GiB")
    assert status == 0, errors
    assert "batch of 256" in said["budget"]
    assert "its states are not counted: give --optimizer" in errors
    _, adam, errors = run(f"{__name__}:no_optimizer", "--budget", "1GiB", "--optimizer", "torch.optim.Adam")
    assert "not counted" not in errors
    assert kib(adam["predicted peak"]) > kib(said["predicted peak"])
    assert "barebones" not in errors


def test_without_the_recipes_extra(run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A configuration alone needs it: what reads them loads anew, and finds neither hydra nor the recipes."""
    for name in [*sys.modules, "hydra", "omegaconf"]:
        if name.split(".")[0] in ("hydra", "omegaconf") or name.startswith("retime.recipes"):
            monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.delitem(sys.modules, "retime.commands.configured", raising=False)
    assert "predicted peak" in planned(run, f"{__name__}:lightning_model")
    reference = (f"{__name__}:plain_model", "--optimizer", "torch.optim.AdamW", "--batch", "32")
    said = planned(run, *reference)
    assert said["plan"] == "none: the step fits"
    assert "batch of 32" in said["budget"]
    assert said["floor"].endswith("1 sample at a time")
    (tmp_path / "train.yaml").touch()
    status, _, errors = run("--config", str(tmp_path / "train.yaml"))
    assert status == 2
    assert 'pip install "lightning-retime[recipes]"' in errors
