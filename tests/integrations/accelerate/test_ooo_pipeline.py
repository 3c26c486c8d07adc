"""A pipeline in an Accelerate loop, against one device."""

import subprocess
from functools import cache

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from torch import nn

from retime.foundations.messages import NoEffectWarning
from retime.integrations.accelerate import OutOfOrderPipeline
from support.ranks import run_ranks, said_in

WORKER = "accelerate_pipeline_worker.py"


CASES = {2: ("same|1", "beside", "refused", "half"), 4: ("same|2",)}
"""By the number of ranks: a loop of one pipeline, two models of one accelerator, what would train something else, bf16;
and two pipelines, which train on all of their batches."""


@cache
def started(ranks: int) -> list[subprocess.CompletedProcess[str]]:
    return run_ranks(ranks, WORKER, *CASES[ranks], timeout_s=200)


@pytest.mark.parametrize(("ranks", "case"), [(ranks, case) for ranks, cases in CASES.items() for case in cases])
def test_a_loop_over_ranks_is_that_of_one_device_or_refused(ranks: int, case: str) -> None:
    said = "same" if case == "beside" else case.partition("|")[0]
    assert [said_in(one, case) for one in started(ranks)] == [said] * ranks


def test_one_process_trains_as_ever() -> None:
    AcceleratorState._reset_state(True)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    inputs = torch.randn(4, 3)
    loss = model(inputs).square().mean()
    expected = torch.autograd.grad(loss / 2, model.parameters())  # type: ignore[arg-type]
    optimizer = accelerator.prepare(torch.optim.SGD(model.parameters(), 0.1))
    with pytest.warns(NoEffectWarning, match="OutOfOrderPipeline has no effect"):
        pipeline = OutOfOrderPipeline(accelerator, model, optimizer)
    assert torch.equal(pipeline.train_batch(inputs, lambda part: model(part).square().mean()), loss.detach())
    assert all(torch.equal(p.grad, found) for p, found in zip(model.parameters(), expected, strict=True))
    norm = torch.stack([found.norm() for found in expected]).norm()
    torch.testing.assert_close(pipeline.clip_grad_norm_(1e9), norm)
    assert torch.equal(pipeline.evaluate(inputs, model), model(inputs).detach())
    state, optimizer_state = pipeline.state_dict(), pipeline.optimizer_state_dict()
    assert state is not None
    assert state.keys() == model.state_dict().keys()
    assert optimizer_state == optimizer.state_dict()
    assert "no step yet" in str(pipeline.report())
    pipeline.restore()


def test_loss_scaling_is_refused() -> None:
    AcceleratorState._reset_state(True)
    accelerator = Accelerator(cpu=True)
    accelerator.scaler = torch.amp.GradScaler("cpu")
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    optimizer = accelerator.prepare(torch.optim.SGD(model.parameters(), 0.1))
    with pytest.raises(ValueError, match="use mixed_precision='bf16'"):
        OutOfOrderPipeline(accelerator, model, optimizer)
