"""What the strategies refuse, before anything is set up, how they report, and that swapped optimizers are let go of."""

import gc
import os
import re
import sys
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import StochasticWeightAveraging
from lightning.pytorch.demos.boring_classes import BoringModel, RandomDataset
from lightning.pytorch.strategies import (
    DDPStrategy,
    DeepSpeedStrategy,
    FSDPStrategy,
    SingleDeviceXLAStrategy,
    StrategyRegistry,
)
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

import retime
from contract import rows
from retime.callbacks import FuseOptimizer
from retime.strategies import STRATEGIES, FusedOptimizerStrategy
from support.paths import PYTHONPATH, SUPPORT
from support.time_limits import limit_s
from support.trainers import IGNORED_WARNINGS, quiet_trainer
from support.warm_start import Warm

pytestmark = [*IGNORED_WARNINGS, pytest.mark.filterwarnings("ignore:.*`max_epochs` was not set")]


def trainer(**options: Any) -> Trainer:
    return quiet_trainer(**{"max_steps": 2, "limit_val_batches": 0, **options})


def test_names_are_registered_once_and_described() -> None:
    registered = [name for name in StrategyRegistry.available_strategies() if _is_ours(name)]
    suffixes = {name: ("", "_spawn", "_fork") if starts else ("",) for name, _, starts, _, _ in STRATEGIES}
    assert sorted(registered) == sorted(name + suffix for name in suffixes for suffix in suffixes[name])
    assert all(StrategyRegistry[name]["description"] for name in registered)
    named = {name: getattr(kind, "strategy_name", "") for name, kind, *_ in STRATEGIES}
    assert named == {name: name.removesuffix("_forward") for name in named}
    assert isinstance(trainer(strategy="fused_optimizer").strategy, FusedOptimizerStrategy)


def test_pages_and_contract_have_the_names_of_the_table() -> None:
    names = {name for name, *_ in STRATEGIES}
    assert names <= {row.name for row in rows.STRATEGIES}
    assert _names_in("docs/start.md", "## Strategies", 1) == names
    assert _names_in("README.md", "## What to take", 2) <= names


def _names_in(page: str, heading: str, column: int) -> set[str]:
    section = (Path(__file__).parents[2] / page).read_text("utf-8").partition(heading)[2].partition("\n## ")[0]
    cells = [line.split("|")[column] for line in section.splitlines() if line.startswith("|")]
    return {name for cell in cells for name in re.findall(r"`([a-z]+_[a-z_]+)`", cell)}


def _is_ours(name: str) -> bool:
    return str(StrategyRegistry[name]["strategy"].__module__).startswith("retime.")


def test_name_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PL_TRAINER_STRATEGY", "fused_optimizer_forward")
    assert isinstance(trainer().strategy, FusedOptimizerStrategy)


@pytest.mark.parametrize(
    ("strategy", "instead"),
    [
        ("fused_optimizer", "fused_optimizer_ddp"),
        ("fused_optimizer_forward", "fused_optimizer_ddp"),
        ("ooo_single_device", "ooo_ddp"),
    ],
)
def test_several_devices_are_refused(strategy: str, instead: str) -> None:
    with pytest.raises(ValueError, match=rf"runs on one device, got devices=2.*{instead}"):
        trainer(strategy=strategy, devices=2).fit(BoringModel())


def test_the_device_comes_from_the_trainer() -> None:
    assert trainer(strategy="fused_optimizer").strategy.root_device == torch.device("cpu")
    assert FusedOptimizerStrategy(device="cuda:1").root_device == torch.device("cuda:1")


def test_callback_refuses_what_it_cannot_join() -> None:
    with pytest.raises(ValueError, match="fuses the optimizer already"):
        trainer(strategy="fused_optimizer", callbacks=[FuseOptimizer()]).fit(BoringModel())

    fake = type("FakeTrainer", (), {})()
    for owner in (FSDPStrategy, DeepSpeedStrategy, SingleDeviceXLAStrategy):
        fake.strategy = object.__new__(owner)
        with pytest.raises(ValueError, match=f"cannot be used with {owner.__name__}"):
            FuseOptimizer().setup(fake, BoringModel(), "fit")
    fake.strategy = DDPStrategy(ddp_comm_hook=lambda state, bucket: None)
    with pytest.raises(ValueError, match=r"FusedOptimizerDDPStrategy\(ddp_comm_hook"):
        FuseOptimizer().setup(fake, BoringModel(), "fit")


@pytest.mark.parametrize("order", [1, -1])
def test_an_exception_leaves_no_layer_of_several_callbacks(order: int) -> None:
    class Fails(BoringModel):
        def training_step(self, *_: Any) -> Any:
            raise ZeroDivisionError

    one = trainer(callbacks=[FuseOptimizer(), retime.PeakMemory(log=False)][::order])
    with pytest.raises(ZeroDivisionError):
        one.fit(Fails())
    assert "optimizer_step" not in vars(one.strategy)


