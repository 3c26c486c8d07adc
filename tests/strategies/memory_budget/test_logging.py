"""What is logged under a memory budget equals what the plain strategy logs: numbers, metrics, values of some parts."""

import re
import warnings
from collections.abc import Iterable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import Callback, Trainer
from torch import Tensor, nn
from torchmetrics import MaxMetric, MeanMetric, MetricCollection
from torchmetrics.classification import MulticlassAccuracy, MulticlassF1Score, MulticlassPrecision
from torchmetrics.regression import MeanSquaredError, R2Score
from torchmetrics.wrappers import ClasswiseWrapper, Running

from retime.foundations.messages import DifferenceWarning
from retime.strategies import MemoryBudgetStrategy
from support import memory_budget as support
from support.memory_budget import (
    CLASSES,
    OFFLOAD_LATER,
    SHALLOW,
    SMALL,
    Net,
    ShallowNet,
    assert_close,
    assert_same,
    assert_way,
    fit,
    loader,
    report_of,
)

pytestmark = support.IGNORED


MARK = 3.5


class Seen(Callback):
    """What callbacks and loggers see after each batch, and at the end of each epoch."""

    def __init__(self) -> None:
        self.rows: list[dict[str, float]] = []

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        kinds = {"callback": trainer.callback_metrics, "logged": trainer.logged_metrics}
        self.rows.append({f"{kind} {name}": float(value) for kind, row in kinds.items() for name, value in row.items()})

    on_train_epoch_end = on_train_batch_end


def rows_of(
    make: Any, strategy: Any, marked: Iterable[int], batches: int = 3, **options: Any
) -> tuple[list[dict[str, float]], Any]:
    data = loader(batches, extra=19)
    inputs = data.dataset.tensors[0]  # type: ignore[attr-defined]
    for position in marked:
        inputs[position :: support.BATCH, 0] = MARK
    seen, logger = Seen(), support.Notes()
    done = fit(make(), strategy, data=data, logger=logger, callbacks=[seen], max_epochs=2, **options)
    return [*seen.rows, *logger.lines, {k: float(v) for k, v in done.callback_metrics.items()}], done


def compare(
    make: Any, way: str, marked: Iterable[int] = (), budget: int = SHALLOW, **options: Any
) -> tuple[list[str], Any]:
    """Everything logged is the same as under the plain strategy, and so are the weights.

    Args:
        marked: samples of each batch whose first input is ``MARK``. Parts begin at 0, 86 and 171.

    Returns:
        What was warned of, and what was trained.
    """
    plain, one = rows_of(make, "auto", marked, **options)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", DifferenceWarning)
        ours, done = rows_of(make, MemoryBudgetStrategy(budget), marked, **options)
    report = report_of(done)
    assert_way(report, way)
    assert (len(report.shapes), report.replanned) == (1, {})  # real steps save what the dry run said
    assert_same(one.lightning_module, done.lightning_module, way)
    assert [set(row) for row in ours] == [set(row) for row in plain]
    for left, right in zip(plain, ours, strict=True):
        assert right == pytest.approx(left, rel=2e-5, abs=1e-6, nan_ok=True)
    return [str(told.message) for told in caught if issubclass(told.category, DifferenceWarning)], done.lightning_module


