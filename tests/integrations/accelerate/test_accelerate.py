"""Loops with FusedOptimizer and MemoryBudget, the package's face, and files of objects in folders of `save_state`."""

import gc
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

pytest.importorskip("accelerate", reason="needs the extra lightning-retime[accelerate]")
from accelerate import Accelerator
from accelerate.state import AcceleratorState

from retime import NoEffectWarning
from retime.foundations.compatibility import Mechanism
from retime.integrations import accelerate as face
from retime.integrations.accelerate import CPUAccumulate, FusedOptimizer, MemoryBudget, OutOfOrderDataParallel
from retime.integrations.accelerate.state_file import StateFile
from retime.mechanisms.memory_budget.report import BudgetReport, PlannedShape
from retime.schedules.budget import BudgetError
from support.fusion import batches, network
from support.memory_budget import SHALLOW, SMALL, TINY, Net, ShallowNet, accelerate_loop, assert_close, loader


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
    again = accelerator.prepare_optimizer(optimizer.optimizer)
    with pytest.raises(ValueError, match=r"which is FusedOptimizer\(\.\.\., mode='forward'\) here"):
        FusedOptimizer(accelerator, model, again, "backward")
    budget.remove()
    fused = FusedOptimizer(accelerator, model, optimizer, "backward")
    with pytest.raises(ValueError, match=r"which is FusedOptimizer\(\.\.\., mode='forward'\) here"):
        MemoryBudget(accelerator, model, optimizer, "1GiB")
    fused.remove()
    optimizer.optimizer._retime_mechanisms.append(Mechanism.OUT_OF_ORDER)  # one process has none
    with pytest.raises(ValueError, match="weight gradients that wait keep activations"):
        MemoryBudget(accelerator, model, optimizer, "1GiB")


def test_a_data_parallel_model_that_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    accelerator, model, optimizer, _, _ = prepared()
    compiled = torch.compile(model, backend="eager")
    monkeypatch.setattr(Accelerator, "num_processes", 2)
    for make in (FusedOptimizer, MemoryBudget, lambda *arguments: CPUAccumulate(*arguments[:2])):
        with pytest.raises(ValueError, match=r"got OptimizedModule .* compile it before prepare\(\)"):
            make(accelerator, compiled, optimizer)
    FusedOptimizer(accelerator, model, optimizer, "forward").remove()


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


def test_clipping_what_is_not_fused() -> None:
    accelerator, model, optimizer, *_ = prepared()
    other = nn.Linear(2, 2)
    other(torch.ones(2)).sum().backward()
    fusion = FusedOptimizer(accelerator, model, optimizer)
    assert accelerator.clip_grad_norm_(iter(other.parameters()), 1.0) > 1
    assert other.bias.grad[0] < 1
    fusion.remove()


def test_the_face_shows_the_objects_and_nothing_else() -> None:
    objects = ["CPUAccumulate", "FusedOptimizer", "MemoryBudget", "OutOfOrderDataParallel", "OutOfOrderPipeline"]
    assert face.__all__ == [*objects, "TwoStreams"]
    homes = {getattr(face, name).__module__.rpartition(".")[2] for name in face.__all__}
    assert homes == {
        *("cpu_accumulate", "fused_optimizer", "memory_budget", "ooo_pipeline", "out_of_order", "two_streams")
    }


def plain() -> Accelerator:
    """Code that knows nothing of retime, with one object of its own in the checkpoint."""
    AcceleratorState._reset_state(True)
    accelerator = Accelerator(cpu=True)
    net = nn.Linear(2, 2)
    accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
    accelerator.register_for_checkpointing(torch.optim.lr_scheduler.StepLR(torch.optim.SGD([torch.ones(1)], lr=1.0), 1))
    return accelerator


def test_folders_of_plain_code_and_under_a_budget_are_loaded_by_each_other(tmp_path: Path) -> None:
    plain().save_state(str(tmp_path / "plain"))
    accelerator = plain()
    budget = MemoryBudget(accelerator, accelerator._models[0], accelerator._optimizers[0], SMALL)
    accelerator.load_state(str(tmp_path / "plain"))
    accelerator.save_state(str(tmp_path / "budget"))
    plain().load_state(str(tmp_path / "budget"))
    budget.remove()


def test_what_is_refused_keeps_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    accelerator = plain()
    monkeypatch.setattr(Accelerator, "num_processes", 2)
    before = dict(accelerator.__dict__)
    hooks = [accelerator._save_model_state_pre_hook, accelerator._load_model_state_pre_hook]
    with pytest.raises(ValueError, match="needs the DistributedDataParallel model"):
        OutOfOrderDataParallel(accelerator, accelerator._models[0], accelerator._optimizers[0])
    assert not any(hooks)
    assert accelerator.__dict__ == before


