"""The memory budget on two gloo ranks: the same weights as DDP's, one reduction a step, one refusal for all ranks."""

import warnings
from contextlib import nullcontext
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from torchmetrics.classification import MulticlassAccuracy

from retime.callbacks import MemoryTimeline
from retime.foundations.messages import NoEffectWarning
from retime.mechanisms.memory_budget.planner import StepPlanner
from retime.schedules.budget import BudgetError
from retime.strategies import MemoryBudgetDDPStrategy
from support import memory_budget as support
from support.memory_budget import (
    BATCH,
    CLASSES,
    FEATURES,
    OFFLOADS,
    SPLITS,
    TINY,
    Looks,
    Net,
    assert_close,
    assert_way,
    norm,
)
from support.memory_budget_ranks import (
    SMALL,
    batches,
    budgeted,
    fit,
    groups,
    on_two_ranks,
    other_backend,
    plan_with,
    report,
    served,
)
from support.ranks import RANK

pytestmark = support.IGNORED  # of what runs in this process
TINY_ON_RANKS = 70_000  # below the floor of whole batches
PLAIN: dict[str, Any] = {}  # fits under ddp, which several checks compare with


def compare(
    make: Any = Net, data: Any = None, tolerance: float = 0.0, ddp: dict[str, Any] | None = None, **options: Any
) -> tuple[Trainer, Trainer]:
    """Fit under ddp and under the budget; weights agree, and logged values too."""
    given = make, data, ddp, options
    if repr(given) not in PLAIN:
        plain = make()
        PLAIN[repr(given)] = given, plain, fit(plain, DDPStrategy(**ddp or {}), data, **options)
    _, plain, one = PLAIN[repr(given)]
    ours = make()
    two = fit(ours, MemoryBudgetDDPStrategy(SMALL, **ddp or {}), data, **options)
    assert_close(plain, ours, tolerance)
    assert one.callback_metrics.keys() == two.callback_metrics.keys()
    for name, value in one.callback_metrics.items():
        assert torch.allclose(value, two.callback_metrics[name], rtol=tolerance, atol=0), name
    return one, two


class Logs(Net):
    """Logs across ranks, in each step and at the end of the epoch; shallow, as it is planned for again and again."""

    def __init__(self) -> None:
        super().__init__(depth=4)
        self.accuracy = MulticlassAccuracy(CLASSES)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        logits = self.net(batch[0])
        loss = nn.functional.cross_entropy(logits, batch[1])
        self.accuracy(logits, batch[1])
        self.log("accuracy", self.accuracy, on_step=True, on_epoch=True)
        self.log("loss", loss, sync_dist=True, on_step=True, on_epoch=True, batch_size=len(batch[0]))
        return loss


class Measures(Logs):
    """Metrics with arguments that are too large to be kept: of each rank's batch, and of all ranks' batches."""

    def __init__(self) -> None:
        super().__init__()
        self.own = MulticlassAccuracy(CLASSES)
        self.over_all = MulticlassAccuracy(CLASSES, dist_sync_on_step=True)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        with torch.no_grad():
            logits = self.net(batch[0])
        guess, target = logits.repeat_interleave(6, 0), batch[1].repeat_interleave(6, 0)
        self.own(guess, target)
        self.log("own", self.own, on_step=True, on_epoch=True)
        self.log("over_all", self.over_all(guess, target), on_step=True)
        return super().training_step(batch, batch_idx)


VIEWS = {"gradient_as_bucket_view": True, "bucket_cap_mb": 0.002}


OPTIONS: list[dict[str, Any]] = [
    {"ddp": VIEWS, "accumulate_grad_batches": 2, "gradient_clip_val": 0.01},
    {"ddp": {"find_unused_parameters": True}},
]


@on_two_ranks
def test_offload_keeps_the_bits() -> None:
    plan_with(OFFLOADS)
    for options in [*OPTIONS, {"ddp": {"static_graph": True}}]:
        _, ours = compare(Logs, **options)
        assert_way(report(ours), "offload")
        assert report(ours).steps == 3


