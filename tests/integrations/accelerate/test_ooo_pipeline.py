"""A pipeline in an Accelerate loop, against one device."""

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from torch import nn

from retime.foundations.messages import NoEffectWarning
from retime.integrations.accelerate import OutOfOrderPipeline
from support.two_ranks import run_ranks

WORKER = "accelerate_pipeline_worker.py"


def outputs(ranks: int, *arguments: str) -> list[str]:
    """What the ranks of a case print; none may fail."""
    done = run_ranks(ranks, WORKER, *arguments, timeout_s=200)
    for one in done:
        assert one.returncode == 0, one.stderr[-3000:]
    return [one.stdout.strip() for one in done]


def test_a_loop_on_two_ranks_trains_as_on_one_device() -> None:
    assert outputs(2, "same", "1") == ["same"] * 2


def test_two_pipelines_train_on_all_of_their_batches() -> None:
    assert outputs(4, "same", "2") == ["same"] * 4


def test_two_models_of_one_accelerator() -> None:
    outputs(2, "beside")


def test_what_would_train_something_else_is_refused() -> None:
    assert outputs(2, "refused") == ["refused"] * 2


def test_half_precision() -> None:
    assert outputs(2, "half") == ["half"] * 2


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
