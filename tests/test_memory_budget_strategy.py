"""MemoryBudgetStrategy under small budgets: the same training as the plain strategy's, or a refusal."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import nn
from torch.utils.data import DataLoader

import memory_budget_support as support
from memory_budget_support import BATCH, OFFLOADS, SPLITS, Net, assert_close, fit, loader, report_of, use_costs
from retime.mechanisms.memory.host import HostError
from retime.schedules.errors import ScheduleError
from retime.schedules.memory.errors import BudgetError
from retime.strategies import MemoryBudgetStrategy

pytestmark = support.IGNORED
SMALL = 120_000  # bytes; the plain step needs 209,000, with BatchNorm 343,000
TINY = 60_000


@pytest.fixture(params=["offload", "sub-batches"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    use_costs(monkeypatch, OFFLOADS if request.param == "offload" else SPLITS)
    return str(request.param)


@pytest.fixture
def splits(monkeypatch: pytest.MonkeyPatch) -> None:
    use_costs(monkeypatch, SPLITS)


def compare(make: Any, way: str, data: Any = None, **options: Any) -> tuple[Trainer, Trainer]:
    """Fit both ways, see that the plan is of the kind the test is about, and compare the weights."""
    plain, ours = make(), make()
    one = fit(plain, data=data, **options)
    two = fit(ours, MemoryBudgetStrategy(SMALL), data=data, **options)
    report = report_of(two)
    if way == "offload":
        assert report.offload.storages > 0
        assert report.sub_batches == report.steps
        assert_close(plain, ours, 0)
    else:
        assert report.sub_batches > report.steps
        assert_close(plain, ours)
    assert all(shape.choice.peak_bytes <= SMALL for shape in report.shapes)
    return one, two


def test_ten_steps(way: str) -> None:
    compare(Net, way, data=loader(10))


def test_really_calibrated() -> None:
    plain, ours = Net(width=256), Net(width=256)
    data = loader(2, batch=2048)
    fit(plain, data=data)
    done = fit(ours, MemoryBudgetStrategy("24MiB"), data=data)
    assert report_of(done).shapes[0].costs is not None
    assert_close(plain, ours)


def test_short_last_batch_and_short_last_window(way: str) -> None:
    compare(Net, way, data=loader(4, extra=17), accumulate_grad_batches=2)


def test_clipping_by_norm(way: str) -> None:
    compare(Net, way, gradient_clip_val=0.01, gradient_clip_algorithm="norm")


@pytest.mark.parametrize("kind", ["bf16", "scaler"])
def test_mixed_precision(way: str, kind: str) -> None:
    def options() -> dict[str, Any]:
        if kind == "bf16":
            return {"precision": "bf16-mixed"}
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12, growth_interval=2)
        return {"plugins": [MixedPrecision("16-mixed", "cpu", scaler)], "gradient_clip_val": 0.1}

    plain, ours = Net(), Net()
    one, two = fit(plain, **options()), fit(ours, MemoryBudgetStrategy(SMALL), **options())
    assert report_of(two).sub_batches == 3 if way == "offload" else report_of(two).sub_batches > 3
    assert one.precision_plugin.state_dict() == two.precision_plugin.state_dict()
    # half precision has 8 or 11 bits, and parts of a batch add up in another order
    assert_close(plain, ours, 0 if way == "offload" else 5e-3)


class Scheduled(Net):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), lr=1e-3)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


def test_schedulers_and_adam(way: str) -> None:
    plain, ours = Scheduled(), Scheduled()
    one, two = fit(plain), fit(ours, MemoryBudgetStrategy(SMALL))
    assert one.lr_scheduler_configs[0].scheduler.state_dict() == two.lr_scheduler_configs[0].scheduler.state_dict()
    assert_close(plain, ours, 0 if way == "offload" else 1e-3)  # Adam divides by gradients that may be tiny


class Counts(Callback):
    def __init__(self) -> None:
        self.seen: list[str] = []
        self.losses: list[float] = []
        self.outputs: list[Any] = []

    def on_before_zero_grad(self, *_: Any) -> None:
        self.seen.append("zero_grad")

    def on_before_backward(self, *_: Any) -> None:
        self.seen.append("before_backward")

    def on_after_backward(self, *_: Any) -> None:
        self.seen.append("after_backward")

    def on_before_optimizer_step(self, trainer: Trainer, module: LightningModule, optimizer: Any) -> None:
        self.seen.append("before_step")
        self.losses.append(float(sum(p.grad.square().sum() for p in module.parameters())))

    def on_train_batch_end(self, trainer: Trainer, module: LightningModule, outputs: Any, *_: Any) -> None:
        self.seen.append("batch_end")
        self.outputs.append(outputs)


class Returns(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        logits = self.net(batch[0])
        loss = nn.functional.cross_entropy(logits, batch[1])
        return {"loss": loss, "logits": logits.detach(), "hits": (logits.argmax(1) == batch[1]).sum(), "tag": "a"}


def test_callbacks_see_one_batch(way: str) -> None:
    plain, ours = Counts(), Counts()
    fit(Returns(), callbacks=[plain])
    fit(Returns(), MemoryBudgetStrategy(SMALL), callbacks=[ours])
    assert ours.seen == plain.seen
    assert ours.losses == pytest.approx(plain.losses, rel=1e-4)
    for left, right in zip(plain.outputs, ours.outputs, strict=True):
        assert left.keys() == right.keys()
        assert torch.allclose(left["loss"], right["loss"])
        assert torch.allclose(left["logits"], right["logits"], atol=1e-5)
        assert int(left["hits"]) == int(right["hits"])
        assert right["tag"] == "a"
        assert not right["loss"].requires_grad


def test_another_shape_is_planned_for_or_refused(splits: None) -> None:
    torch.manual_seed(3)
    batches = [(torch.randn(size, 16), torch.randint(4, (size,))) for size in (BATCH, BATCH, 2 * BATCH)]
    data = DataLoader(batches, batch_size=None)  # type: ignore[arg-type]
    plain, ours = Net(), Net()
    fit(plain, data=data)
    done = fit(ours, MemoryBudgetStrategy(SMALL), data=data)
    assert [shape.samples for shape in report_of(done).shapes] == [BATCH, 2 * BATCH]
    assert_close(plain, ours)
    with pytest.raises(ScheduleError, match="on_shape_change='error': bring all batches to one shape"):
        fit(Net(), MemoryBudgetStrategy(SMALL, on_shape_change="error"), data=data)


def norm() -> nn.Module:
    return nn.BatchNorm1d(16)


def test_batch_norm_offloads_only(splits: None) -> None:
    plain, ours = Net(norm), Net(norm)
    fit(plain)
    done = fit(ours, MemoryBudgetStrategy(SMALL))
    assert report_of(done).sub_batches == 3
    assert report_of(done).offload.storages > 0
    assert_close(plain, ours, 0)


def test_batch_norm_below_its_floor_is_refused_by_name(splits: None) -> None:
    with pytest.raises(BudgetError, match=r"BatchNorm in train mode takes its statistics .*: net\.2, net\.5") as caught:
        fit(Net(norm), MemoryBudgetStrategy(TINY))
    assert "batchnorm='exact' or batchnorm='ghost'" in str(caught.value)


def test_ghost_batch_norm_runs_below_that(splits: None) -> None:
    ours = Net(norm)
    done = fit(ours, MemoryBudgetStrategy(TINY, batchnorm="ghost"))
    assert report_of(done).sub_batches > 3
    assert all(torch.isfinite(value).all() for value in ours.state_dict().values())


def test_exact_batch_norm_equals_the_plain_step(splits: None) -> None:
    plain, ours = Net(norm), Net(norm)
    fit(plain)
    done = fit(ours, MemoryBudgetStrategy(SMALL, batchnorm="exact"))
    assert report_of(done).sub_batches == 3
    assert_close(plain, ours, 1e-4)


class Started(Callback):
    batches = 0

    def on_train_batch_end(self, *_: Any) -> None:
        self.batches += 1


def test_a_refused_budget_trains_nothing(splits: None) -> None:
    module, seen = Net(), Started()
    before = {name: value.clone() for name, value in module.state_dict().items()}
    with pytest.raises(BudgetError, match=r"at least \d+ bytes are needed at task") as caught:
        fit(module, MemoryBudgetStrategy(2_000), callbacks=[seen])
    assert caught.value.layer
    assert seen.batches == 0
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    assert all(parameter.grad is None for parameter in module.parameters())


class Manual(Net):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


class Iterates(Net):
    def training_step(self, dataloader_iter: Any) -> Any:  # type: ignore[override]
        return self.loss(next(dataloader_iter)[0])


@pytest.mark.parametrize(
    ("module", "pattern"), [(Manual, "needs automatic optimization"), (Iterates, r"training_step\(batch, batch_idx\)")]
)
@pytest.mark.filterwarnings("ignore:You are using the `dataloader_iter` step flavor")
def test_steps_that_cannot_be_planned(module: type[Net], pattern: str) -> None:
    with pytest.raises(ValueError, match=pattern):
        fit(module(), MemoryBudgetStrategy(SMALL))


def test_several_devices() -> None:
    with pytest.raises(ValueError, match="use devices=1"):
        fit(Net(), MemoryBudgetStrategy(SMALL), devices=2)


def test_a_missing_host_folder(tmp_path: Path) -> None:
    with pytest.raises(HostError, match="missing"):
        fit(Net(), MemoryBudgetStrategy(SMALL, host=f"disk:{tmp_path / 'missing'}"))


@pytest.mark.parametrize(
    ("options", "error", "pattern"),
    [
        ({"budget": "lots"}, ValueError, "cannot be read"),
        ({"budget": "0"}, ValueError, "above 0"),
        ({"budget": -5}, ValueError, "above 0"),
        ({"budget": "900TiB"}, ValueError, "give at most that"),
        ({"budget": "120%"}, ValueError, "give at most that"),
        ({"budget": 1.5}, TypeError, "must be a number of bytes"),
        ({"budget": True}, TypeError, "must be a number of bytes"),
        ({"budget": None}, TypeError, "must be a number of bytes"),
        ({"batchnorm": "maybe"}, ValueError, "'offload', 'ghost' or 'exact'"),
        ({"on_shape_change": "panic"}, ValueError, "'replan' or 'error'"),
        ({"host": "tape"}, ValueError, "use 'memory' or 'disk:FOLDER'"),
        ({"host": "memory"}, ValueError, "frees nothing when the model trains on the CPU"),
    ],
)
def test_arguments_are_checked(options: dict[str, Any], error: type[Exception], pattern: str) -> None:
    with pytest.raises(error, match=pattern):
        fit(Net(), MemoryBudgetStrategy(**{"budget": SMALL} | options))


class Busy(Net):
    """Leaves traces wherever a step can."""

    def __init__(self) -> None:
        super().__init__()
        self.history: list[Any] = []
        self.calls = 0
        self.draws: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.calls += 1
        self.history.append(batch_idx)
        self.draws += [random.random(), float(np.random.rand()), float(torch.rand(()))]
        if loss.item() > 1e9:
            raise RuntimeError("never")
        self.logger.experiment.note(batch_idx)
        return loss


def test_planning_leaves_no_trace(way: str) -> None:
    runs = []
    for strategy in ("auto", MemoryBudgetStrategy(SMALL)):
        module, logger = Busy(), support.Notes()
        random.seed(7)
        np.random.seed(7)
        done = fit(module, strategy, logger=logger)
        runs.append((module, logger, done))
    (plain, _, _), (ours, heard, done) = runs
    parts = report_of(done).sub_batches
    assert ours.calls == parts  # the real ones: nothing of the dry runs is left
    assert ours.history == [index for index in range(3) for _ in range(parts // 3)]
    assert heard.noted == ours.history
    assert ours.draws[:3] == plain.draws[:3]
    assert_close(plain, ours, 0 if way == "offload" else 1e-5)
    assert "reads" in report_of(done).shapes[0].note


def test_the_reason_is_given_when_a_batch_cannot_be_split(splits: None) -> None:
    class Strange(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return self.loss(batch["pair"])

    batch = {"pair": (torch.randn(8, 16), torch.zeros(8).long()), "odd": torch.zeros(3)}
    with pytest.raises(ValueError, match="split_batch"):
        fit(Strange(), MemoryBudgetStrategy(SMALL), data=DataLoader([batch], batch_size=None))  # type: ignore[arg-type]
