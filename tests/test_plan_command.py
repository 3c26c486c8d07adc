"""`retime plan`: what is printed, and the exit status."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import memory_budget_support as support
from memory_budget_support import BATCH, SPLITS, Net, use_costs
from retime.recipes.plan_command import main

pytestmark = support.IGNORED


def plain_model(batch_size: int = 256) -> Any:
    net = Net().net
    return net, (torch.randn(batch_size, support.FEATURES), torch.zeros(batch_size, dtype=torch.long))


def lightning_model() -> Any:
    return Net(), next(iter(support.loader()))


def wrong() -> Any:
    return nn.Linear(2, 2)


class Fails(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        raise ZeroDivisionError("not this step's fault")


def fails() -> Any:
    return Fails(), (torch.ones(4, 2), torch.zeros(4, dtype=torch.long))


@pytest.fixture(autouse=True)
def _costs(monkeypatch: pytest.MonkeyPatch) -> None:
    use_costs(monkeypatch, SPLITS)


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict[str, str], str]:
    status = main(["plan", *arguments])
    out, errors = capsys.readouterr()
    return status, {line[:15].strip(): line[16:] for line in out.splitlines()}, errors


def test_a_small_budget(capsys: pytest.CaptureFixture[str]) -> None:
    status, said, _ = run(capsys, "test_plan_command:lightning_model", "--budget", "120000")
    assert status == 0
    assert said["plan"].startswith("sub-batch 86")
    assert said["predicted peak"].endswith("KiB")
    assert said["slowdown"].endswith("x the unlimited step's time")
    assert said["floor"].endswith("1 sample at a time")
    assert "the paper's bound" in said["Eq. 7"]
    assert "separable" in said["sub-batches"]
    assert str(BATCH) in said["budget"]


def test_a_large_budget_and_a_batch_size(capsys: pytest.CaptureFixture[str]) -> None:
    reference = ("test_plan_command:plain_model", "--optimizer", "torch.optim.AdamW", "--batch", "32")
    status, said, _ = run(capsys, *reference, "--budget", "1GiB")
    assert status == 0
    assert said["slowdown"] == "none: the step fits"
    assert "batch of 32" in said["budget"]
    assert said["floor"].endswith("32 samples at a time (of whole batches: sub-batches were not looked at)")


def test_a_budget_below_the_floor(capsys: pytest.CaptureFixture[str]) -> None:
    status, said, _ = run(capsys, "test_plan_command:plain_model", "--budget", "2000")
    assert status == 1
    assert "below this step's floor" in said["refused"]
    assert "largest task" in said["floor"]


def test_an_experiment(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(
        "batch_size: 64\n"
        "model: {_target_: retime.recipes.demo.residual_mlp, depth: 2, width: 64}\n"
        "data: {_target_: retime.recipes.data.digits}\n"
        "optimizer: {_target_: torch.optim.SGD, lr: 0.1}\n"
    )
    status, said, errors = run(capsys, "--config", str(file), "--budget", "1GiB")
    assert status == 0, errors
    assert "batch of 64" in said["budget"]


@pytest.mark.parametrize(
    ("arguments", "pattern"),
    [
        ((), "names no model"),
        (("nothing",), "names no model"),
        (("no_such_module:f",), "No module named"),
        (("test_plan_command:nothing",), "no attribute"),
        (("test_plan_command:wrong",), "return (model, batch)"),
        (("test_plan_command:plain_model", "--budget", "lots"), "cannot be read"),
        (("--config", "missing.yaml"), "missing.yaml"),
        (("test_plan_command:plain_model", "--host", "tape"), "host='tape' names no place"),
        (("test_plan_command:plain_model", "--host", "disk:/no/such/folder"), "/no/such/folder"),
        (("test_plan_command:plain_model", "--device", "abacus"), "--device abacus: "),
        (("test_plan_command:plain_model", "--device", "cuda:99"), "--device cuda:99: torch sees"),
        (("test_plan_command:fails",), "ZeroDivisionError"),
    ],
)
def test_bad_arguments(capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], pattern: str) -> None:
    status, _, errors = run(capsys, *arguments)
    assert status == 2
    assert pattern in errors


def test_without_the_recipes_extra(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The recipes load anew, and find no hydra."""
    loaded = [name.split(".") for name in sys.modules]
    for package, *inner in (parts for parts in loaded if parts[:2] == ["retime", "recipes"] and len(parts) > 2):
        monkeypatch.delitem(sys.modules, ".".join([package, *inner]))
        monkeypatch.delattr(f"retime.recipes.{inner[1]}", raising=False)
    for parts in (*(parts for parts in loaded if parts[0] in ("hydra", "omegaconf")), ["hydra"], ["omegaconf"]):
        monkeypatch.setitem(sys.modules, ".".join(parts), None)
    anew = importlib.import_module("retime.recipes.plan_command")
    assert anew.main(["plan", "test_plan_command:lightning_model", "--budget", "1GiB"]) == 0
    capsys.readouterr()
    assert anew.main(["plan", "test_plan_command:plain_model", "--budget", "1GiB"]) == 2
    assert 'pip install "lightning-retime[recipes]"' in capsys.readouterr().err


def test_another_missing_module_is_no_matter_of_the_extra(capsys: pytest.CaptureFixture[str]) -> None:
    _, _, errors = run(capsys, "no_such_module:f")
    assert "lightning-retime[recipes]" not in errors