@on_two_ranks
def test_sub_batches_add_up() -> None:
    plan_with(SPLITS)
    for options in OPTIONS:
        _, ours = compare(Logs, tolerance=1e-5, **options)
        assert report(ours).sub_batches > report(ours).steps == 3
        assert report(ours).shapes[0].choice.peak_bytes <= SMALL


@on_two_ranks
def test_ranks_that_plan_differently() -> None:
    plan_with(SPLITS)
    _, ours = compare(Measures, batches([[256, 16, 256, 256], [16, 256, 16, 300]][RANK]), 1e-5)
    printed = report(ours)
    assert printed.steps == 4
    parts = [one.samples > one.choice.plan.sub_batch for one in printed.shapes]
    assert True in parts, printed  # both ranks have a batch that has to be split, each at another step
    counts = torch.tensor([printed.sub_batches])
    both = [torch.zeros_like(counts) for _ in range(2)]
    dist.all_gather(both, counts)
    assert int(both[0]) != int(both[1])


class Reductions(Callback):
    """Counts the gradient buckets that leave."""

    buckets = steps = 0

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        model: Any = trainer.strategy.model

        model.register_comm_hook(None, lambda _, bucket: self._counted(bucket))

    def _counted(self, bucket: Any) -> Any:
        self.buckets += 1
        return allreduce_hook(None, bucket)

    def on_before_optimizer_step(self, *_: Any) -> None:
        self.steps += 1


@on_two_ranks
def test_gradients_are_reduced_once_a_step() -> None:
    plan_with(SPLITS)
    for accumulated in (1, 3):
        seen = Reductions()
        done = fit(Net(), MemoryBudgetDDPStrategy(SMALL), callbacks=[seen], accumulate_grad_batches=accumulated)
        assert report(done).sub_batches > report(done).steps
        assert seen.buckets == seen.steps == 3 // accumulated


