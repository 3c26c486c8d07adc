"""FusedOptimizer after Accelerator.prepare(): the loop stays, the bits stay."""

import gc
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from support.fusion import batches, network

pytest.importorskip("accelerate", reason="needs the extra lightning-retime[accelerate]")
from accelerate import Accelerator
from accelerate.state import AcceleratorState

from retime.foundations.compatibility import Mechanism
from retime.integrations.accelerate import FusedOptimizer, MemoryBudget


def prepared(**options: Any) -> tuple[Any, ...]:
    AcceleratorState._reset_state(True)
    accelerator = Accelerator(cpu=True, **options)
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    loader = DataLoader(TensorDataset(torch.cat(batches(10))), batch_size=4)
    return (accelerator, *accelerator.prepare(model, optimizer, loader, scheduler))


def train(mode: str | None, clip_norm: float | None = None, clip_value: float | None = None, **options: Any) -> Any:
    accelerator, model, optimizer, loader, scheduler = prepared(**options)
    ours = {"clip_value": clip_value} if mode == "backward" else {}
    fused = FusedOptimizer(accelerator, model, optimizer, mode, **ours) if mode else None
    for (x,) in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(x).square().mean())
            if accelerator.sync_gradients and clip_norm:
                accelerator.clip_grad_norm_(model.parameters(), clip_norm)
            if accelerator.sync_gradients and clip_value and mode != "backward":
                accelerator.clip_grad_value_(model.parameters(), clip_value)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    state = [v for s in optimizer.state_dict()["state"].values() for v in s.values()]
    result = [*model.state_dict().values(), *state], scheduler.state_dict(), optimizer.step_was_skipped
    if fused:
        assert fused.report().fused_updates > 0
        fused.remove()
        assert "clip_grad_norm_" not in accelerator.__dict__
    return result


@pytest.mark.parametrize("mode", ["backward", "forward"])
@pytest.mark.parametrize(
    "options",
    [{}, {"gradient_accumulation_steps": 3}, {"mixed_precision": "bf16"}, {"clip_value": 1e-3}],
    ids=["plain", "accumulation", "bf16", "clip-value"],
)
def test_equals_the_plain_loop(mode: str, options: dict[str, Any]) -> None:
    plain, ours = train(None, **options), train(mode, **options)
    assert all(torch.equal(a, b) for a, b in zip(plain[0], ours[0], strict=True))
    assert plain[1:] == ours[1:]


def test_norm_clipping_is_exact_forward_and_refused_backward() -> None:
    plain, ours = train(None, clip_norm=0.01), train("forward", clip_norm=0.01)
    assert all(torch.equal(a, b) for a, b in zip(plain[0], ours[0], strict=True))
    with pytest.raises(RuntimeError, match=r"cannot clip by global norm.*mode='forward'"):
        train("backward", clip_norm=0.01)


def test_norm_clipping_is_refused_by_an_object_that_nobody_kept() -> None:
    accelerator, model, optimizer, loader, _ = prepared()
    FusedOptimizer(accelerator, model, optimizer, "backward")
    gc.collect()
    accelerator.backward(model(next(iter(loader))[0]).square().mean())
    with pytest.raises(RuntimeError, match="cannot clip by global norm"):
        accelerator.clip_grad_norm_(model.parameters(), 1.0)


def with_scaler(accelerator: Any, optimizer: Any) -> None:
    """fp16's machinery on a CPU, where Accelerate itself would not switch it on."""
    accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    optimizer.scaler = accelerator.scaler
    optimizer.__setstate__(optimizer.__getstate__())


@pytest.mark.parametrize("overflow", [False, True])
def test_scaler_goes_with_forward_mode(overflow: bool) -> None:
    def loop(mode: str | None) -> Any:
        accelerator, model, optimizer, loader, _ = prepared()
        with_scaler(accelerator, optimizer)
        fused = FusedOptimizer(accelerator, model, optimizer, mode) if mode else None
        skipped = []
        for i, (x,) in enumerate(loader):
            accelerator.backward(model(x).square().mean() * (torch.inf if overflow and i == 4 else 1.0))
            optimizer.step()
            skipped.append(optimizer.step_was_skipped)
            optimizer.zero_grad()
        if fused:
            assert fused.report().fused_updates >= 72
            fused.remove()
        return list(model.state_dict().values()), skipped

    plain, ours = loop(None), loop("forward")
    assert all(torch.equal(a, b) for a, b in zip(plain[0], ours[0], strict=True))
    assert plain[1] == ours[1] == [overflow and i == 4 for i in range(10)]


def test_scaler_is_refused_in_backward_mode() -> None:
    accelerator, model, optimizer, _, _ = prepared()
    with_scaler(accelerator, optimizer)
    with pytest.raises(ValueError, match=r"GradScaler.*mode='forward'.*bf16"):
        FusedOptimizer(accelerator, model, optimizer, "backward")


def test_mechanisms_that_own_the_same_are_refused() -> None:
    accelerator, model, optimizer, _, _ = prepared()
    fused = FusedOptimizer(accelerator, model, optimizer, "forward")
    with pytest.raises(ValueError, match="backward fusion cannot join forward fusion, which fuses the optimizer"):
        FusedOptimizer(accelerator, model, optimizer, "backward")
    budget = MemoryBudget(accelerator, model, optimizer, "1GiB")
    fused.remove()
    fused.remove()
    FusedOptimizer(accelerator, model, optimizer, "backward").remove()
    optimizer._retime_mechanisms.append(Mechanism.OUT_OF_ORDER)  # one process has none
    with pytest.raises(ValueError, match="weight gradients that wait keep activations"):
        MemoryBudget(accelerator, model, optimizer, "1GiB")
    budget.remove()


def test_bad_input() -> None:
    accelerator, model, optimizer, _, _ = prepared()
    with pytest.raises(ValueError, match="unknown fusion mode 'both'"):
        FusedOptimizer(accelerator, model, optimizer, "both")
    with pytest.raises(TypeError, match="the optimizer that prepare returned, got AdamW"):
        FusedOptimizer(accelerator, model, optimizer.optimizer)
    accelerator.state.distributed_type = "FSDP"
    with pytest.raises(ValueError, match="owns the optimizer's step"):
        FusedOptimizer(accelerator, model, optimizer)


def test_removing_one_of_two_fusions_leaves_the_others_guard() -> None:
    accelerator, model, optimizer, *_ = prepared()
    other = network()
    other, second = accelerator.prepare(other, torch.optim.SGD(other.parameters(), lr=0.1))
    fusions = [FusedOptimizer(accelerator, model, optimizer), FusedOptimizer(accelerator, other, second)]
    fusions[0].remove()
    fusions[0].remove()
    with pytest.raises(RuntimeError, match="global norm"):
        accelerator.clip_grad_norm_(other.parameters(), 1.0)
    fusions[1].remove()
    accelerator.clip_grad_norm_(other.parameters(), 1.0)
