"""How many files of retime a settled batch passes, and how often calls go back to one: no more than there are today."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from support import passed_files
from support.time_limits import limit_s

SCRIPT = Path(passed_files.__file__)


def generator():
    yield 1
    yield 2


def test_a_generator_that_goes_on_is_not_entered_again() -> None:
    passed = passed_files.Passed()
    entries = []
    before = sys.getprofile()
    sys.setprofile(lambda frame, event, _: event == "call" and entries.append((frame, passed_files.is_entry(frame))))
    try:
        list(generator())
    finally:
        sys.setprofile(before)
    assert passed.visits == []
    assert [entered for frame, entered in entries if frame.f_code is generator.__code__] == [True, False, False]


@pytest.mark.parametrize(
    ("strategy", "files", "returns"),
    [("fused_optimizer", 5, 20), ("fused_optimizer_forward", 5, 45), ("fused_optimizer_ddp", 7, 19)],
)
def test_a_settled_batch(strategy: str, files: int, returns: int) -> None:
    done = subprocess.run(
        [sys.executable, str(SCRIPT), strategy], capture_output=True, text=True, timeout=limit_s(120), check=True
    )
    counted = re.search(r"(\d+) files, (\d+) returns", done.stdout)
    assert counted is not None, done.stdout
    assert int(counted[1]) <= files, done.stdout
    assert int(counted[2]) <= returns, done.stdout