class Buffered(Net):
    """Rank 0's buffer is the one that counts."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("offset", torch.full((FEATURES,), float(RANK)))

    def loss(self, batch: Any) -> torch.Tensor:
        return super().loss((batch[0] + self.offset, batch[1]))


@on_two_ranks
def test_epochs_without_a_backward_pass() -> None:
    """Buffers are sent as ever, in epochs that train and in one that does not."""
    plan_with(SPLITS)
    _, ours = compare(Buffered, tolerance=1e-5, callbacks=[Looks()], max_epochs=3)
    assert report(ours).sub_batches > report(ours).steps == 9


class Skips(Net):
    """Means over samples that count; those that do not are at the end of each batch."""

    def loss(self, batch: Any) -> torch.Tensor:
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1], ignore_index=-100)


@on_two_ranks
def test_a_last_part_without_a_loss() -> None:
    plan_with(SPLITS)
    torch.manual_seed(RANK)
    own = []
    for counted in [(40, 200, 256), (256, 30, 200)][RANK]:  # only one rank has parts after its last loss, in turn
        labels = torch.randint(CLASSES, (BATCH,))
        labels[counted:] = -100
        own.append((torch.randn(BATCH, FEATURES), labels))

    class Both(Buffered, Skips):
        pass

    _, ours = compare(Both, served(own), 1e-5)
    assert report(ours).sub_batches > 3


class Changes(Net):
    """Another loss from the second batch on, on some ranks."""

    def __init__(self, ranks: tuple[int, ...] = (0, 1)) -> None:
        super().__init__()
        self.ranks = ranks
        self.register_buffer("seen", torch.zeros(1))  # a model with buffers, which DDP sends

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.another(batch) if batch_idx and RANK in self.ranks else self.loss(batch)

    def another(self, batch: Any) -> Any:
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1], reduction="sum") / 300


class Weighs(Changes):
    """It cannot be split any more."""

    def another(self, batch: Any) -> Any:
        weight = torch.tensor([0.1, 1.0, 5.0, 0.5])
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1], weight=weight)


@on_two_ranks
def test_what_changes_in_mid_run_is_right_at_once() -> None:
    plan_with(SPLITS)
    for kind, ranks in ((Changes, (0, 1)), (Changes, (1,)), (Weighs, (1,))):
        changes = RANK in ranks
        with pytest.warns(NoEffectWarning, match="from this batch on .* It runs again") if changes else nullcontext():
            _, ours = compare(partial(kind, ranks), tolerance=1e-5)
        assert report(ours).steps == 3
        assert report(ours).sub_batches > 3


class WeighsFew(Weighs):
    """Labels of -100 count for nothing."""

    def another(self, batch: Any) -> Any:
        weight = torch.tensor([0.1, 1.0, 5.0, 0.5])
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1], weight=weight, ignore_index=-100)


@on_two_ranks
def test_a_first_part_that_reduces_begins_again() -> None:
    """Only the first part has labels, so that its forward pass is the one that DDP prepares its reduction in."""
    plan_with(SPLITS)
    torch.manual_seed(RANK)
    own = []
    for counted in (BATCH, 40 if RANK else BATCH, BATCH, BATCH):
        labels = torch.randint(CLASSES, (BATCH,))
        labels[::3] = labels[counted:] = -100
        own.append((torch.randn(BATCH, FEATURES), labels))
    said = pytest.warns(NoEffectWarning, match="from this batch on .* It runs again") if RANK else nullcontext()
    with said:
        compare(partial(WeighsFew, (1,)), served(own), 1e-5)


@on_two_ranks
def test_a_rank_that_has_no_plan_any_more_ends_after_a_whole_batch() -> None:
    plan_with(SPLITS)
    stopped = []

    class Seen(Callback):
        def on_train_batch_end(self, trainer: Trainer, module: Any, *_: Any) -> None:
            stopped.append([parameter.detach().clone() for parameter in module.parameters()])

    fit(Weighs((1,)), "ddp", callbacks=[Seen()])
    plain, stopped = stopped, []
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        with pytest.raises(BudgetError):
            fit(Weighs((1,)), MemoryBudgetDDPStrategy(TINY_ON_RANKS), callbacks=[Seen()])
    whole = [one for one in said if "runs whole, outside of its budget" in str(one.message)]
    assert len(whole) == (1 if RANK else 0)
    assert len(stopped) == 2
    for one, two in zip(plain[1], stopped[1], strict=True):
        assert torch.allclose(one, two, rtol=1e-4, atol=1e-7)


class Routed(Net):
    """A layer that only the first samples of a batch go through."""

    def __init__(self) -> None:
        super().__init__()
        self.early = nn.Linear(FEATURES, FEATURES)

    def loss(self, batch: Any) -> torch.Tensor:
        inputs, labels = batch
        early = inputs[:, 0] > 5
        if early.any():
            inputs = torch.where(early[:, None], self.early(inputs), inputs)
        return super().loss((inputs, labels))


def routed() -> DataLoader[Any]:
    torch.manual_seed(RANK)
    own = []
    for _ in range(3):
        inputs = torch.randn(BATCH, FEATURES).clamp(-4, 4)
        inputs[:5, 0] = 6
        own.append((inputs, torch.randint(CLASSES, (BATCH,))))
    return served(own)


@on_two_ranks
def test_a_layer_that_values_choose_keeps_batches_whole() -> None:
    plan_with(SPLITS)
    _, ours = compare(Routed, routed(), 0, {"find_unused_parameters": True})
    assert report(ours).sub_batches == 3


@on_two_ranks
def test_a_rank_that_refuses_its_budget() -> None:
    plan_with(SPLITS)
    module = Net()
    with pytest.raises(BudgetError, match="below this step's floor" if RANK else "rank 1 refuses its budget") as caught:
        fit(module, MemoryBudgetDDPStrategy([SMALL, 20_000][RANK]))
    assert caught.value.floor_bytes > 20_000
    assert caught.value.layer
    assert_close(Net(), module, 0)
    error = OSError if RANK else RuntimeError
    words = "missing" if RANK else r"rank 1 could not set up its memory budget, see that rank's error: .*missing"
    before = groups()
    with other_backend(), pytest.raises(error, match=words):
        fit(Net(), MemoryBudgetDDPStrategy(SMALL, host=["disk:/tmp", "disk:/missing"][RANK]))
    assert groups() == before


class Gathers(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        total = loss.detach().clone()
        dist.all_reduce(total)
        return loss


@on_two_ranks
def test_what_cannot_be_planned_is_refused() -> None:
    plan_with(SPLITS)
    with pytest.raises(RuntimeError, match="the step calls allreduce on all ranks"):
        fit(Gathers(), MemoryBudgetDDPStrategy(SMALL))
    module = Gathers()
    step = budgeted(DistributedDataParallel(module))
    (batch,) = batches([BATCH])
    with pytest.raises(RuntimeError, match="the step calls allreduce on all ranks"):
        step.run(lambda part: module.training_step(part, 0), batch)
    step.run(module.loss, batch)  # one without
    step.remove()
    with pytest.raises(BudgetError, match="static_graph=True promises DDP"):
        fit(Net(), MemoryBudgetDDPStrategy(TINY, static_graph=True))


@on_two_ranks
def test_batch_norm_offloads_only() -> None:
    plan_with(SPLITS)
    _, ours = compare(lambda: Net(norm))
    assert_way(report(ours), "offload")
    assert report(ours).steps == 3


def _sent() -> int:
    """Collectives so far."""
    group: Any = dist.distributed_c10d._get_default_group()
    return int(group._get_sequence_number_for_group())


@on_two_ranks
def test_planning_communicates_nothing() -> None:
    plan_with(OFFLOADS)
    make, made = StepPlanner.make, []

    def watched(*arguments: Any) -> Any:
        before = _sent()
        made.append(make(*arguments))
        assert _sent() == before
        return made[-1]

    with patch.object(StepPlanner, "make", watched):
        fit(Net(), MemoryBudgetDDPStrategy(SMALL), batches([[256, 256, 256], [16, 256, 256]][RANK]))
    assert len(made) == [1, 2][RANK]
    assert _sent() > 0


@on_two_ranks
def test_timelines_count_buckets() -> None:
    plan_with(SPLITS)
    timeline = MemoryTimeline(png=False, log=False)
    done = fit(Net(), MemoryBudgetDDPStrategy(SMALL), callbacks=[timeline])
    (step,) = timeline.steps
    assert max(held for _, held in step.predicted) == report(done).shapes[0].choice.peak_bytes


class EarlyOnly(support.ShallowNet):
    """From the second batch on a layer is left out in all sub-batches but the first."""

    def __init__(self) -> None:
        super().__init__()
        self.early = nn.Linear(FEATURES, CLASSES)
        self.begins = True

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.begins = True

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        output = self.net(batch[0])
        if batch_idx == 0 or self.begins:
            output = output + self.early(batch[0])
        self.begins = False
        return nn.functional.cross_entropy(output, batch[1])


@pytest.mark.filterwarnings("ignore:.*no longer give the batch's gradient")
def test_ddps_error_says_what_sub_batches_have_to_do_with_it(splits: None) -> None:
    with pytest.raises(RuntimeError, match="parameters that were not used in producing the loss") as caught:
        support.fit(EarlyOnly(), MemoryBudgetDDPStrategy(110_000, process_group_backend="gloo"), data=support.loader(4))
    (note,) = caught.value.__notes__
    assert "only earlier ones use count as unused; find_unused_parameters=True" in note
