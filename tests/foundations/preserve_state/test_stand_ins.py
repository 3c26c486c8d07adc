"""Runs on stand-ins change nothing, however a step reaches what the model holds."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from retime.foundations.preserve_state.stand_ins import Replacement, aliases, copies, fake, stand_ins
from retime.mechanisms.memory_budget.dry_run.run import DryRun, TrainingStep
from retime.mechanisms.memory_budget.offload.hosts import parse_host
from retime.mechanisms.memory_budget.step import BudgetedStep
from retime.schedules.budget import OffloadPlan

SAMPLES, WIDTH = 16, 8


class Holder:
    def __init__(self, weight: Tensor) -> None:
        self.weight = weight
        self.count = 0


class Reaching(nn.Module):
    """Reaches its weight in another way than by its name."""

    def __init__(self, way: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.weight = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.ones(WIDTH))
        weight = self.weight
        self.listed, self.named, self.holder = [weight], {"w": (weight,)}, Holder(weight)
        self.times = partial(torch.mul, weight)
        self.closed = lambda: weight
        ways: dict[str, Callable[[Tensor], Tensor]] = {
            "name": lambda value: value * self.weight,
            "list": lambda value: value * self.listed[0],
            "dict": lambda value: value * self.named["w"][0],
            "partial": lambda value: self.times(value),
            "object": lambda value: value * self.holder.weight,
            "closure": lambda value: value * self.closed(),
        }
        self.way = ways[way]

    def forward(self, value: Tensor) -> Tensor:
        return self.way(self.linear(value))


WAYS = ["name", "list", "dict", "partial", "object", "closure"]
PLAN = OffloadPlan(SAMPLES)


def batch() -> tuple[Tensor, Tensor]:
    return torch.randn(SAMPLES, WIDTH), torch.randint(WIDTH, (SAMPLES,))


def step_of(model: nn.Module, **options: Any) -> TrainingStep:
    return TrainingStep(
        model, batch(), SAMPLES, lambda part: F.cross_entropy(model(part[0]), part[1]), split=_cut, **options
    )


def _cut(whole: Any, first: int, last: int) -> Any:
    return tuple(tensor[first:last] for tensor in whole)


@pytest.mark.parametrize("real", [False, True])
@pytest.mark.parametrize("way", WAYS)
def test_gradients_are_what_they_were(way: str, real: bool) -> None:
    model = Reaching(way)
    step = step_of(model)
    step.loss(step.batch).backward()
    model.linear.bias.grad = None
    before = {name: parameter.grad for name, parameter in model.named_parameters()}
    values = {name: None if one is None else one.clone() for name, one in before.items()}
    run = DryRun(step, real=real, in_place=real)
    run.run(PLAN)
    run.untraced()
    for name, parameter in model.named_parameters():
        assert parameter.grad is before[name]
        value = values[name]
        if value is not None:
            assert type(parameter.grad) is Tensor
            assert torch.equal(value, before[name])


@pytest.mark.parametrize("way", WAYS[:-1])
def test_fake_runs_see_fakes_and_plan_as_for_a_plain_attribute(way: str) -> None:
    profiles = [DryRun(step_of(Reaching(one))).run(PLAN) for one in ("name", way)]
    assert profiles[0].peak_bytes == profiles[1].peak_bytes
    assert profiles[0].saved_bytes == profiles[1].saved_bytes


@pytest.mark.parametrize("real", [False, True])
def test_a_criterions_gradients_are_what_they_were(real: bool) -> None:
    """Its parameters are the optimizer's, but not the model's; runs of a part are without that optimizer."""
    model, criterion = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)
    optimizer = torch.optim.SGD([*model.parameters(), *criterion.parameters()], lr=0.1)
    step = TrainingStep(
        model, batch(), SAMPLES, lambda part: criterion(model(part[0])).mean(), optimizers=[optimizer], split=_cut
    )
    step.loss(step.batch).backward()
    before = [parameter.grad for parameter in criterion.parameters()]
    values = [gradient.clone() for gradient in before]
    DryRun(step.of_size(2), real=real, in_place=real).untraced()
    DryRun(TrainingStep(model, step.batch, SAMPLES, step.loss, split=_cut, beside=step.beside), real=real).untraced()
    for parameter, gradient, value in zip(criterion.parameters(), before, values, strict=True):
        assert parameter.grad is gradient
        assert torch.equal(gradient, value)


class Writing(nn.Module):
    """Keeps sums in places that are neither parameters nor buffers."""

    def __init__(self, entries: int) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.total, self.sums, self.holder = torch.zeros(entries), [torch.zeros(entries)], Holder(torch.zeros(entries))
        self.teacher = [nn.BatchNorm1d(WIDTH)]

    def forward(self, value: Tensor) -> Tensor:
        value = self.linear(value)
        for kept in (self.total, self.sums[0], self.holder.weight):
            kept += value.detach().mean() + 1
        return value + self.teacher[0](value.detach()).detach()


@pytest.mark.parametrize("entries", [1, 2**20])
@pytest.mark.parametrize("how", ["fake", "copies", "in place"])
def test_what_is_written_into_attributes_is_not_theirs(how: str, entries: int) -> None:
    model = Writing(entries)
    kept = [model.total, model.sums[0], model.holder.weight, model.teacher[0].running_mean]
    before = [(tensor.clone(), tensor._version) for tensor in kept]
    run = DryRun(step_of(model), real=how != "fake", in_place=how == "in place")
    run.run(PLAN)
    run.untraced()
    now = [model.total, model.sums[0], model.holder.weight, model.teacher[0].running_mean]
    assert all(one is two for one, two in zip(kept, now, strict=True))
    for tensor, (value, version) in zip(kept, before, strict=True):
        assert torch.equal(tensor, value)
        assert tensor._version == version


def test_what_is_computed_without_fake_tensors_is_not_kept_either() -> None:
    model = nn.Linear(WIDTH, WIDTH)
    model.calls, model.table = torch.zeros(()), torch.ones(2**20)

    def loss(part: Any) -> Tensor:
        model.calls += 1
        model.table.mul_(0.5)
        return model(part[0]).mean()

    DryRun(TrainingStep(model, batch(), SAMPLES, loss, split=_cut)).run(PLAN)
    assert model.calls == 0
    assert bool((model.table == 1).all())


REPLACEMENTS = [lambda: fake(torch._subclasses.FakeTensorMode()), copies, aliases]


@pytest.mark.parametrize("replacement", REPLACEMENTS, ids=["fake", "copies", "aliases"])
def test_lists_that_a_step_shortens_and_recurrent_layers_come_back(replacement: Callable[[], Replacement]) -> None:
    model = nn.Sequential(nn.LSTM(2, 2))
    model.queue = [torch.zeros(1), torch.ones(1)]
    before = [*model.queue]
    weights = [*model[0]._flat_weights]
    with stand_ins(model, replacement()):
        assert model[0]._flat_weights[0] is model[0].weight_ih_l0
        assert model[0]._flat_weights[0] is not weights[0]
        model.queue.append(model.queue.pop(0))
        model.queue.append(torch.zeros(2))
    assert all(one is two for one, two in zip(before, model.queue, strict=True))
    assert all(one is two for one, two in zip(weights, model[0]._flat_weights, strict=True))


class Everything(nn.Module):
    """Weights by a list, noise of its own, sums, counts, and a table: all that planning must leave as it is."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        deep = [layer for _ in range(6) for layer in (nn.Linear(64, 64), nn.Tanh())]
        self.net, self.weight = nn.Sequential(nn.Linear(WIDTH, 64), *deep), nn.Parameter(torch.ones(64))
        self.listed, self.holder = [self.weight], Holder(self.weight)
        self.noise = torch.Generator().manual_seed(1)
        self.total, self.table = torch.zeros(()), torch.ones(2**19)

    def forward(self, value: Tensor) -> Tensor:
        value = self.net(value) * self.listed[0] + 0.1 * torch.randn(len(value), 64, generator=self.noise)
        self.table.mul_(0.5)
        self.total += value.detach().mean()
        self.holder.count += 1
        return value * self.table[:64]


