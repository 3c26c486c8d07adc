"""Two streams, and accumulation on the processors, in Accelerate loops."""

import sys
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

pytest.importorskip("accelerate", reason="needs the extra lightning-retime[accelerate]")
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState

from retime.foundations.messages import NoEffectWarning
from retime.integrations.accelerate import CPUAccumulate, FusedOptimizer, MemoryBudget, TwoStreams
from support.ranks import on_ranks

THREADS = (1, 1)


def prepared(**options: Any) -> tuple[Accelerator, nn.Module, Any, Any]:
    AcceleratorState._reset_state(True)
    GradientState._reset_state()
    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True, **options)
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    generator = torch.Generator().manual_seed(1)
    data = DataLoader(torch.randn(24, 4, generator=generator), batch_size=4)
    return accelerator, *accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.01), data)


def train(accelerator: Accelerator, model: nn.Module, optimizer: Any, loader: Any) -> list[torch.Tensor]:
    for x in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(x).square().mean())
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()
    return [parameter.detach().clone() for parameter in model.parameters()]


@pytest.mark.parametrize("options", [{}, {"gradient_accumulation_steps": 2}, {"mixed_precision": "bf16"}], ids=str)
def test_the_loop_gives_the_plain_bits(options: dict[str, Any]) -> None:
    plain = train(*prepared(**options))
    accelerator, model, optimizer, loader = prepared(**options)
    two_streams = TwoStreams(accelerator, model, threads=THREADS, max_memory="1MiB")
    ours = train(accelerator, model, optimizer, loader)
    two_streams.remove()
    assert all(map(torch.equal, plain, ours))
    report = two_streams.report()
    assert report.sub_stream + report.main_stream == 2 * 5


def test_what_owns_weight_gradients_too_is_refused_and_what_does_not_is_exact() -> None:
    plain = train(*prepared())
    accelerator, model, optimizer, loader = prepared()
    two_streams = TwoStreams(accelerator, model, threads=THREADS)
    with pytest.raises(ValueError, match=r"use FuseOptimizer\('forward'\)"):
        FusedOptimizer(accelerator, model, optimizer)
    with pytest.raises(ValueError, match="memory budget counts as freed"):
        MemoryBudget(accelerator, model, optimizer, "1GiB")
    with pytest.raises(ValueError, match="drop one of the two"):
        TwoStreams(accelerator, model)
    fused = FusedOptimizer(accelerator, model, optimizer, "forward")
    ours = train(accelerator, model, optimizer, loader)
    assert fused.report().fused_updates > 0
    fused.remove()
    two_streams.remove()
    two_streams.remove()
    assert all(map(torch.equal, plain, ours))
    fused = FusedOptimizer(accelerator, model, optimizer)
    with pytest.raises(ValueError, match=r"use FuseOptimizer\('forward'\)"):
        TwoStreams(accelerator, model)
    fused.remove()
    TwoStreams(accelerator, nn.Linear(2, 2), threads=THREADS).remove()


def test_several_processes_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    accelerator, model, *_ = prepared()
    monkeypatch.setattr(Accelerator, "num_processes", 2)
    with pytest.raises(ValueError, match=r"runs on one device, .* use OutOfOrderDataParallel"):
        TwoStreams(accelerator, model)


STEPS = 6


def loop(way: str) -> tuple[list[Tensor], str]:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 8))
    model, optimizer = accelerator.prepare(net, torch.optim.AdamW(net.parameters(), lr=0.01))
    adds = CPUAccumulate(accelerator, model) if way != "plain" else None
    fusion = FusedOptimizer(accelerator, model, optimizer, mode="forward") if way == "fused" else None
    if adds is not None:
        with pytest.raises(ValueError, match="this model has one already"):
            CPUAccumulate(accelerator, model)
    generator = torch.Generator().manual_seed(accelerator.process_index)
    for _ in range(STEPS):
        with accelerator.accumulate(model):
            accelerator.backward(model(torch.randn(4, 32, generator=generator)).square().mean())
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()
    if fusion is not None:
        fusion.remove()
    report = ""
    if adds is not None:
        adds.remove()
        adds.remove()
        report = str(adds.report())
    return [parameter.detach().clone() for parameter in net.parameters()], report


@pytest.mark.skipif(sys.platform != "linux", reason="shared memory is for Linux")
@on_ranks(2, joined=False)
def test_a_loop_on_two_ranks_has_the_same_bits() -> None:
    expected, _ = loop("plain")
    for way in ("host", "fused"):
        ours, report = loop(way)
        assert all(map(torch.equal, expected, ours)), way
        assert "3 buckets" in report, report
        assert "2 ranks in shared memory" in report, report


def test_one_process_is_left_as_it_is() -> None:
    accelerator = Accelerator(cpu=True)
    with pytest.warns(NoEffectWarning, match="no gradients to add up"):
        adds = CPUAccumulate(accelerator, accelerator.prepare(nn.Linear(2, 2)))
    assert adds.report().headline == "gradients on the host: none were summed"
    adds.remove()
