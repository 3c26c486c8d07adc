"""What tests of recipes share: the command line in an empty folder."""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from retime.recipes import __main__ as command


@pytest.fixture
def command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Runs the command line in an empty folder, as `python -m retime.recipes` does."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")  # of the terminal: no line is broken

    def call(*arguments: str) -> None:
        monkeypatch.setattr(sys, "argv", ["retime.recipes", *arguments])
        command.main()

    return call


@pytest.fixture
def run(command_line: Callable[..., None], tmp_path: Path) -> Callable[..., Path]:
    """Runs the command line; returns the only result."""

    def call(*arguments: str) -> Path:
        command_line("hardware.cores=null", *arguments)
        (path,) = (tmp_path / "outputs").rglob("result.json")
        assert {each.name for each in path.parent.iterdir()} >= {"result.csv", "result.md", "result.png"}
        return path

    return call
