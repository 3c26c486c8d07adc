"""What a disk, or a caller, may do wrong: an error that says so, not a hang or a closed file of somebody else's."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from retime.mechanisms.memory_budget.offload.hosts import HostDisk
from retime.mechanisms.memory_budget.offload.tier import HostError


def test_a_disk_that_takes_nothing_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with HostDisk(tmp_path) as host:
        monkeypatch.setattr(os, "pwrite", lambda *args: 0)
        copy = host.store(torch.ones(5).untyped_storage())
        with pytest.raises(HostError, match="took none of the last 20 bytes"):
            copy.settle()


@pytest.mark.parametrize("folder", [1, None, 2.5])
def test_a_folder_is_a_path(folder: object) -> None:
    with pytest.raises(TypeError, match="name a folder"):
        HostDisk(folder)  # type: ignore[arg-type]
    os.fstat(1)  # still open
