"""Folders of `accelerator.save_state()` are plain ones: plans lie in a file of their own beside the others."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("accelerate", reason="needs the extra lightning-retime[accelerate]")
from accelerate import Accelerator
from accelerate.state import AcceleratorState

from retime import NoEffectWarning
from retime.integrations.accelerate import MemoryBudget, OutOfOrderDataParallel
from retime.integrations.accelerate.state_file import StateFile
from retime.mechanisms.memory_budget.report import PlannedShape
from support.memory_budget import SHALLOW, SMALL, ShallowNet, accelerate_loop, loader


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