class Logs(ShallowNet):
    """Logs numbers in many ways."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        logits = self.net(batch[0])
        loss = F.cross_entropy(logits, batch[1])
        self.log("both", loss, on_step=True, on_epoch=True, prog_bar=True)
        self.log("sum", (logits.argmax(1) == batch[1]).sum().float(), on_step=True, on_epoch=True, reduce_fx="sum")
        self.log("epoch", loss.detach().square() * 0 + logits.detach().mean(), on_step=False, on_epoch=True)
        self.log("constant", 3.0, True, False)
        self.log_dict({"a": loss, "b": logits.detach().sum()}, on_step=True, on_epoch=True)
        return loss


class Measured(ShallowNet):
    """Logs torchmetrics objects; ``large`` makes their arguments too big to be kept for a batch."""

    def __init__(self, large: bool = False) -> None:
        super().__init__()
        self.net, self.large = Net().net if large else self.net, large
        self.f1 = MulticlassF1Score(CLASSES)
        self.logged_value = MulticlassPrecision(CLASSES)
        self.updated = MulticlassAccuracy(CLASSES)
        self.mean = MeanMetric()
        self.largest = MaxMetric()
        self.recent = Running(MeanMetric(), window=2)
        self.each = ClasswiseWrapper(MulticlassAccuracy(CLASSES, average=None))
        self.some = MetricCollection([MulticlassAccuracy(CLASSES), MulticlassF1Score(CLASSES)], prefix="some_")

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        logits = self.net(batch[0])
        loss = F.cross_entropy(logits, batch[1])
        guess = logits.softmax(1)
        if self.large:
            guess, target = guess.repeat_interleave(6, 0), batch[1].repeat_interleave(6, 0)
        else:
            guess, target = guess.argmax(1), batch[1]
        self.f1(guess, target)
        self.log("f1", self.f1, on_step=True, on_epoch=True)
        self.log("precision", self.logged_value(guess, target), on_step=True)
        self.updated.update(guess, target)
        self.log("accuracy", self.updated, on_step=False, on_epoch=True)
        self.mean(loss)
        self.log("mean", self.mean, on_step=True, on_epoch=True)
        self.largest(loss)
        self.log("largest", self.largest, on_step=True, on_epoch=True)
        self.recent(loss)
        self.log("recent", self.recent, on_step=True, on_epoch=True)
        self.log_dict(self.each(guess, target), on_step=True)
        self.some(guess, target)
        self.log_dict(self.some, on_step=True, on_epoch=True)
        return loss


@pytest.mark.parametrize("accumulated", [pytest.param(1, marks=pytest.mark.long), 2])
@OFFLOAD_LATER
def test_numbers(way: str, accumulated: int) -> None:
    assert compare(Logs, way, batches=2, accumulate_grad_batches=accumulated)[0] == []


LARGE_LATER = pytest.mark.parametrize("large", [False, pytest.param(True, marks=pytest.mark.long)])


@LARGE_LATER
@OFFLOAD_LATER
def test_metrics(way: str, large: bool) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="You are trying to `self.log")
        said, module = compare(lambda: Measured(large), way, budget=SMALL if large else SHALLOW, batches=2)
    assert said == []
    assert "forward" not in module.f1.__dict__, "metrics are left as they were made"
    assert torch.equal(module.f1(torch.arange(4), torch.arange(4)), torch.tensor(1.0))


class LearnsFromMetrics(ShallowNet):
    """Its loss is a metric's value; a correlation of few samples has none."""

    def __init__(self, large: bool) -> None:
        super().__init__()
        self.net, self.large = Net().net if large else self.net, large
        self.error = MeanSquaredError()
        self.r2 = R2Score()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        guess = self.net(batch[0])
        target = F.one_hot(batch[1], CLASSES).float()
        if self.large:
            guess, target = guess.repeat(1, 6), target.repeat(1, 6)
        loss = self.error(guess, target)
        self.log("r2", self.r2(guess[:, 0], target[:, 0]), on_step=True)
        self.log("error", self.error, on_step=True, on_epoch=True)
        return loss


@LARGE_LATER
@OFFLOAD_LATER
def test_a_metric_as_the_loss(way: str, large: bool) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="You are trying to `self.log")
        said, _ = compare(lambda: LearnsFromMetrics(large), way, budget=SMALL + 40_000 if large else SHALLOW, batches=2)
    assert said == []


