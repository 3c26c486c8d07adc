"""What tests of recipes share: the command line in an empty folder."""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from retime.recipes import __main__ as command


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """Runs the command line in an empty folder; returns the only result."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")  # of the terminal: no line is broken

    def call(*arguments: str) -> Path:
        monkeypatch.setattr(sys, "argv", ["retime.recipes", "hardware.cores=null", *arguments])
        command.main()
        (path,) = (tmp_path / "outputs").rglob("result.json")
        assert {each.name for each in path.parent.iterdir()} >= {"result.csv", "result.md", "result.png"}
        return path

    return call
