"""Canaries of the private names of Lightning, torchmetrics and Accelerate: see ``private_canaries``."""

import copy
import os
import signal
from datetime import timedelta

import pytest
import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import StochasticWeightAveraging
from lightning.pytorch.demos.boring_classes import BoringModel, RandomDataset
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
from lightning.pytorch.trainer.states import RunningStage
from lightning.pytorch.utilities.compile import from_compiled, to_uncompiled
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch import nn
from torchmetrics import MeanMetric

from retime.foundations.torch_private import PrivateNameError, engine
from retime.integrations.accelerate.accelerate_private import (
    prepared_optimizers,
    prepared_schedulers,
    renew_captured_steps,
)
from retime.strategies.support import lightning_private
from support.private_canaries import canary, dies
from support.trainers import IGNORED_WARNINGS, quiet_trainer

pytestmark = IGNORED_WARNINGS


def fit(*callbacks: Callback, model: BoringModel | None = None, steps: int = 3) -> Trainer:
    trainer = quiet_trainer(max_steps=steps, limit_val_batches=0, callbacks=list(callbacks))
    trainer.fit(model or BoringModel())
    return trainer


@canary("DDPMoments", breaks="the reductions of ooo_ddp and fused_optimizer_ddp, and reports of spawned processes")
def test_ddp_strategies_are_called_at_their_moments(monkeypatch):
    called = []
    monkeypatch.setattr(DDPStrategy, "_register_ddp_hooks", lambda self: called.append("lightning's hook"))

    class Strategy(lightning_private.DDPMoments):
        def register_hooks(self):
            called.append("ours")
            super().register_hooks()

        def choose_launcher(self, launcher):
            called.append(type(launcher).__name__)
            return launcher

    strategy = Strategy(start_method="spawn")
    Trainer(strategy=strategy, accelerator="cpu", devices=2, logger=False, enable_progress_bar=False)
    assert called == [lightning_private.ProcessLauncher.__name__]
    strategy._lightning_module = strategy.model = BoringModel()
    monkeypatch.setattr(strategy, "_setup_model", lambda model: model)
    strategy.configure_ddp()
    assert called[1:] == ["ours", "lightning's hook"]


@canary("ProcessLauncher", "Launcher", "start_method_of", breaks="reports of fits in spawned processes")
def test_reports_come_home_by_the_launcher():
    assert lightning_private.start_method_of(DDPStrategy(start_method="fork")) == "fork"
    assert issubclass(lightning_private.ProcessLauncher, lightning_private.Launcher)
    for method in ("get_extra_results", "update_main_process_results"):
        assert callable(getattr(lightning_private.ProcessLauncher, method))


class _Hit(Callback):
    """Gets SIGTERM in the second batch, and sees another rank lost there."""

    def __init__(self, lost=False):
        self.lost = lost

    def is_lost(self, error):
        return isinstance(error, EOFError)

    def setup(self, trainer, pl_module, stage):
        lightning_private.end_behind_batch_on_sigterm(trainer, self.is_lost)

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if batch_idx == 1:
            copy.deepcopy(trainer)  # in the middle of training, too
            os.kill(os.getpid(), signal.SIGTERM)
            if self.lost:
                raise EOFError

    def on_exception(self, trainer, pl_module, exception):
        self.steps, self.ended = trainer.global_step, type(exception)


@canary("end_behind_batch_on_sigterm", breaks="the end of a rank that gets SIGTERM")
@pytest.mark.parametrize("lost", [False, True])
def test_sigterm_ends_a_fit_behind_the_batch(monkeypatch, caplog, lost):
    caplog.set_level("INFO", "lightning.pytorch")
    monkeypatch.setattr("torch.distributed.broadcast", lambda *_, **__: pytest.fail("waited for rank 0"))
    hit = _Hit(lost)
    with pytest.raises(SIGTERMException):
        fit(hit)
    assert (hit.steps, hit.ended) == (1 if lost else 2, SIGTERMException)
    assert "Received SIGTERM: 15" in caplog.text


@canary("user_comm_hook", breaks="backward fusion beside a user's communication hook")
def test_backward_fusion_finds_the_users_hook():
    def hook(state, bucket):
        return bucket

    def wrapper(inner):
        return inner, "wrapped"

    assert lightning_private.user_comm_hook(DDPStrategy()) == (None, None)
    assert lightning_private.user_comm_hook(DDPStrategy(ddp_comm_hook=hook, ddp_comm_state=1)) == (hook, 1)
    wrapped = DDPStrategy(ddp_comm_hook=hook, ddp_comm_wrapper=wrapper)
    assert lightning_private.user_comm_hook(wrapped) == ((hook, "wrapped"), None)