def test_optimizer_from_elsewhere_trains_the_plain_way_and_says_so() -> None:
    class Module(BoringModel):
        def configure_optimizers(self) -> Any:
            return torch.optim.LBFGS(self.parameters())

    chosen = trainer(strategy="fused_optimizer")
    with pytest.warns(retime.NoEffectWarning, match="LBFGS needs all parameters"):
        chosen.fit(Module())
    assert "LBFGS" in str(chosen.strategy.report())  # type: ignore[attr-defined]


def test_nothing_is_left_after_the_fit() -> None:
    plain = trainer()
    plain.fit(BoringModel())
    for strategy in ("fused_optimizer", "fused_optimizer_forward"):
        model = BoringModel()
        chosen = trainer(strategy=strategy)
        chosen.fit(model)
        assert chosen.strategy.report().steps == 2  # type: ignore[attr-defined]
        assert not any(p._post_accumulate_grad_hooks for p in model.parameters())
        assert {type(p) for p in model.parameters()} == {torch.nn.Parameter}
        mine, theirs = chosen.optimizers[0], plain.optimizers[0]
        assert vars(mine).keys() == vars(theirs).keys()
        assert mine.step.__qualname__ == theirs.step.__qualname__  # the scheduler's wrapper, and nothing of ours
        assert mine.step.__wrapped__.__qualname__ == theirs.step.__wrapped__.__qualname__  # type: ignore[attr-defined]


@pytest.mark.parametrize("strategy", ["fused_optimizer", "fused_optimizer_forward"])
def test_a_second_fit_adds_steps_and_no_parameters(strategy: str) -> None:
    chosen = trainer(strategy=strategy)
    model = BoringModel()
    chosen.fit(model)
    once = chosen.strategy.report()  # type: ignore[attr-defined]
    chosen.fit_loop.epoch_loop.max_steps = 4
    chosen.fit(model)
    twice = chosen.strategy.report()  # type: ignore[attr-defined]
    assert (once.steps, twice.steps) == (2, 4)
    assert once.parameters == twice.parameters == 2
    assert twice.peak_gradient_bytes == once.peak_gradient_bytes


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("algorithm", ["norm", "value"])
def test_a_clip_value_that_is_set_in_the_midst_of_a_step_is_refused(algorithm: str) -> None:
    class Clips(BoringModel):
        def training_step(self, *args: Any) -> Any:
            self.trainer.gradient_clip_val, self.trainer.gradient_clip_algorithm = 0.001, algorithm
            return super().training_step(*args)

    one = trainer(strategy="fused_optimizer")
    with pytest.raises(RuntimeError, match=r"gradient_clip_val was set to 0\.001 .* on_train_batch_start"):
        one.fit(Clips())


@pytest.mark.filterwarnings("ignore:To copy construct from a tensor")
@pytest.mark.parametrize("callbacks", [[], [FuseOptimizer("forward")]], ids=["strategy", "callback"])
def test_a_parameter_of_the_module_itself_that_its_step_copies(callbacks: list[Any]) -> None:
    class Logs(BoringModel):
        def __init__(self) -> None:
            super().__init__()
            self.scale = torch.nn.Parameter(torch.ones(1))
            self.seen: list[float] = []

        def training_step(self, *args: Any) -> Any:
            self.seen.append(torch.tensor(self.scale).item())
            output = super().training_step(*args)
            return {"loss": output["loss"] + self.scale.square().sum()}

    module = Logs()
    trainer(strategy="auto" if callbacks else "fused_optimizer_forward", callbacks=callbacks).fit(module)
    assert module.seen[0] > module.seen[1]


def test_the_other_lightning_package_is_pointed_out() -> None:
    other = pytest.importorskip("pytorch_lightning", reason="pytorch_lightning is not installed")
    with pytest.raises(ValueError, match=r"from lightning\.pytorch import Trainer"):
        other.Trainer(strategy=retime.FusedOptimizerStrategy(), logger=False)
    with pytest.raises(TypeError, match=r"from lightning\.pytorch import Trainer"):
        FuseOptimizer().setup(other.Trainer(accelerator="cpu", logger=False), None, "fit")


class Swap(Callback):
    def __init__(self) -> None:
        self.gone: list[weakref.ref[Any]] = []
        self.alive: list[bool] = []

    def on_train_batch_start(self, trainer: Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 2:
            self.gone = [weakref.ref(optimizer) for optimizer in trainer.strategy.optimizers]
            trainer.strategy.optimizers = [torch.optim.SGD(pl_module.parameters(), lr=0.1)]
        if batch_idx == 4:
            gc.collect()
            self.alive = [reference() is not None for reference in self.gone]


class Model(BoringModel):
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.layer.parameters(), lr=0.1)


