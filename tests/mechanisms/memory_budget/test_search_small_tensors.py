"""What the pool may keep does not count tensors that are too small for it, which the C library's heap holds beside."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from retime.foundations.cpu_pool.pool import POOLED_BYTES
from retime.mechanisms.memory_budget.dry_run.run import TrainingStep
from retime.mechanisms.memory_budget.search import PlanChoice, search_plan
from retime.mechanisms.memory_budget.step_memory import StepMemory

WIDTH, DEPTH, SAMPLES = 64, 12, 256
ROOMY = 2**40


def step_of(samples: int) -> TrainingStep:
    """One layer's weights over and over: activations are most of what it holds, 256 bytes a sample each."""
    layer = nn.Linear(WIDTH, WIDTH)
    net = nn.Sequential(*(part for _ in range(DEPTH) for part in (layer, nn.Tanh())))
    return TrainingStep(net, torch.randn(samples, WIDTH), samples, lambda batch: net(batch).square().mean())


def choice_of(samples: int, sub_batch: int, budget_bytes: int = ROOMY) -> PlanChoice:
    step = step_of(samples)
    return search_plan(step, budget_bytes, memory=StepMemory(step, (sub_batch,)))


@pytest.mark.parametrize(("samples", "small"), [(32, True), (SAMPLES, False)])
def test_small_tensors_are_told_apart(samples: int, small: bool) -> None:
    """Activations of 8 KiB, and of 64 KiB."""
    choice = choice_of(samples, samples)
    if small:
        assert choice.small_bytes >= DEPTH // 2 * samples * WIDTH * 4
    else:
        assert choice.small_bytes < POOLED_BYTES


def test_parts_have_small_tensors_where_the_batch_has_none() -> None:
    whole = choice_of(SAMPLES, SAMPLES)
    parts = choice_of(SAMPLES, 32, whole.peak_bytes)
    assert parts.plan.sub_batch == 32
    assert parts.small_bytes >= DEPTH // 2 * 32 * WIDTH * 4


def test_they_are_not_reserved() -> None:
    choice = replace(choice_of(32, 32), spare_bytes=1)  # as of a plan that was measured
    large = choice.peak_bytes - choice.small_bytes
    assert large <= choice.reserved_bytes(ROOMY) < 1.1 * large < choice.peak_bytes
