"""MemoryTimeline between fits and processes: what it holds, and what it can predict."""

import pickle
from typing import Any

from lightning.pytorch import Trainer
from torch import Tensor
from torch.utils.data import DataLoader

from retime.callbacks import MemoryTimeline
from retime.foundations.storages import tensors_in
from retime.strategies import MemoryBudgetStrategy
from support import memory_budget as support
from support.memory_budget import SHALLOW, ShallowNet, fit, loader, report_of

pytestmark = support.IGNORED


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
