"""BatchNorm, epochs without a backward pass, and FuseOptimizer, under a memory budget."""

import contextlib
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import StochasticWeightAveraging
from torch.utils.data import DataLoader
from torchmetrics.classification import MulticlassAccuracy

from retime.callbacks import FuseOptimizer
from retime.foundations.messages import NoEffectWarning
from retime.schedules.budget import BudgetError
from retime.strategies import MemoryBudgetStrategy
from support import memory_budget as support
from support.memory_budget import (
    BATCH,
    CLASSES,
    OFFLOAD_LATER,
    SHALLOW,
    SMALL,
    Looks,
    Net,
    Outputs,
    ShallowNet,
    assert_close,
    assert_same,
    assert_way,
    fit,
    fit_both,
    loader,
    norm,
    report_of,
)

pytestmark = support.IGNORED


def test_batch_norm_offloads_only(splits: None) -> None:
    plain, ours, report = fit_both(lambda: Net(norm), SMALL)
    assert report.sub_batches == 3
    assert report.offload.storages > 0
    assert_close(plain, ours, 0)


GHOST = 22_000  # below the floor of whole batches of 67


def test_batch_norm_below_its_floor_is_refused_by_name(splits: None) -> None:
    with pytest.raises(BudgetError, match=r"BatchNorm in train mode takes its statistics .*: net\.2, net\.5") as caught:
        fit(ShallowNet(norm), MemoryBudgetStrategy(GHOST), data=loader(1, batch=67))
    assert "choose batchnorm='ghost', or a smaller batch" in str(caught.value)


class Sizes(ShallowNet):
    """Remembers the parts it was trained with; what dry runs leave is taken away."""

    def __init__(self) -> None:
        super().__init__(norm)
        self.sizes: list[tuple[int, int]] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.sizes.append((batch_idx, len(batch[0])))
        return self.loss(batch)


def test_ghost_batch_norm_runs_below_that_and_no_part_is_too_small_for_a_variance(splits: None) -> None:
    ours, (data,) = Sizes(), loader(1, batch=67)
    batches = [(data[0][:samples], data[1][:samples]) for samples in (67, 31, 10, 1 + 4 * 3)]
    done = fit(ours, MemoryBudgetStrategy(GHOST, batchnorm="ghost"), data=DataLoader(batches, batch_size=None))  # type: ignore[arg-type]
    sub_batch = report_of(done).shapes[0].choice.plan.sub_batch
    assert sub_batch == 3, "the smallest"
    for index, (inputs, _) in enumerate(batches):
        sizes = [size for number, size in ours.sizes if number == index]
        assert sum(sizes) == len(inputs)
        assert 2 <= min(sizes) <= max(sizes) <= sub_batch
    assert report_of(done).sub_batches == len(ours.sizes)
    assert all(torch.isfinite(value).all() for value in ours.state_dict().values())


class Counts(ShallowNet):
    """Counts samples, and logs."""

    def __init__(self, norm: Any = None) -> None:
        super().__init__(norm)
        self.accuracy = MulticlassAccuracy(CLASSES)
        self.seen = 0

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.seen += len(batch[0])
        logits = self.net(batch[0])
        loss = F.cross_entropy(logits, batch[1])
        self.accuracy(logits, batch[1])
        self.log("accuracy", self.accuracy, on_step=True, on_epoch=True)
        self.log("loss", loss, on_step=True, on_epoch=True)
        return {"loss": loss, "logits": logits.detach()}


def trained(strategy: Any, module: Counts, *callbacks: Callback, epochs: int) -> tuple[Trainer, list[Any]]:
    logger = support.Notes()
    done = fit(module, strategy, callbacks=list(callbacks), logger=logger, max_epochs=epochs)
    return done, logger.lines


@OFFLOAD_LATER
def test_all_parts_run_and_are_logged(way: str) -> None:
    plain, ours = Counts(), Counts()
    shown = [Outputs(), Outputs()]
    _, expected = trained("auto", plain, Looks(), shown[0], epochs=3)
    done, logged = trained(MemoryBudgetStrategy(SHALLOW), ours, Looks(), shown[1], epochs=3)
    assert_way(report_of(done), way)
    assert_same(plain, ours, way)
    assert ours.seen == plain.seen == 3 * 3 * BATCH
    assert len(logged) == len(expected)
    for left, right in zip(expected, logged, strict=True):
        assert right == pytest.approx(left, rel=2e-5)
    for left, right in zip(shown[0].outputs, shown[1].outputs, strict=True):
        assert right["logits"].shape == left["logits"].shape
        assert float(right["loss"]) == pytest.approx(float(left["loss"]), rel=2e-5)


def test_averaged_weights_have_their_statistics(offloads: None) -> None:
    plain, ours = Counts(norm), Counts(norm)
    lines = []
    for module, strategy in ((plain, "auto"), (ours, MemoryBudgetStrategy(110_000))):
        averaging = StochasticWeightAveraging(swa_lrs=0.1, swa_epoch_start=1)
        lines.append(trained(strategy, module, averaging, epochs=2)[1])
    assert_same(plain, ours, "offload")
    assert ours.seen == plain.seen == 3 * 3 * BATCH
    assert lines[1] == lines[0]


@pytest.mark.parametrize(
    ("way", "mode"),
    [
        *(("offload", "backward"), ("sub-batches", "forward")),
        pytest.param("offload", "forward", marks=pytest.mark.long),
        pytest.param("sub-batches", "backward", marks=pytest.mark.long),
    ],
    indirect=["way"],
)
def test_beside_a_budget(way: str, mode: Any) -> None:
    plain, ours, fused = ShallowNet(), ShallowNet(), FuseOptimizer(mode)
    fit(plain)
    aside = pytest.warns(NoEffectWarning, match="several backward passes")
    with aside if mode == "backward" else contextlib.nullcontext():
        done = fit(ours, MemoryBudgetStrategy(SHALLOW), callbacks=[fused])
    assert bool(fused.report().fused_updates) is (mode == "forward")
    assert_way(report_of(done), way)
    assert_same(plain, ours, way)
