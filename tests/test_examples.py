"""Examples are the plain script with a few marked lines, and train to the plain script's loss."""

import re
import runpy
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

from support.time_limits import limit_s

EXAMPLES = Path(__file__).parents[1] / "examples"
SCRIPTS = sorted(path for path in EXAMPLES.glob("*/*.py") if path.name != "plain.py")
TWO_RANKS = ("cpu_accumulate.py", "out_of_order_ddp.py", "pipeline.py")
SHORT = ["--epochs", "1", "--samples", "96"]
LOSS = re.compile(r"^loss (\d+\.\d+)$", re.MULTILINE)


def lines_of(script: Path) -> list[str]:
    """Return what a script has in common with its plain one."""
    lines = script.read_text(encoding="utf-8").splitlines()[1:]  # without the docstring
    return [line for line in lines if line and not line.endswith("# retime")]


def name_of(script: Path) -> str:
    return script.relative_to(EXAMPLES).as_posix()


@pytest.mark.parametrize("script", SCRIPTS, ids=name_of)
def test_an_example_is_the_plain_script_with_marked_lines(script: Path) -> None:
    assert lines_of(script) == lines_of(script.with_name("plain.py"))
    added = script.read_text(encoding="utf-8").count("# retime\n")
    assert 2 <= added <= 6


@pytest.mark.parametrize(
    "script", [pytest.param(s, marks=[pytest.mark.long] if s.name in TWO_RANKS else [], id=name_of(s)) for s in SCRIPTS]
)
def test_an_example_trains(
    script: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    if script.name in TWO_RANKS:
        command = [sys.executable, str(script), *SHORT]
        ran = subprocess.run(command, capture_output=True, text=True, timeout=limit_s(120), check=False)
        assert ran.returncode == 0, ran.stderr
        assert len(LOSS.findall(ran.stdout)) == 2, "a line a rank"
        return
    losses = []
    for one in (script, script.with_name("plain.py")):
        monkeypatch.setattr(sys, "argv", [str(one), *SHORT])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            runpy.run_path(str(one), run_name="__main__")
        losses.append(LOSS.findall(capsys.readouterr().out))
    assert losses[0] == losses[1]
    assert len(losses[0]) == 1
