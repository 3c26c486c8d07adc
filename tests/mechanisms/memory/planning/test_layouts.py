"""The layout of convolutions: measured, told where it pays, and never chosen without being asked for."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from retime.mechanisms.memory.dry_run.replay import TrainingStep
from retime.mechanisms.memory.planning.floor import StepMemory
from retime.mechanisms.memory.planning.layouts import layout_hint

SAMPLES = 8


class Timed(nn.Module):
    """Sleeps as long as the layout of its input says."""

    def __init__(self, slow: torch.memory_format) -> None:
        super().__init__()
        self.slow, self.seen = slow, list[bool]()
        self.layer = nn.Conv2d(3, 4, 3)

    def forward(self, images: Tensor) -> Tensor:
        if not images.is_contiguous(memory_format=self.slow):
            return self.layer(images)  # type: ignore[no-any-return]
        if type(images) is Tensor:
            time.sleep(0.02)
        return self.layer(images)  # type: ignore[no-any-return]


def hint(model: nn.Module, batch: Tensor | None = None, budget: int = 2**30, **options: Any) -> str:
    batch = torch.randn(SAMPLES, 3, 16, 16) if batch is None else batch
    step = TrainingStep(model, batch, SAMPLES, lambda part: model(part).square().mean())
    plain = StepMemory(step, (SAMPLES,)).plain
    assert plain is not None
    return layout_hint(step, plain, 4, budget, **options)


def test_a_faster_layout_is_named_and_nothing_changes() -> None:
    model = Timed(torch.contiguous_format)
    before = {name: (value.clone(), value.stride()) for name, value in model.state_dict().items()}
    assert "torch.channels_last" in hint(model)
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name][0])
        assert value.stride() == before[name][1]
    assert model.layer.weight.grad is None


def test_a_slower_layout_is_not() -> None:
    assert hint(Timed(torch.channels_last)) == ""


@pytest.mark.parametrize("why", ["no convolution", "chosen already", "no room"])
def test_nothing_is_measured(why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model: nn.Module = Timed(torch.contiguous_format)
    if why == "chosen already":
        model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    if why == "no convolution":
        model = nn.Sequential(nn.Flatten(), nn.Linear(768, 4))

    def perf_counter() -> float:
        raise AssertionError("timed")

    monkeypatch.setattr("retime.mechanisms.memory.planning.layouts.time.perf_counter", perf_counter)
    assert hint(model, budget=2000 if why == "no room" else 2**30) == ""


def test_a_model_that_knows_one_layout_only_has_no_hint() -> None:
    class Views(Timed):
        def forward(self, images: Tensor) -> Tensor:
            return super().forward(images).view(len(images), -1)

    model = Views(torch.contiguous_format)
    with pytest.raises(RuntimeError, match="view size"):
        model(torch.randn(SAMPLES, 3, 16, 16).to(memory_format=torch.channels_last))
    assert hint(model) == ""
    assert model.layer.weight.is_contiguous()
