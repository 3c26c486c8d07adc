"""MemoryBudgetStrategy under small budgets: the same training as the plain strategy's, or a refusal."""

import random
from collections import deque
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import nn

from retime.mechanisms.memory_budget import StepCosts, costs, planner
from retime.mechanisms.memory_budget.step import NoLossError
from retime.strategies import MemoryBudgetStrategy
from support import memory_budget as support
from support.memory_budget import (
    OFFLOAD_LATER,
    SHALLOW,
    Net,
    ShallowNet,
    assert_close,
    assert_same,
    assert_way,
    fit,
    fit_both,
    loader,
    report_of,
)

pytestmark = support.IGNORED


def compare(make: Any, way: str, data: Any = None, seen: Any = (None, None), **options: Any) -> tuple[Trainer, Trainer]:
    """Fit both ways, see that the plan is of the kind the test is about, and compare the weights."""
    plain, ours = make(), make()
    one = fit(plain, data=data, callbacks=seen[0], **options)
    two = fit(ours, MemoryBudgetStrategy(SHALLOW), data=data, callbacks=seen[1], **options)
    assert_way(report_of(two), way)
    assert_same(plain, ours, way)
    assert all(shape.choice.peak_bytes <= SHALLOW for shape in report_of(two).shapes)
    return one, two


def test_really_calibrated(monkeypatch: pytest.MonkeyPatch) -> None:
    measured: list[StepCosts] = []

    def calibrate(*arguments: Any, **options: Any) -> StepCosts:
        measured.append(costs.calibrate(*arguments, **options))
        return measured[-1]

    monkeypatch.setattr(planner, "calibrate", calibrate)
    plain, ours, report = fit_both(lambda: Net(width=256, depth=4), "16MiB", loader(2, batch=2048))
    assert len(measured) == len(report.shapes) == 1
    assert_close(plain, ours)


@OFFLOAD_LATER
def test_a_scaler(way: str) -> None:
    def options() -> dict[str, Any]:
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12, growth_interval=2)
        return {"plugins": [MixedPrecision("16-mixed", "cpu", scaler)], "gradient_clip_val": 0.1}

    plain, ours = ShallowNet(), ShallowNet()
    one, two = fit(plain, **options()), fit(ours, MemoryBudgetStrategy(SHALLOW), **options())
    assert_way(report_of(two), way)
    assert one.precision_plugin.state_dict() == two.precision_plugin.state_dict()
    # half precision has 8 or 11 bits, and parts of a batch add up in another order
    assert_same(plain, ours, way, 5e-3)


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


class Returns(ShallowNet):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        logits = self.net(batch[0])
        loss = nn.functional.cross_entropy(logits, batch[1])
        return {"loss": loss, "logits": logits.detach(), "hits": (logits.argmax(1) == batch[1]).sum(), "tag": "a"}


def test_ten_steps_with_a_short_last_batch_and_what_callbacks_see(way: str) -> None:
    plain, ours = Counts(), Counts()
    compare(Returns, way, loader(9, extra=17), [plain, ours])
    assert ours.seen == plain.seen
    assert ours.losses == pytest.approx(plain.losses, rel=1e-4)
    for left, right in zip(plain.outputs, ours.outputs, strict=True):
        assert left.keys() == right.keys()
        assert torch.allclose(left["loss"], right["loss"])
        assert torch.allclose(left["logits"], right["logits"], atol=1e-5)
        assert int(left["hits"]) == int(right["hits"])
        assert right["tag"] == "a"
        assert not right["loss"].requires_grad


class Busy(ShallowNet):
    """Leaves traces wherever a step can."""

    def __init__(self) -> None:
        super().__init__()
        self.history: list[Any] = []
        self.kept: dict[str, list[Any]] = {"loss": []}
        self.recent: deque[Any] = deque(maxlen=50)
        self.calls = 0
        self.draws: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.calls += 1
        self.history.append(batch_idx)
        self.kept["loss"].append(loss.detach())
        self.recent.append(loss.detach())
        self.draws += [random.random(), float(np.random.rand()), float(torch.rand(()))]
        if loss.item() > 1e9:
            raise RuntimeError("never")
        self.logger.experiment.note(batch_idx)
        return loss


@pytest.mark.filterwarnings("ignore:under a memory budget each sub-batch draws")
def test_planning_leaves_no_trace(way: str) -> None:
    runs = []
    for strategy in ("auto", MemoryBudgetStrategy(SHALLOW)):
        module, logger = Busy(), support.Notes()
        random.seed(7)
        np.random.seed(7)
        done = fit(module, strategy, logger=logger)
        runs.append((module, logger, done))
    (plain, _, _), (ours, heard, done) = runs
    parts = report_of(done).sub_batches
    assert ours.calls == parts  # the real ones: nothing of the dry runs is left
    assert ours.history == [index for index in range(3) for _ in range(parts // 3)]
    for kept in (ours.kept["loss"], ours.recent):
        assert [type(loss) for loss in kept] == [torch.Tensor] * parts
    assert heard.noted == ours.history
    assert ours.draws[:3] == plain.draws[:3]
    assert_same(plain, ours, way)
    assert "reads" in report_of(done).shapes[0].note


class Skips(ShallowNet):
    """Returns None for some batches, and logs all the same."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.log("loss", loss, on_step=True, on_epoch=True)
        return None if batch_idx in (1, 3) else loss


@pytest.mark.filterwarnings("ignore:`training_step` returned `None`")
@pytest.mark.parametrize("accumulated", [pytest.param(1, marks=pytest.mark.long), 2])
@OFFLOAD_LATER
def test_skipped_batches(way: str, accumulated: int) -> None:
    one, two = compare(Skips, way, data=loader(6, extra=9), accumulate_grad_batches=accumulated)
    assert {name: float(value) for name, value in two.callback_metrics.items()} == pytest.approx(
        {name: float(value) for name, value in one.callback_metrics.items()}, rel=1e-5
    )


class SkipsParts(ShallowNet):
    def __init__(self, skip: int) -> None:
        super().__init__()
        self.skip = skip
        self.parts = 0

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.parts += batch_idx == 1
        return None if batch_idx == 1 and self.parts == self.skip else self.loss(batch)


@pytest.mark.parametrize(
    ("skip", "words"), [(1, "part 1 of 3 .* and part 2 gave one"), (3, "a part of a batch gave no")]
)
def test_a_batch_that_is_skipped_in_parts_is_refused(splits: None, skip: int, words: str) -> None:
    plain, ours = ShallowNet(), SkipsParts(skip)
    fit(plain, limit_train_batches=1)
    with pytest.raises(NoLossError, match=f"{words}.*decide by batch_idx"):
        fit(ours, MemoryBudgetStrategy(SHALLOW))
    assert_close(plain, ours)