class Nonlinear(ShallowNet):
    """Logs a number of the batch that no sum of its parts' numbers gives."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        logits = self.net(batch[0])
        self.log("spread", logits.detach().std(), on_step=True)
        return F.cross_entropy(logits, batch[1])


class AlikeAtFirst(ShallowNet):
    """Logs many functions of a batch whose samples have nearly, or with 0 exactly, the same losses at the start."""

    def __init__(self, std: float) -> None:
        super().__init__()
        last = self.net[-1]
        nn.init.normal_(last.weight, std=std)
        nn.init.zeros_(last.bias)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        logits = self.net(batch[0])
        losses = F.cross_entropy(logits, batch[1], reduction="none")
        loss, chances = losses.mean(), logits.softmax(1)
        right = {"loss": loss, "accuracy": (logits.argmax(1) == batch[1]).float().mean(), "constant": 0.5}
        wrong = {"perplexity": loss.exp(), "rms": losses.square().mean().sqrt()}
        wrong |= {"ratio": chances[:, 0].sum() / chances[:, 1].sum(), "largest": losses.max()}
        wrong |= {"spread": logits.detach().std()}
        self.log_dict(right | wrong)
        for name in ("max", "min", "sum"):
            self.log(name, getattr(losses, name)(), reduce_fx=name)
        return loss


@pytest.mark.parametrize("std", [0.02, pytest.param(0.0, marks=pytest.mark.long)])
def test_what_only_looks_like_a_mean_at_the_start_is_named_and_nothing_else(splits: None, std: float) -> None:
    lines, said = [], []
    for strategy in ("auto", MemoryBudgetStrategy(SHALLOW)):
        notes = support.Notes()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", DifferenceWarning)
            run = fit(AlikeAtFirst(std), strategy, logger=notes)
        lines.append(notes.lines)
        said += [str(one.message) for one in caught if one.category is DifferenceWarning]
    assert_way(report_of(run), "sub-batches")
    names = ("largest", "perplexity", "ratio", "rms", "spread")
    assert len(said) == len(names), said
    for name, text in zip(names, said, strict=True):
        assert f"the logged value {name!r} is the mean over sub-batches" in text
    for plain, ours in zip(*lines, strict=True):
        for name in ("loss", "max", "min", "sum"):
            assert ours[name] == pytest.approx(plain[name], rel=1e-5), name


def test_they_are_named_before_the_first_step(splits: None) -> None:
    """Whoever makes errors of warnings, or stops a run that warns, has trained nothing."""
    module, seen = Nonlinear(), support.Steps()
    with warnings.catch_warnings():
        warnings.simplefilter("error", DifferenceWarning)
        with pytest.raises(DifferenceWarning, match="'spread'"):
            fit(module, MemoryBudgetStrategy(SHALLOW), callbacks=[seen])
    assert seen.steps == 0
    assert_close(Nonlinear(), module, 0)


class LogsOften(ShallowNet):
    """Logs in ways that add up, each under names of its own."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        logits = self.net(batch[0])
        each = F.cross_entropy(logits, batch[1], reduction="none")
        loss = each.mean()
        self._log_twice(loss, len(each))
        self._change_later(loss)
        self._log_extremes(logits.detach())
        self._log_sizes(logits, each, loss, batch[1])
        return loss

    def _log_twice(self, loss: Tensor, samples: int) -> None:
        """The last value counts for the step, both for the epoch."""
        for factor in (1.0, 2.0):
            self.log("default", factor * loss)
            self.log("both", factor * loss, on_step=True, on_epoch=True)
            self.log("epoch", factor * loss, on_step=False, on_epoch=True)
            self.log("sized", factor * loss, on_step=True, on_epoch=True, batch_size=samples)
            for reduce_fx in ("sum", "max", "min"):
                self.log(reduce_fx, factor * loss, on_step=True, on_epoch=True, reduce_fx=reduce_fx)
            self.log_dict({"number": factor, "other": loss + factor}, on_step=True, on_epoch=True)

    def _change_later(self, loss: Tensor) -> None:
        """A tensor is logged as it is then."""
        total = loss.detach().clone()
        self.log("total", total, on_step=True, on_epoch=True)
        total += 5
        self.log("total_after", total.reshape(1), on_step=True, on_epoch=True)

    def _log_extremes(self, logits: Tensor) -> None:
        """The largest of all samples is the largest of the parts' largest, which no weighted sum gives."""
        self.log("highest", logits.max(), on_step=True, on_epoch=True, reduce_fx="max")
        self.log("lowest", logits.min(), on_step=True, on_epoch=True, reduce_fx=torch.min)

    def _log_sizes(self, logits: Tensor, each: Tensor, loss: Tensor, target: Tensor) -> None:
        """A batch_size of the user's, of many kinds."""
        valid = target > 1
        count = int(valid.sum())
        few = target == 9  # none has this class
        hits = (logits.argmax(1) == target).sum().float()
        both = {"on_step": True, "on_epoch": True}
        self.log("samples", loss, **both, batch_size=len(each))
        self.log("other_count", loss, **both, batch_size=count)
        self.log("tokens", each[valid].mean(), **both, batch_size=count)
        self.log("tensor", each[valid].mean(), **both, batch_size=valid.sum())
        self.log("no_tokens", loss, on_step=True, on_epoch=True, batch_size=1 + int(few.sum()))
        self.log("setting", loss, **both, batch_size=256)
        self.log("one", loss, False, True, False, True, batch_size=1)
        self.log("hits", hits, **both, reduce_fx="sum", batch_size=len(each))
        self.log("number_of_hits", hits, **both, batch_size=len(each))
        self.log("largest", loss, **both, reduce_fx=max, batch_size=count)
        self.log_dict({"a": each[valid].mean(), "b": each[valid].sum()}, **both, batch_size=count)