def test_plans_lie_beside(offloads: None, tmp_path: Path) -> None:
    def run() -> PlannedShape:
        _, (report,), _ = accelerate_loop("run", budget=SHALLOW, module=ShallowNet(), data=loader(1), folder=tmp_path)
        return report.shapes[0]

    assert [run().source for _ in range(2)] == ["", "plan of an earlier run"]
    names = {path.name for path in tmp_path.iterdir()}
    assert "retime_MemoryBudget_0.json" in names
    assert not any(name.startswith("custom_checkpoint") for name in names)
    (tmp_path / "retime_MemoryBudget_0.json").unlink()
    absent = run()  # which is fine
    assert (absent.source, absent.note) == ("", "")


def kept(accelerator: Accelerator, name: str = "Mine", state: Any = None) -> tuple[StateFile, list[Any]]:
    loaded: list[Any] = []
    return StateFile(accelerator, name, lambda: state or {}, loaded.append), loaded


def test_each_object_has_a_file_of_its_own(tmp_path: Path) -> None:
    accelerator = plain()
    _, first = kept(accelerator, state={"a": 1})
    _, second = kept(accelerator, state={"a": 2})
    other, third = kept(accelerator, "Other", {"a": 3})
    accelerator.save_state(str(tmp_path))
    other.remove()
    accelerator.load_state(str(tmp_path))
    assert (first, second, third) == ([{"a": 1}], [{"a": 2}], [])


def test_nothing_to_keep_leaves_no_file(tmp_path: Path) -> None:
    accelerator = plain()
    _, loaded = kept(accelerator)
    (tmp_path / "retime_Mine_0.json").write_text(json.dumps({"of": "before"}))
    accelerator.save_state(str(tmp_path))
    accelerator.load_state(str(tmp_path))
    assert not loaded
    assert not list(tmp_path.glob("retime*"))


@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe", b"[" * 100_000])
def test_a_file_that_cannot_be_read_is_dropped_with_a_warning(content: bytes, tmp_path: Path) -> None:
    plain().save_state(str(tmp_path))
    (tmp_path / "retime_Mine_0.json").write_bytes(content)
    accelerator = plain()
    _, loaded = kept(accelerator)
    with pytest.warns(NoEffectWarning, match=r"retime_Mine_0\.json has no effect, as it cannot be read"):
        accelerator.load_state(str(tmp_path))
    assert not loaded


ACCUMULATE = pytest.mark.parametrize("accumulate", [pytest.param(1, marks=pytest.mark.long), 2])


def shallow_loop(how: str, accumulate: int) -> tuple[Net, list[BudgetReport], dict[str, Any]]:
    return accelerate_loop(how, accumulate, SHALLOW, module=ShallowNet(), data=loader(5))


@ACCUMULATE
def test_around_forward_passes(splits: None, accumulate: int) -> None:
    # sub-batches would be faster, but a loop of one's own cannot have them
    plain, *_ = shallow_loop("plain", accumulate)
    ours, (report,), _ = shallow_loop("forward", accumulate)
    assert report.offload.storages > 0
    assert report.sub_batches == report.steps == 5
    assert_close(plain, ours, 0)


@ACCUMULATE
def test_with_a_step_function(splits: None, accumulate: int) -> None:
    plain, *_ = shallow_loop("plain", accumulate)
    ours, (report,), _ = shallow_loop("run", accumulate)
    assert report.sub_batches > report.steps == 5
    assert_close(plain, ours)


def test_the_report_prints_as_text() -> None:
    accelerator = Accelerator(cpu=True)
    module = Net()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    budget = MemoryBudget(accelerator, *accelerator.prepare(module, optimizer), "1GiB")
    assert "nothing is planned" in str(budget.report())
    for kind in ("_parts", "_whole"):
        setattr(budget, kind, budget._make(split_too=kind == "_parts"))
    assert budget.report().what_was_done() == ["memory budget 1 GiB: 0 steps in 0 sub-batches"] * 2
    assert str(budget.report()).splitlines()[0] == budget.report().headline
    assert [report.steps for report in budget.report()] == [0, 0]
    budget.remove()


def test_a_budget_below_the_floor(offloads: None) -> None:
    with pytest.raises(BudgetError, match="below this step's floor"):
        accelerate_loop("forward", budget=TINY)  # sub-batches would fit


def test_needs_the_prepared_optimizer() -> None:
    module = Net()
    with pytest.raises(TypeError, match=r"apply MemoryBudget after accelerator\.prepare"):
        MemoryBudget(Accelerator(cpu=True), module, torch.optim.SGD(module.parameters(), lr=0.1), SMALL)