@pytest.mark.parametrize("mode", ["backward", "forward"])
def test_a_swapped_optimizer_is_let_go_and_its_counts_stay(mode: str) -> None:
    strategy, swap = FusedOptimizerStrategy(mode), Swap()
    trainer(strategy=strategy, max_steps=6, callbacks=[swap]).fit(Model())
    assert swap.alive == [False]
    report = strategy.report()
    assert report.steps == 6
    assert report.fused_updates + report.late_updates == 6 * 2


def test_one_process_has_no_updates_to_divide() -> None:
    alone = trainer(strategy=retime.CPUAccumulateStrategy(update_on_host=True))
    with pytest.warns(
        retime.NoEffectWarning, match="with one process there are no gradients to add up and no updates to divide"
    ):
        alone.fit(BoringModel())
    assert alone.global_step == 2


def test_devices_are_refused(one_rank: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retime.CPUAccumulateStrategy, "root_device", torch.device("cuda:0"))
    strategy = retime.CPUAccumulateStrategy(update_on_host=True)
    strategy.model = DistributedDataParallel(nn.Linear(2, 2))
    with pytest.raises(ValueError, match="update_on_host=True is for processors, not for cuda:0"):
        strategy.register_hooks()


@pytest.mark.long
def test_rank_zeros_report_comes_home(tmp_path: Path) -> None:
    ours = ("cpu_accumulate_ddp_fork", "cpu_accumulate_ddp_spawn")
    names = ("fused_optimizer_ddp_fork", "memory_budget_ddp_fork", *ours)
    script = str(SUPPORT / "reporting_launcher_worker.py")
    out, errors = tmp_path / "out", tmp_path / "errors"
    with Warm(script, [str(tmp_path), *names], {**os.environ, **PYTHONPATH}, out, errors) as fits:
        fits.wait(limit_s(200))
    printed, said = out.read_text(), errors.read_text()[-3000:]
    assert "fused_optimizer_ddp_fork: FusionReport of 4 steps" in printed, said
    assert "memory_budget_ddp_fork: BudgetReport of 4 steps" in printed, said
    for name in ours:
        assert f"{name}: HostReductionReport of gradients on the host: 4 buckets" in printed, said
    assert printed.count("2 ranks in shared memory") == (2 if sys.platform == "linux" else 0)


def test_every_strategy_of_several_processes_has_names_that_start_them() -> None:
    for name in ("fused_optimizer_ddp", "ooo_ddp", "memory_budget_ddp", "cpu_accumulate_ddp"):
        for start in ("popen", "spawn", "fork"):
            full = name if start == "popen" else f"{name}_{start}"
            assert isinstance(StrategyRegistry.get(full), retime.strategies.support.base.ReportsAcrossProcesses)
            assert StrategyRegistry[full]["init_params"]["start_method"] == start


# Cases that Lightning's own test suite brought up, against the plain strategy.


class Net(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(32, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 2))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.net(batch).square().mean()  # type: ignore[no-any-return]

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def train_dataloader(self) -> Any:
        return DataLoader(RandomDataset(32, 16), batch_size=4)


class KeepsGradients(Net):
    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        if batch_idx % 2 == 0:
            optimizer.zero_grad()


@retime.declare_per_parameter
class Scaled(torch.optim.SGD):
    """Takes an argument beside the closure."""

    def step(self, closure: Any = None, scale: float = 1.0) -> Any:  # type: ignore[override]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with torch.no_grad():
            for group in self.param_groups:
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        parameter.sub_(parameter.grad, alpha=group["lr"] * scale)
        return loss


class FurtherArguments(Net):
    def configure_optimizers(self) -> Any:
        return Scaled(self.parameters(), lr=0.1)

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        optimizer.step(closure=optimizer_closure, scale=0.1)


def weights(module: type[Net], strategy: str, averaging: bool) -> dict[str, Tensor]:
    seed_everything(1, verbose=False)
    net = module()
    callbacks = [StochasticWeightAveraging(swa_lrs=0.1, swa_epoch_start=1)] if averaging else []
    quiet_trainer(strategy=strategy, max_epochs=3, callbacks=callbacks).fit(net)
    return net.state_dict()


@pytest.mark.filterwarnings("ignore::retime.DifferenceWarning", "ignore::retime.NoEffectWarning")
@pytest.mark.filterwarnings("ignore:Swapping scheduler")
@pytest.mark.parametrize("strategy", ["fused_optimizer", "fused_optimizer_forward"])
@pytest.mark.parametrize(("module", "averaging"), [(Net, True), (KeepsGradients, False), (FurtherArguments, False)])
def test_equals_the_plain_strategy(module: type[Net], averaging: bool, strategy: str) -> None:
    plain, ours = weights(module, "auto", averaging), weights(module, strategy, averaging)
    assert all(torch.equal(plain[name], ours[name]) for name in plain)