@OFFLOAD_LATER
def test_a_name_logged_twice_tensors_that_change_extremes_and_sizes_of_the_users(way: str) -> None:
    assert compare(LogsOften, way)[0] == []


class Masked(ShallowNet):
    """Logs means over marked samples, where there are any, as they should be logged."""

    names: tuple[str, ...] = ("sized",)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        each = F.cross_entropy(self.net(batch[0]), batch[1], reduction="none")
        mask = batch[0][:, 0] == MARK
        for name in self.names if mask.any() else ():
            size = {"batch_size": int(mask.sum())} if name == "sized" else {}
            self.log(name, each.detach()[mask].mean(), on_step=True, on_epoch=True, **size)
            self.log(name, 2 * each.detach()[mask].mean(), on_step=True, on_epoch=True, **size)
        return each.mean()


class MaskedWithoutSize(Masked):
    """Logs them without their batch size as well."""

    names = ("sized", "masked")


IN_TWO = [*range(0, 80, 2), *range(250, 256, 2)]
LATER = pytest.param([0, 1, 3, 100, 110], marks=pytest.mark.long, id="0 and 1")


def assert_weighed(said: list[str]) -> None:
    assert len(said) == 2  # a call
    assert all("the logged value 'sized" in message and "weighted by the batch_size" in message for message in said)


@pytest.mark.parametrize("marked", [LATER, pytest.param(IN_TWO, id="0 and 2")])
@OFFLOAD_LATER
def test_what_some_parts_log_is_weighed_by_its_batch_size(way: str, marked: list[int]) -> None:
    said, _ = compare(Masked, way, marked)
    if way == "offload" or marked is IN_TWO:  # a certificate has seen how these add up
        assert said == []
        return
    assert_weighed(said)


@pytest.mark.parametrize("marked", [[0, 3], [100]])
@OFFLOAD_LATER
def test_what_one_part_logs_is_the_batchs(way: str, marked: list[int]) -> None:
    said, _ = compare(MaskedWithoutSize, way, marked)
    if way == "offload":
        assert said == []
        return
    masked = [one for one in said if "'masked" in one]
    assert len(masked) == 2
    if marked == [100]:  # not among the samples that are examined
        assert any("'masked' was logged by some sub-batches only, and is the mean over those" in one for one in masked)
    assert_weighed([one for one in said if one not in masked])


class Counts(ShallowNet):
    """Numbers that are sums, where there is anything to add."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        mask = batch[0][:, 0] == MARK
        if mask.any():
            self.log("marked", mask.sum().float(), on_step=True, on_epoch=True, reduce_fx="sum")
        return self.loss(batch)


@OFFLOAD_LATER
def test_a_sum_that_some_parts_log(way: str) -> None:
    said, _ = compare(Counts, way, [100, 101, 200])
    assert len(said) == (1 if way == "sub-batches" else 0)
    assert all("is the sum over those" in message for message in said)


class RareHits(ShallowNet):
    """Counts what is not among the samples that are examined; nothing tells such a count from a mean."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        marked = batch[0][:, 0] == MARK
        count = marked.sum().float()
        self.log("sum", count, on_step=True, on_epoch=True, reduce_fx="sum")
        self.log("mean", count / len(batch[0]), on_step=True, on_epoch=True)
        self.log("zero", (batch[0][:, 0] == MARK + 1).sum().float(), on_step=True)
        self.log("setting", float(batch_idx), on_step=True)
        # what each part of a batch gives alike once there is anything, but is no mean
        self.log("any", marked.any().float(), on_step=True, reduce_fx="max")
        self.log("none", (~marked).all().float(), on_step=True, reduce_fx="min")
        return self.loss(batch)


