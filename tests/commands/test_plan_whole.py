"""`retime plan` as a user runs it: its own process, a real model, nothing patched."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from support.time_limits import limit_s
from support.warm_start import Warm

MODEL = """
import torch
from torch import nn

def deep():
    layers = [nn.Linear(32, 64)]
    for _ in range(4):
        layers += [nn.Linear(64, 64), nn.Tanh()]
    return nn.Sequential(*layers, nn.Linear(64, 4)), (torch.randn(2048, 32), torch.zeros(2048, dtype=torch.long))
"""


def run(folder: Path, budget: int | str) -> tuple[int | None, dict[str, str], str]:
    arguments = ["plan", "my_models:deep", "--budget", str(budget), "--optimizer", "torch.optim.AdamW"]
    out, errors = folder / f"{budget}.out", folder / f"{budget}.errors"
    with Warm("retime.commands.main", arguments, {**os.environ, "PYTHONPATH": str(folder)}, out, errors) as process:
        process.wait(limit_s(60))
    return (
        process.returncode,
        {line[:15].strip(): line[16:] for line in out.read_text().splitlines()},
        errors.read_text(),
    )


def floor_of(said: dict[str, str]) -> int:
    found = re.match(r"(\d+) bytes ", said["floor"])
    assert found, said
    return int(found[1])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "my_models.py").write_text(MODEL)
    return tmp_path


@pytest.mark.long
def test_the_printed_floor_gets_a_plan(folder: Path) -> None:
    status, refused, told = run(folder, "1KiB")
    assert status == 1, told
    assert "Eq. 7" in refused
    assert f"at least {floor_of(refused)} bytes" in refused["refused"]
    status, planned, told = run(folder, floor_of(refused))
    assert status == 0, (refused, told)
    assert re.match(r"sub-batch \d+, ", planned["plan"])
    assert "measuring on a few samples" in told
    assert "trying plan 1: " in told
    status, fits, told = run(folder, "1GiB")
    assert status == 0, told
    assert fits["plan"] == "none: the step fits"
    status, _, told = run(folder, floor_of(fits))  # also the floor that a step is told that fits
    assert status == 0, told
