"""What a refusal advises, and which task it blames."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from retime.mechanisms.memory_budget.costs import StepCosts
from retime.mechanisms.memory_budget.dry_run.profile import LargestTask, Size
from retime.mechanisms.memory_budget.dry_run.run import TrainingStep
from retime.mechanisms.memory_budget.step_memory import MemoryFloor, StepMemory
from retime.schedules.budget import Phase

SMALLER_PARTS = "smaller sub-batches, if allowed"


def floor(sub_batch: int, resident_bytes: int = 10) -> MemoryFloor:
    return MemoryFloor(100, sub_batch, resident_bytes, 0, LargestTask("mm", "0", "forward", 50))


@pytest.mark.parametrize(
    ("sub_batch", "fewer", "pattern"),
    [
        (8, None, SMALLER_PARTS),
        (8, "They cannot.", r"They cannot\. For"),
        (8, "", "needs 50 bytes for 8 samples"),
        (1, None, "needs 50 bytes for one sample"),
        (1, "They cannot.", "needs 50 bytes for one sample"),
    ],
)
def test_advice_about_samples_at_once(sub_batch: int, fewer: str | None, pattern: str) -> None:
    refusal = floor(sub_batch).refusal(20, fewer)
    assert refusal.samples == sub_batch
    with pytest.raises(type(refusal), match=pattern):
        raise refusal
    assert (SMALLER_PARTS in str(refusal)) == (sub_batch > 1 and fewer is None)


def test_fewer_samples_are_no_way_out_where_the_parameters_do_not_fit() -> None:
    heavy = floor(8, resident_bytes=90)
    assert SMALLER_PARTS not in str(heavy.refusal(89))
    assert SMALLER_PARTS in str(heavy.refusal(95))
    assert "parameters in a smaller dtype" in str(heavy.refusal(95))


def test_what_operations_need_for_themselves_decides_which_is_the_largest() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.AdaptiveAvgPool2d(1))
    batch = torch.randn(4, 3, 16, 16)
    step = TrainingStep(model, batch, 4, loss=lambda part: model(part).square().mean())
    assert StepMemory(step, (4,)).floor.task.layer == "1"
    plain = StepMemory(step, (4,))
    scratch = {(Phase.FORWARD, "0", "convolution"): Size(0, 10**6)}
    measured = StepMemory(step, (4,), StepCosts(operations=scratch), earlier=plain).floor.task
    assert (measured.name, measured.layer, measured.phase) == ("convolution", "0", "forward")
    assert measured.nbytes > 4 * 10**6


def test_sizes_are_told_to_the_byte_and_readably() -> None:
    task = LargestTask("mm", "0", "forward", 2 * 2**30)
    said = str(MemoryFloor(3_984_588, 1, 10, 0, task).refusal(1000))
    assert "a budget of 1000 bytes is below" in said
    assert "at least 3984588 bytes (3.8 MiB) are needed" in said
    assert "needs 2147483648 bytes (2.0 GiB) for one sample" in said


class _ReadsItsInput(nn.Module):
    """A dry run without values cannot follow it."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return inputs * (1.0 if float(inputs.detach().sum()) > 0 else 2.0)


def test_batch_norm_in_a_step_that_only_runs_for_real_gets_two_samples() -> None:
    """A BatchNorm after pooling refuses one sample."""
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), _ReadsItsInput(), nn.Linear(8, 2))
    step = TrainingStep(model, torch.randn(8, 4), 8, lambda batch: model(batch).sum())
    memory = StepMemory(step, (8,))
    assert memory.plain is None
    assert memory.floor.bytes > sum(parameter.nbytes for parameter in model.parameters())
    assert memory.lifetimes(8).peak_bytes(memory.plan(8)) >= memory.floor.resident_bytes
