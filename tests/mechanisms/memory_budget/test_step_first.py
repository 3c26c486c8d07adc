"""A first step that is trained without a plan: what it allocated is reported, and a stopped one leaves nothing."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from retime.foundations.cpu_pool.pool import MemoryPool
from retime.mechanisms.memory_budget.dry_run.run import TrainingStep, profile_step
from retime.mechanisms.memory_budget.offload.hosts import HostMemory
from retime.mechanisms.memory_budget.step import BudgetedStep

MIB = 2**20


class Deep(nn.Module):
    """Its activations are nearly all of its memory."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(8)))

    def forward(self, batch: Tensor) -> Tensor:
        return self.layers(batch).square().mean()


def test_what_a_roomy_first_step_allocated_is_reported() -> None:
    model, batch = Deep(), torch.randn(4096, 64)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    exact = profile_step(TrainingStep(model, batch, len(batch), model, optimizers=(optimizer,))).peak_bytes
    step = BudgetedStep(model, [optimizer], 256 * MIB, HostMemory("cpu"))
    try:
        if not MemoryPool().install():
            pytest.skip("nobody counts what is allocated without the pool")
        step.run(model, batch)
        optimizer.step()
        shape = step.report().shapes[0]
        assert shape.choice.peak_bytes > 2 * exact, "a bound that is no prediction"
        assert shape.first_step_bytes == pytest.approx(exact, rel=0.1)
        assert "batch of 4096 fits: it allocated " in str(step.report())
        assert "predicted" not in str(step.report())
        step.run(model, batch)
        assert step.report().shapes == [step.planned(batch)] == [shape]
    finally:
        step.remove()


def test_what_a_stopped_first_step_saved_is_gone_before_it_is_planned() -> None:
    """The error that stopped it has a traceback, which holds all that the forward pass has saved."""
    model, batch, pool = Deep(), torch.randn(4096, 64), MemoryPool()
    if not pool.install():
        pytest.skip("nobody counts what is allocated without the pool")
    said: list[str] = []
    live: list[int] = []

    class EnoughError(Exception):
        pass

    def say(text: str) -> None:
        said.append(text)
        live.append(pool.counts().live)
        if "planning a batch" in text:
            raise EnoughError

    before = pool.counts().live
    step = BudgetedStep(model, [torch.optim.SGD(model.parameters(), 0.1)], 36 * MIB, HostMemory("cpu"), say=say)
    try:
        with pytest.raises(EnoughError):
            step.run(model, batch)
        assert ["was stopped" in said[0], "planning a batch" in said[1]] == [True, True]
        assert live[0] - before > 4 * MIB
        assert live[1] - before < MIB
    finally:
        step.remove()
        pool.remove()
