"""While training goes on sub-batches compute something else than what was examined, or samples become larger."""

import tempfile
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import retime.mechanisms.memory_budget.planner as step_planner
from retime.foundations.messages import DifferenceWarning, NoEffectWarning
from retime.mechanisms.memory_budget.offload.hosts import parse_host
from retime.mechanisms.memory_budget.step import BudgetedStep

pytestmark = pytest.mark.usefixtures("splits")
WIDTH, DEPTH, SAMPLES = 16, 4, 32


class Trained:
    """A network in a bare loop, inside a budget or not."""

    def __init__(self, budget: int | None, **options: Any) -> None:
        torch.manual_seed(0)
        layers = [layer for _ in range(DEPTH) for layer in (nn.Linear(WIDTH, WIDTH), nn.Tanh())]
        self.net = nn.Sequential(*layers, nn.Linear(WIDTH, 4))
        self.extra: list[nn.Module] = []
        self.contrast = False
        self.how: dict[str, Any] = {}
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.1)
        self.budget: BudgetedStep | None = None
        if budget is not None:
            host = parse_host(f"disk:{tempfile.gettempdir()}", "cpu")
            self.budget = BudgetedStep(self.net, [self.optimizer], budget, host, **options)

    def loss(self, batch: Any) -> Tensor:
        hidden = self.net[:-1](batch[0])
        for layer in self.extra:
            hidden = layer(hidden)
        loss = F.cross_entropy(self.net[-1](hidden), batch[1], **self.how)
        if self.contrast:
            loss = loss - (hidden - hidden.mean(0)).square().mean()
        return loss

    def step(self, batch: Any) -> float:
        self.optimizer.zero_grad()
        if self.budget is None:
            loss = self.loss(batch)
            loss.backward()  # type: ignore[no-untyped-call]
        else:
            loss = self.budget.run(self.loss, batch)
        self.optimizer.step()
        return float(loss.detach())


@pytest.fixture
def trained() -> Iterator[Any]:
    runs: list[Trained] = []

    def make(budget: int | None, **options: Any) -> Trained:
        runs.append(Trained(budget, **options))
        return runs[-1]

    yield make
    for one in runs:
        if one.budget is not None:
            one.budget.remove()


def batches(count: int) -> list[Any]:
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(SAMPLES, WIDTH, generator=generator), torch.randint(4, (SAMPLES,), generator=generator))
        for _ in range(count)
    ]


FITS_IN_PARTS = 17_500  # the plain step needs 19,500


@pytest.mark.parametrize("options", [{}, {"make_plan": step_planner.StepPlanner.make}], ids=["ours", "own planner"])
def test_a_loss_that_is_no_sum_from_some_step_on_is_told_and_planned_anew(trained: Any, options: Any) -> None:
    ours, plain = trained(FITS_IN_PARTS, **options), trained(None)
    first, second, third = batches(3)
    for one in (ours, plain):
        one.step(first)
    assert ours.budget.report().sub_batches > 1
    for one in (ours, plain):
        one.contrast = True
    with pytest.warns(
        NoEffectWarning, match="from this batch on .* give the batch's gradient: .* influence one another"
    ):
        loss = ours.step(second)
    assert loss == pytest.approx(plain.step(second), rel=1e-6)
    assert ours.step(third) == pytest.approx(plain.step(third), rel=1e-5)
    report = ours.budget.report()
    assert report.plans == 2
    assert report.shapes[-1].choice.plan.sub_batch == SAMPLES


SKEWED = torch.tensor([0.1, 1.0, 5.0, 0.5])


@pytest.mark.parametrize(
    ("before", "after", "plans"),
    [
        ({}, {"reduction": "sum"}, 2),
        pytest.param({"reduction": "sum"}, {}, 2, marks=pytest.mark.long),
        ({}, {"ignore_index": 0}, 2),
        pytest.param({"ignore_index": 1}, {"ignore_index": 2}, 2, marks=pytest.mark.long),
        pytest.param({}, {"weight": SKEWED}, 2, marks=pytest.mark.long),
        ({"ignore_index": 1}, {"weight": SKEWED, "ignore_index": 1}, 2),
    ],
)
def test_a_loss_that_is_taken_otherwise_from_some_step_on_is_right_at_once(
    trained: Any, before: dict[str, Any], after: dict[str, Any], plans: int
) -> None:
    ours, plain = trained(FITS_IN_PARTS), trained(None)
    state = torch.get_rng_state()
    for index, batch in enumerate(batches(4)):
        for one in (ours, plain):
            one.how = before if index < 2 else after
            one.optimizer.param_groups[0]["lr"] = 0.01
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                one.step(batch)
            texts = [str(warning.message) for warning in caught]
            assert len(texts) == (one is ours and index == 2) * (plans - 1), texts
            assert all("from this batch on" in text and "no longer give the batch's gradient" in text for text in texts)
        for left, right in zip(ours.net.parameters(), plain.net.parameters(), strict=True):
            assert torch.allclose(left, right, rtol=1e-4, atol=1e-6), index
    assert torch.equal(state, torch.get_rng_state())
    report = ours.budget.report()
    assert (report.steps, report.plans) == (4, plans)
    assert report.sub_batches > 4


