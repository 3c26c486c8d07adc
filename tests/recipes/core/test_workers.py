"""Worker processes: what comes back, how errors come home, and that nothing outlives who asked."""

import os
import signal
import subprocess
import sys

import pytest

from retime.recipes.core.workers import Worker, WorkerError, answer_once
from support.busy_worker import serve
from support.paths import PYTHONPATH
from support.process_ends import ended, runs
from support.time_limits import limit_s

# None: forked from the server; else started anew
WAYS: dict[str, dict[str, str] | None] = {"forked": None, "started": PYTHONPATH}


@pytest.mark.parametrize("way", WAYS)
def test_answers_keep_their_types_and_errors_come_home(way: str) -> None:
    assert answer_once(serve, {"do": "answer"}, limit_s(60), environment=WAYS[way])[3] == (1, 2)
    with pytest.raises(WorkerError) as failed:
        answer_once(serve, {"do": "fail"}, limit_s(60), environment=WAYS[way])
    assert str(failed.value) == "ValueError: had enough"
    (note,) = failed.value.__notes__
    assert note.startswith("before it failed\nTraceback")


@pytest.mark.parametrize("way", WAYS)
def test_a_late_worker_is_ended_with_what_it_started(way: str) -> None:
    told: list[str] = []
    worker = Worker(serve, {"do": "answer"}, limit_s(60), environment=WAYS[way], progress=told.append)
    try:
        worker.tell({"do": "work"})
        while not told:
            worker.heard(1)
        assert all(runs(pid) for pid in told[0].split())
    finally:
        worker.close()
    assert ended(told[0].split())


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's signal for a closed pipe is Linux's")
@pytest.mark.parametrize("way", WAYS)
def test_killed_parents_leave_no_busy_worker(way: str) -> None:
    parent = subprocess.Popen(
        [sys.executable, "-m", "support.busy_worker", way],
        env={**os.environ, **PYTHONPATH},
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert parent.stdout is not None
        with parent.stdout as lines:
            pids = lines.readline()
        assert all(runs(pid) for pid in pids.split())
    finally:
        parent.send_signal(signal.SIGKILL)
        parent.wait()
    assert ended(pids.split())


def test_a_command_that_cannot_start_says_so() -> None:
    with pytest.raises(WorkerError, match=r"the process ended \(exit status 3\): no such place"):
        answer_once(serve, {"do": "answer"}, limit_s(60), launch=["sh", "-c", "echo no such place; exit 3"])