@canary("ddp_options", breaks="ooo_ddp's choice of bucket sizes")
def test_ooo_ddp_chooses_bucket_sizes(monkeypatch):
    given = {}

    def wrap(**options):
        given.update(options)
        return options["module"]

    monkeypatch.setattr("lightning.pytorch.strategies.ddp.DistributedDataParallel", wrap)
    strategy = DDPStrategy(accelerator="cpu")
    lightning_private.ddp_options(strategy)["bucket_cap_mb"] = 3
    monkeypatch.setattr(DDPStrategy, "determine_ddp_device_ids", lambda self: None)
    strategy._setup_model(nn.Linear(1, 1))
    assert given["bucket_cap_mb"] == 3


@canary("timeout_of", breaks="the timeout of ooo_ddp's and memory_budget_ddp's own process groups")
def test_own_groups_have_the_strategys_timeout():
    assert lightning_private.timeout_of(DDPStrategy(timeout=timedelta(seconds=7))) == timedelta(seconds=7)


@canary("given_device", breaks="the strategies for one device")
def test_one_device_strategies_know_the_device():
    assert lightning_private.given_device(SingleDeviceStrategy("cpu")) == torch.device("cpu")


@canary("skips_backward", "has_batch_norm", breaks="fusion and memory budgets beside StochasticWeightAveraging")
def test_swa_is_seen():
    seen = []

    class Look(Callback):
        def on_train_batch_start(self, trainer, *_):
            seen.append(lightning_private.skips_backward(trainer))

    class Model(BoringModel):
        def __init__(self):
            super().__init__()
            self.norm = nn.BatchNorm1d(32)

        def forward(self, x):
            return self.layer(self.norm(x))

        def train_dataloader(self):
            return torch.utils.data.DataLoader(RandomDataset(32, 4), batch_size=2)

    swa = StochasticWeightAveraging(1e-3, swa_epoch_start=1)
    trainer = quiet_trainer(max_epochs=2, limit_train_batches=1, limit_val_batches=0, callbacks=[swa, Look()])
    trainer.fit(Model())
    assert lightning_private.has_batch_norm(swa)
    assert seen[0] is False
    assert seen[-1] is True


@canary("logged_step", breaks="the place of StepTimeline's numbers on the loggers' x axis")
def test_timelines_count_steps_as_loggers_do():
    assert lightning_private.logged_step(fit(steps=3)) == 3


@canary("averages_models", breaks="fusion beside post-local SGD")
def test_post_local_sgd_is_seen():
    strategy = DDPStrategy()
    assert not lightning_private.averages_models(strategy)
    assert not lightning_private.averages_models(SingleDeviceStrategy("cpu"))
    strategy._model_averager = object()
    assert lightning_private.averages_models(strategy)


@canary("logging_as", breaks="the logged values of memory budgets")
def test_memory_budgets_log_after_their_parts():
    class Model(BoringModel):
        def on_train_batch_end(self, *_):
            with lightning_private.logging_as(self, "training_step"):
                self.log("inside", 1.0)  # on_step=True is training_step's default, and not this hook's
            self.log("outside", 1.0, on_step=False, on_epoch=True)

    trainer = fit(model=Model())
    assert trainer.callback_metrics["inside"] == 1


@canary("sync_on_forward", breaks="metrics over ranks under memory budgets")
def test_metrics_are_added_over_ranks_on_demand():
    synced = []

    class Metric(MeanMetric):
        def sync(self, *args, should_sync=True, **kwargs):
            synced.append(should_sync)

    metric = Metric()
    metric.update(1.0)
    for sync in (False, True):
        lightning_private.sync_on_forward(metric, sync)
        metric._computed = None
        metric.compute()
    assert synced == [False, True]


@canary("show_as_step_value", breaks="the step's value of metrics under memory budgets")
def test_metrics_show_the_batchs_value():
    class Model(BoringModel):
        def __init__(self):
            super().__init__()
            self.metric = MeanMetric()

        def training_step(self, batch, batch_idx):
            self.metric(5.0)
            lightning_private.show_as_step_value(self.metric, torch.tensor(7.0))
            self.log("metric", self.metric, on_step=True, on_epoch=False)
            return super().training_step(batch, batch_idx)

    assert fit(model=Model()).callback_metrics["metric"] == 7