@OFFLOAD_LATER
def test_what_was_0_or_the_same_when_it_was_examined_is_said(way: str) -> None:
    said, _ = compare(RareHits, way, [100, 101, 200])
    if way == "offload":
        assert said == []
        return
    of = {name: [one for one in said if f"{name!r}" in one] for name in ("sum", "mean", "any", "none")}
    kinds = {"sum": "sum", "mean": "mean", "any": "maximum", "none": "minimum"}
    for name, kind in kinds.items():
        assert [f"{name!r} is the {kind} over" in one for one in of[name]] == [True]
    assert all("it was 0 in all samples that were examined" in one for one in of["sum"] + of["mean"])
    assert len(said) == 4, said


class WarmsUp(ShallowNet):
    """Its loss is a sum, and a factor that it logs is 0 when it is examined."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("factor", 0.5 * batch_idx, on_step=True, on_epoch=True)
        return 1e-3 * F.cross_entropy(self.net(batch[0]), batch[1], reduction="sum")


@OFFLOAD_LATER
def test_a_factor_that_was_0_when_it_was_examined(way: str) -> None:
    assert compare(WarmsUp, way)[0] == []


class MeasuredSometimes(ShallowNet):
    """Metrics that see marked samples only."""

    def __init__(self) -> None:
        super().__init__()
        self.accuracy, self.value = MulticlassAccuracy(CLASSES), MulticlassAccuracy(CLASSES)
        self.mean, self.largest = MeanMetric(), MaxMetric()
        self.recent = Running(MeanMetric(), window=2)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        logits = self.net(batch[0])
        loss = F.cross_entropy(logits, batch[1])
        mask = batch[0][:, 0] == MARK
        if mask.any():
            guess, target = logits.detach().argmax(1)[mask], batch[1][mask]
            some = F.cross_entropy(logits.detach()[mask], target)
            both = {"on_step": True, "on_epoch": True}
            self.accuracy(guess, target)
            self.log("accuracy", self.accuracy, **both)
            self.log("value", self.value(guess, target), **both, batch_size=len(target))
            for metric, name in ((self.mean, "mean"), (self.largest, "largest"), (self.recent, "recent")):
                metric(some)
                self.log(name, metric, **both)
        return loss


@OFFLOAD_LATER
def test_metrics_that_see_some_parts_only(way: str) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="You are trying to `self.log")
        said, _ = compare(MeasuredSometimes, way, [100, 101, 102, 103])
    assert len(said) == (3 if way == "sub-batches" else 0)  # the numbers that metrics are given
    assert all("a number that training_step gives to a metric" in message for message in said)


class Doubtful(ShallowNet):
    """A size that is neither a sum over parts nor the same for all; a Python number that is 0 in what is examined."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        size = 1 + int(batch[0][:, 1].abs().max() * 100)
        self.log("step", loss, batch_size=size)
        self.log("epoch", loss, on_step=False, on_epoch=True, batch_size=size)
        self.log("hits", int((batch[0][:, 0] == MARK).sum()), on_step=True)  # later the same in each part
        return loss


def test_a_batch_size_that_does_not_add_up_and_a_number_read_from_a_tensor_are_said(splits: None) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", DifferenceWarning)
        rows_of(Doubtful, MemoryBudgetStrategy(SHALLOW), [20, 100, 200])
    said = [str(one.message) for one in caught if issubclass(one.category, DifferenceWarning)]
    assert len(said) == 2
    assert any("'epoch' is weighted in an epoch's mean by the sum" in one for one in said)
    assert any(re.search("'hits' is the mean over .* it was 0 in all samples that were examined", one) for one in said)


class Undetached(ShallowNet):
    """Logs reductions with their graphs, which take no part in the loss."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        output = self.net(batch[0])
        self.log("norm", output.norm())
        self.log("squares", output.square().mean())
        return F.cross_entropy(output, batch[1])


def test_logged_graphs_of_their_own_change_no_plan(offloads: None) -> None:
    rows = {}
    for name, strategy in {"plain": "auto", "ours": MemoryBudgetStrategy(SHALLOW)}.items():
        rows[name], done = rows_of(Undetached, strategy, ())
    assert rows["ours"] == rows["plain"]
    report = report_of(done)
    assert (report.plans, report.replanned) == (1, {})
    assert report.offload.storages > 0
