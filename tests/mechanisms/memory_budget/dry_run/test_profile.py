"""Dry runs: the same bytes as the real step, who makes them, and the step as a task graph."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from retime.foundations.preserve_state.outside import ValueReadError
from retime.mechanisms.memory_budget.dry_run.profile import StepProfile, task_graph
from retime.mechanisms.memory_budget.dry_run.run import TrainingStep, profile_step, replay
from retime.schedules.budget import BlockKind, OffloadPlan, Phase
from retime.schedules.errors import ScheduleError
from retime.schedules.modnn.bounds import lower_bound
from support.profiled_steps import MODELS, SAMPLES, Reads, step_of


def everything(step: TrainingStep, sub_batch: int, prefetch: int = 0) -> OffloadPlan:
    saved = len(profile_step(step, sub_batch).saved)
    return OffloadPlan(sub_batch, frozenset(range(saved)), prefetch, saved)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("sub_batch", [SAMPLES, 2])
def test_dry_and_real_runs_hold_the_same_bytes(name: str, sub_batch: int) -> None:
    step = step_of(name)
    dry, real = profile_step(step, sub_batch), profile_step(step, sub_batch, real=True)
    assert dry.peak_bytes == real.peak_bytes
    assert dry.resident_bytes == real.resident_bytes
    assert [one.nbytes for one in dry.saved] == [one.nbytes for one in real.saved]
    plan = everything(step, sub_batch, prefetch=1)
    dry, real = (replay(step, plan, in_flight_bytes=5000, real=real) for real in (False, True))
    assert dry.peak_bytes == real.peak_bytes


def test_a_dry_run_leaves_the_step_as_it_was() -> None:
    step = step_of("convolutions")
    optimizer = step.optimizers[0]
    step.loss(step.batch).backward()
    optimizer.step()
    before = [tensor.clone() for tensor in (*step.module.parameters(), *step.module.buffers())]
    states = [value.clone() for state in optimizer.state.values() for value in state.values()]
    gradients = [parameter.grad.clone() for parameter in step.module.parameters()]
    parameters = list(step.module.parameters())
    random = torch.get_rng_state()
    for real in (False, True):
        profile_step(step, 2, real=real)
    assert all(one is two for one, two in zip(parameters, step.module.parameters(), strict=True))
    after = [*step.module.parameters(), *step.module.buffers()]
    assert all(torch.equal(one, two) for one, two in zip(before, after, strict=True))
    kept = [value for state in optimizer.state.values() for value in state.values()]
    assert all(torch.equal(one, two) for one, two in zip(states, kept, strict=True))
    assert all(torch.equal(p.grad, g) for p, g in zip(parameters, gradients, strict=True))
    assert torch.equal(random, torch.get_rng_state())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in step.module.modules())


def test_what_stays_is_counted_by_kind() -> None:
    step = step_of("convolutions")
    parameters = sum(parameter.nbytes for parameter in step.module.parameters())
    profile = profile_step(step)
    kinds = profile.bytes_by_kind
    assert kinds[BlockKind.WEIGHT] == parameters + sum(buffer.nbytes for buffer in step.module.buffers())
    assert kinds[BlockKind.WEIGHT_GRADIENT] == parameters
    assert kinds[BlockKind.STATE] == 2 * parameters + 4 * len(list(step.module.parameters()))
    assert kinds[BlockKind.INPUT] == sum(tensor.nbytes for tensor in step.batch)
    assert profile_step(step_of("convolutions", "SGD")).bytes_by_kind[BlockKind.STATE] == 0


def test_saved_storages_and_layers() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3), nn.Sigmoid())
    values = torch.randn(SAMPLES, 4)
    step = TrainingStep(model, values, SAMPLES, lambda batch: model(batch).square().sum())
    profile = profile_step(step)
    # Tanh and sigmoid save what they return; the second linear layer and the square save the same storages again.
    operations = profile.trace.operations
    saved = [(operations[one.born].layer, one.nbytes) for one in profile.saved]
    assert saved == [("1", SAMPLES * 24), ("3", SAMPLES * 12)]
    backward = [op for op in operations if op.phase is Phase.BACKWARD]
    assert {"tanh_backward": "1", "sigmoid_backward": "3"}.items() <= {op.name: op.layer for op in backward}.items()
    assert {op.layer for op in backward if op.name == "mm"} == {"0", "2"}


@pytest.mark.parametrize("gradients", ["freed", "freed after forward", "kept"])
def test_gradients_of_the_step_before(gradients: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(100, 100, bias=False), nn.Tanh())
    values = torch.randn(SAMPLES, 100)
    step = TrainingStep(model, values, SAMPLES, lambda batch: model(batch).sum(), gradients=gradients)
    weight, activation, loss = 40_000, SAMPLES * 400, 4
    # At the peak of the backward pass: both activation gradients' buffers are gone but the one that mm reads.
    fresh = 2 * weight + activation + activation + loss + loss
    peak = profile_step(step).peak_bytes
    assert (peak >= fresh + weight) == (gradients == "kept")
    real = profile_step(step, real=True).peak_bytes
    assert peak == real


def test_sub_batches_add_to_gradients_that_are_there() -> None:
    step = step_of("convolutions")
    whole, parts = profile_step(step), profile_step(step, 2)
    assert parts.peak_bytes < whole.peak_bytes
    passes = [len(names) for names in parts.trace.saves]
    assert passes == [len(whole.saved)] * 2  # two sub-batches stand for all four


def test_a_read_value_is_named_and_a_real_run_follows_it() -> None:
    model = nn.Sequential(nn.Linear(3, 3), Reads())
    values = torch.randn(SAMPLES, 3)
    step = TrainingStep(model, values, SAMPLES, lambda batch: model(batch).square().sum())
    before = model[0].weight
    with pytest.raises(ValueReadError, match="1 reads the value of a tensor"):
        profile_step(step)
    assert model[0].weight is before
    assert isinstance(profile_step(step, real=True), StepProfile)

    class Picks(nn.Module):
        def forward(self, values: Tensor) -> Tensor:
            return values[values[:, 0] > 0]

    model[1] = Picks()
    with pytest.raises(ValueReadError, match="cannot be run dry"):
        profile_step(step)


def test_the_task_graph_predicts_other_batch_sizes() -> None:
    step = step_of("convolutions")
    one, two, eight = (profile_step(step.of_size(size)) for size in (2, 4, SAMPLES))
    graph = task_graph(one, two, eight)
    for profile in (one, two, eight):
        assert graph.resident_bytes(profile.samples) == profile.resident_bytes - profile.bytes_by_kind[BlockKind.INPUT]
        sizes = sum(block.size_bytes(profile.samples) for block in graph.blocks.values())
        assert sizes == sum(storage.nbytes for storage in profile.trace.storages)
    bound = lower_bound(graph, 2)
    away = replay(step.of_size(2), everything(step.of_size(2), 2))
    assert bound.resident_bytes < bound.bytes
    assert bound.bytes <= 1.5 * away.peak_bytes
    with pytest.raises(ScheduleError, match="different batch sizes"):
        task_graph(one, one)
    with pytest.raises(ScheduleError, match="profile one without a plan"):
        task_graph(one, profile_step(step, 2))


def test_a_size_that_does_not_grow_by_the_sample_and_other_operations_are_refused() -> None:
    model, values = nn.Linear(4, 4), torch.randn(SAMPLES, 4)
    step = TrainingStep(model, values, SAMPLES, lambda batch: (model(batch) @ model(batch).t()).square().sum())
    profiles = [profile_step(step.of_size(size)) for size in (2, 4, 8)]
    with pytest.raises(ScheduleError, match="does not grow by the sample"):
        task_graph(*profiles)

    def loss(batch: Tensor) -> Tensor:
        return model(batch).tanh().sum() if len(batch) > 2 else model(batch).sum()

    step = TrainingStep(model, values, SAMPLES, loss)
    with pytest.raises(ScheduleError, match=r"runs other operations.*LayerDrop.*dry_run='off'"):
        task_graph(profile_step(step.of_size(2)), profile_step(step))


@pytest.mark.parametrize("buckets", ["beside", "gradients"])
@pytest.mark.parametrize("sub_batch", [8, 4])
def test_buckets_of_data_parallel_are_counted(buckets: Any, sub_batch: int) -> None:
    model = nn.Linear(100, 100)
    gradients = sum(parameter.nbytes for parameter in model.parameters())
    inputs = torch.randn(8, 100)

    def step(buckets: Any, gradients: Any) -> TrainingStep:
        return TrainingStep(model, inputs, 8, lambda part: model(part).sum(), gradients=gradients, buckets=buckets)

    def peak(buckets: Any, gradients: Any = "freed after forward") -> int:
        return profile_step(step(buckets, gradients), sub_batch).peak_bytes

    apart = buckets == "beside" or sub_batch < 8  # gradients of sub-batches are in no bucket until the last one
    assert peak(buckets) == (peak("") + gradients if apart else peak("", "kept"))