@pytest.mark.parametrize("share", [1.05, 0.8])
def test_training_goes_on_as_if_nothing_had_been_planned(share: float) -> None:
    def train(budget_bytes: int) -> tuple[list[Tensor], int]:
        model = Everything()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        host = parse_host(None, "cpu")
        budget = BudgetedStep(model, [optimizer], budget_bytes, host, sub_batches=False) if budget_bytes else None
        generator = torch.Generator().manual_seed(2)
        for number in range(3):  # the second one finds gradients
            data = torch.randn(512 + 64 * (number == 1), WIDTH, generator=generator)

            def loss(part: Tensor) -> Tensor:
                return model(part).square().mean()

            if budget is None:
                loss(data).backward()
            else:
                budget.run(loss, data)
            if number != 0:
                optimizer.step()
                optimizer.zero_grad()
        if budget is not None:
            assert budget.report().steps == 3
            budget.remove()
        return [*model.parameters(), model.total, model.table, model.noise.get_state()], model.holder.count

    needed = DryRun(TrainingStep(model := Everything(), torch.randn(576, WIDTH), 576, lambda x: model(x).mean())).run(
        OffloadPlan(576)
    )
    plain, counted = train(0)
    ours, ours_counted = train(int(share * needed.peak_bytes) + 2 * 2**20)
    assert counted == ours_counted
    assert all(torch.equal(one, two) for one, two in zip(plain, ours, strict=True))