def test_another_path_that_is_as_separable_keeps_the_plan(trained: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    examined = []
    real = step_planner.certify
    monkeypatch.setattr(step_planner, "certify", lambda *a, **o: examined.append(1) or real(*a, **o))
    ours, plain = trained(FITS_IN_PARTS), trained(None)
    for one in (ours, plain):
        one.net[0].register_buffer("seen", torch.zeros(()))
        one.net[0].register_forward_pre_hook(lambda net, inputs: net.seen.add_(len(inputs[0])) and None)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for index, batch in enumerate(batches(6)):
            for one in (ours, plain):
                one.extra = [nn.Tanh()] if index >= 2 else []
                one.step(batch)
    assert len(examined) == 2, "for the plan, and once for the other path"
    assert ours.net[0].seen == plain.net[0].seen == 6 * SAMPLES, "also where a part was stopped, and began again"
    assert ours.budget.report().plans == 1
    for left, right in zip(ours.net.parameters(), plain.net.parameters(), strict=True):
        assert torch.allclose(left, right, rtol=1e-4, atol=1e-6)


def test_paths_that_change_with_every_batch_are_warned_of_once(trained: Any) -> None:
    ours = trained(FITS_IN_PARTS)

    def train() -> None:
        for index, batch in enumerate(batches(8)):
            ours.extra = [nn.Tanh()] * index
            ours.step(batch)

    with pytest.warns(DifferenceWarning, match="another path through the model from batch to batch. 4 were") as caught:
        train()
    assert len(caught) == 1
    ((entry,),) = ours.budget._plans.book._entries.values()
    assert len(entry.paths._known) == 4


def cut(batch: Any, size: int) -> list[Any]:
    """Graphs: the nodes of all on one another, and how many each has."""
    nodes, counts, targets = batch
    ends = [0, *counts.cumsum(0).tolist()]
    return [
        (nodes[ends[at] : ends[min(at + size, len(counts))]], counts[at : at + size], targets[at : at + size])
        for at in range(0, len(counts), size)
    ]


def graphs(count: int, nodes: int) -> Any:
    return torch.randn(count * nodes, WIDTH), torch.full((count,), nodes), torch.arange(count) % 4


def graph_loss(ours: Any) -> Any:
    def loss(batch: Any) -> Tensor:
        nodes, counts, targets = batch
        of = torch.repeat_interleave(torch.arange(len(counts)), counts, output_size=len(nodes))
        summed = torch.zeros(len(counts), 4).index_add(0, of, ours.net(nodes))
        return F.cross_entropy(summed, targets)

    return loss


def test_larger_samples_under_a_split_hook_are_planned_anew(trained: Any) -> None:
    ours = trained(150_000, split=cut, loss_weight=lambda part: len(part[-1]))
    for nodes, plans in ((4, 1), (2, 1), (100, 2), (4, 2), (100, 2)):
        ours.optimizer.zero_grad()
        ours.budget.run(graph_loss(ours), graphs(16, nodes))
        assert ours.budget.report().plans == plans, f"{nodes} nodes a graph"
    small, large = ours.budget.report().shapes[-2:]
    assert large.choice.peak_bytes > 1.5 * small.choice.peak_bytes
    assert large.choice.peak_bytes <= 150_000


@pytest.mark.parametrize(("dry_run", "budget"), [("auto", 150_000), ("off", 250_000)])
def test_batches_of_more_nodes_and_of_more_graphs_take_turns_by_two_plans(
    trained: Any, dry_run: Any, budget: int
) -> None:
    ours = trained(budget, split=cut, loss_weight=lambda part: len(part[-1]), dry_run=dry_run)
    for count, nodes in ((16, 40), (8, 100)) * 3:
        ours.optimizer.zero_grad()
        ours.budget.run(graph_loss(ours), graphs(count, nodes))
    assert [shape.samples for shape in ours.budget.report().shapes] == [16, 8]
    assert ours.budget.report().plans == 2


def rows(batch: Any, size: int) -> list[Any]:
    inputs, targets = batch[0].to_dense(), batch[1]
    return [(inputs[at : at + size].to_sparse(), targets[at : at + size]) for at in range(0, len(targets), size)]


def test_sparse_batches_have_sizes_too(trained: Any) -> None:
    """Their tensors know no number of bytes."""
    ours = trained(10_000_000, split=rows)
    (inputs, targets), *_ = batches(1)
    given = [(torch.where(inputs > least, inputs, 0.0).to_sparse(), targets) for least in (1.0, 1.0, -9.0)]
    for batch, plans in zip(given, (1, 1, 2), strict=True):
        ours.optimizer.zero_grad()
        ours.budget.run(lambda part: F.cross_entropy(ours.net(part[0].to_dense()), part[1]), batch)
        assert ours.budget.report().plans == plans