@canary("metric_state", "set_metric_state", breaks="metrics in a pipeline, whose last stage alone sees outputs")
def test_metrics_take_the_state_of_another_ranks():
    there, here = MeanMetric(), MeanMetric()
    there(torch.tensor([1.0, 5.0]))
    lightning_private.set_metric_state(here, lightning_private.metric_state(there))
    assert here.compute() == 3
    assert here.update_count == 1
    here.reset()
    assert there.compute() == 3


@canary("has_compile_mark", breaks="forward fusion of LightningModules that are compiled")
def test_forward_fusion_sees_compiled_lightning_modules():
    model = BoringModel()
    assert not engine.has_compile_mark(model)
    compiled = from_compiled(torch.compile(model, backend="eager"))
    assert compiled is model
    assert not engine.compiled_call(compiled)  # nothing else tells of it
    assert engine.has_compile_mark(compiled)
    assert not engine.has_compile_mark(to_uncompiled(compiled))


@canary("renew_captured_steps", breaks="fusion under Accelerate with a gradient scaler")
def test_accelerates_optimizer_calls_the_new_step(monkeypatch):
    Accelerator(cpu=True)
    called = []
    inner = torch.optim.SGD([nn.Parameter(torch.ones(1))])
    optimizer = AcceleratedOptimizer(inner, device_placement=False, scaler=torch.amp.GradScaler("cpu", enabled=False))
    inner.step = lambda *_: called.append("ours")
    renew_captured_steps(optimizer)
    optimizer.step()
    assert called == ["ours"]


@canary("prepared_optimizers", breaks="TwoStreams beside FusedOptimizer and MemoryBudget, which it has to refuse")
def test_accelerate_knows_the_optimizers_that_it_prepared():
    accelerator = Accelerator(cpu=True)
    prepared = accelerator.prepare(torch.optim.SGD([nn.Parameter(torch.ones(1))]))
    assert prepared_optimizers(accelerator) == [prepared]


@canary("prepared_schedulers", breaks="OutOfOrderPipeline with a prepared scheduler")
def test_accelerate_knows_the_schedulers_that_it_prepared():
    accelerator = Accelerator(cpu=True)
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))])
    prepared, scheduler = accelerator.prepare(optimizer, torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5))
    assert prepared_schedulers(accelerator) == [scheduler]
    assert scheduler.optimizers == [prepared]
    assert (scheduler.step_with_optimizer, scheduler.split_batches) == (True, False)


def test_a_private_attribute_that_is_gone_names_the_feature():
    strategy = DDPStrategy()
    del strategy._ddp_kwargs
    with pytest.raises(PrivateNameError, match="'_ddp_kwargs', which ooo_ddp"):
        lightning_private.ddp_options(strategy)


def test_canaries_die_of_a_lightning_that_behaves_otherwise(monkeypatch):
    with monkeypatch.context() as patch:  # the mark has another name
        patch.setattr(engine, "_MARKS", ("_torchdynamo_orig_callable", "_gone"))
        dies(test_forward_fusion_sees_compiled_lightning_modules)
    with monkeypatch.context() as patch:  # the mark stays when a module is compiled no more
        patch.setitem(globals(), "to_uncompiled", lambda model: model)
        dies(test_forward_fusion_sees_compiled_lightning_modules)
    with monkeypatch.context() as patch:  # hooks are registered at another moment
        patch.setattr(DDPStrategy, "configure_ddp", lambda self: None)
        dies(test_ddp_strategies_are_called_at_their_moments, patch)


@canary("in_the_loaders_order", breaks="the order of training batches in a pipeline")
def test_a_loader_that_does_not_shuffle_keeps_its_order():
    trainer = Trainer(strategy="ddp", accelerator="cpu", devices=2, logger=False, enable_checkpointing=False)
    connector, data = trainer._data_connector, RandomDataset(32, 4)

    def shuffles(**options: bool) -> bool:
        loader = torch.utils.data.DataLoader(data, **options)
        return connector._prepare_dataloader(loader, shuffle=True, mode=RunningStage.TRAINING).sampler.shuffle

    assert shuffles()
    with lightning_private.in_the_loaders_order(trainer):
        assert not shuffles()
        assert shuffles(shuffle=True)
    assert shuffles()
