"""MemoryTimeline and the sampler below it: what it predicts, and what it holds between fits and processes."""

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from torch import Tensor
from torch.utils.data import DataLoader

from retime.callbacks import MemoryTimeline
from retime.foundations.measure.memory import MemorySampler
from retime.foundations.storages import tensors_in
from retime.strategies import MemoryBudgetStrategy
from support import memory_budget as support
from support.memory_budget import SHALLOW, Net, ShallowNet, assert_close, fit, loader, report_of

pytestmark = support.IGNORED
MIB = 2**20


@pytest.mark.usefixtures("pool")  # or the tensor could come from what other tests have freed
def test_sampler_sees_what_is_held() -> None:
    sampler = MemorySampler()
    sampler.start()
    sampler.switch("forward")
    tensor = torch.ones(64 * MIB, dtype=torch.uint8)
    sampler.switch("backward")
    del tensor
    sampler.switch("update")
    sampler.stop()
    sampler.stop()
    at = {phase: ms for ms, phase in sampler.phases}
    during = [size for ms, size in sampler.samples if at["backward"] <= ms <= at["update"]]
    assert max(during) > sampler.samples[0][1] + 48 * MIB
    assert [ms for ms, _ in sampler.samples] == sorted(ms for ms, _ in sampler.samples)


def test_sampler_refuses_to_start_twice() -> None:
    sampler = MemorySampler()
    sampler.start()
    with pytest.raises(RuntimeError, match="called twice"):
        sampler.start()
    sampler.stop()


@pytest.mark.usefixtures("pool")  # as under a memory budget; the C library keeps holes that no tensor fills
def test_prediction_is_near_the_measurement(tmp_path: Path) -> None:
    timeline = MemoryTimeline(dirpath=tmp_path)
    fit(Net(width=128), data=loader(2, batch=16384), callbacks=[timeline])
    (step,) = timeline.steps
    assert step.step == 1
    numbers = step.metrics()
    assert numbers["predicted_peak_bytes"] > 75 * MIB
    assert numbers["measured_peak_bytes"] == pytest.approx(numbers["predicted_peak_bytes"], rel=0.25)
    assert [path.name for path in timeline.files] == ["epoch-0-step-1.png"]
    assert timeline.files[0].read_bytes()[:4] == b"\x89PNG"


def test_prediction_under_a_budget_is_the_plans(splits: None) -> None:
    timeline, module, plain = MemoryTimeline(png=False), ShallowNet(), ShallowNet()
    logger = support.Notes()
    fit(plain)
    done = fit(module, MemoryBudgetStrategy(SHALLOW), callbacks=[timeline], logger=logger)
    assert_planned(timeline, done)
    assert_close(plain, module)
    rows = [line for line in logger.lines if "memory/predicted_peak_bytes" in line]
    peak_bytes = report_of(done).shapes[0].choice.peak_bytes
    assert [row["memory/predicted_peak_bytes"] for row in rows] == [peak_bytes]
    assert timeline.report()["predicted_peak_bytes"] == peak_bytes


class ByHand(Net):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any) -> None:  # type: ignore[override]
        optimizer, schedule = self.optimizers(), self.lr_schedulers()
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        optimizer.step()
        schedule.step()

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)]


class Counts(Net):
    calls = 0

    def training_step(self, batch: Any) -> Any:  # type: ignore[override]
        Counts.calls += 1
        return self.loss(batch)


def test_the_dry_run_leaves_schedules_and_names_alone() -> None:
    timelines = [MemoryTimeline(png=False, every_n_steps=1) for _ in range(2)]
    assert fit(Counts(), callbacks=timelines[:1], accumulate_grad_batches=1).global_step == Counts.calls
    assert all(step.predicted for step in timelines[0].steps)
    module = ByHand()
    steps = fit(module, callbacks=timelines[1:], accumulate_grad_batches=1).global_step
    assert module.lr_schedulers().get_last_lr() == [0.1 * 0.5**steps]  # type: ignore[union-attr]
    assert timelines[1].steps
    assert all("manual optimization" in step.note for step in timelines[1].steps)


class Reads(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.log("loss", loss.item())
        return loss


def test_a_step_that_reads_values_is_measured_all_the_same() -> None:
    timeline, plain, module = MemoryTimeline(png=False, every_n_steps=1), Reads(), Reads()
    fit(plain)
    fit(module, callbacks=[timeline], accumulate_grad_batches=1)
    assert_close(plain, module, 0)
    assert len(timeline.steps) == 2
    assert all("reads the value" in step.note and not step.predicted for step in timeline.steps)


def test_goes_to_other_processes() -> None:
    """``ddp_spawn`` pickles callbacks, before the first fit and after it."""
    timeline = MemoryTimeline(every_n_steps=1, png=False, warm_up=0)
    for fits in (1, 2):
        timeline = pickle.loads(pickle.dumps(timeline))
        fit(ShallowNet(), callbacks=[timeline])
        assert len(timeline.steps) == 3 * fits


class Stops(ShallowNet):
    """Ends an epoch before its second batch, which callbacks have seen."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        return -1 if batch_idx == 1 else None


def test_holds_no_batch_of_a_step_that_was_left() -> None:
    timeline = MemoryTimeline(every_n_steps=1, png=False, warm_up=0)
    fit(Stops(), callbacks=[timeline])
    assert not tensors_in(list(vars(timeline).values()))
    assert len(timeline.steps) == 1


class Pair:
    """A batch that only a hook can cut."""

    def __init__(self, inputs: Tensor, labels: Tensor) -> None:
        self.inputs, self.labels = inputs, labels


def cut(batch: Pair, sub_batch: int) -> list[Pair]:
    return [Pair(*part) for part in zip(batch.inputs.split(sub_batch), batch.labels.split(sub_batch), strict=True)]


class Paired(ShallowNet):
    def training_step(self, batch: Pair, batch_idx: int) -> Tensor:
        return self.loss((batch.inputs, batch.labels))


def test_predicts_what_was_planned_for_batches_with_a_hook(splits: None) -> None:
    batches = [Pair(*batch) for batch in loader(2)]
    data = DataLoader(batches, batch_size=None, collate_fn=lambda batch: batch)  # type: ignore[arg-type]
    timeline = MemoryTimeline(png=False)
    done = fit(Paired(), MemoryBudgetStrategy(SHALLOW, split_batch=cut), data=data, callbacks=[timeline])
    assert_planned(timeline, done)


def test_predicts_what_was_planned_with_accumulation(offloads: None) -> None:
    timeline = MemoryTimeline(png=False)
    done = fit(ShallowNet(), MemoryBudgetStrategy(SHALLOW), loader(4), callbacks=[timeline], accumulate_grad_batches=2)
    assert_planned(timeline, done)


def assert_planned(timeline: MemoryTimeline, done: Trainer) -> None:
    (step,), (shape,) = timeline.steps, report_of(done).shapes
    assert not step.note
    assert step.plan == str(shape.choice.plan)
    assert step.metrics()["predicted_peak_bytes"] == shape.choice.peak_bytes
