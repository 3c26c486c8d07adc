"""Worker processes: what comes back, how errors come home, and that nothing outlives who asked."""

import os
import socket
import sys
from pathlib import Path

import pytest

from retime.foundations.workers import Worker, WorkerError, answer_once, by_name, free_port
from support.busy_worker import Counter, serve
from support.paths import PYTHONPATH
from support.process_ends import ended, first_line, runs
from support.time_limits import limit_s
from support.warm_start import Warm

VARIABLES = {"RANK": "3", **PYTHONPATH}
WAYS: dict[str, dict[str, dict[str, str]]] = {"forked": {"variables": VARIABLES}, "started": {"environment": VARIABLES}}


@pytest.mark.parametrize("way", WAYS)
def test_a_worker_from_its_first_answer_to_its_end(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers keep their types, errors come home, and one that is late is ended with what it has started."""
    monkeypatch.setenv("LOCAL_RANK", "7")  # a launcher's, which must not make it join another job
    told: list[str] = []
    worker = Worker(serve, {"do": "answer"}, limit_s(60), **WAYS[way], progress=told.append)
    try:
        assert worker.ready[3] == (1, 2)
        assert worker.ready["launcher's"] == {"RANK": "3"}
        with pytest.raises(WorkerError) as failed:
            worker.ask({"do": "fail"})
        assert str(failed.value) == "ValueError: had enough"
        (note,) = failed.value.__notes__
        assert note.startswith("before it failed\nTraceback")
        worker.tell({"do": "work"})
        while not told:
            worker.heard(1)
        assert all(runs(pid) for pid in told[0].split())
    finally:
        worker.close()
    assert ended(told[0].split())


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's signal for a closed pipe is Linux's")
@pytest.mark.parametrize("way", [pytest.param("forked", marks=pytest.mark.long), "started"])  # a server more to start
def test_killed_parents_leave_no_busy_worker(way: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    with Warm("support.busy_worker", [way], {**os.environ, **PYTHONPATH}, out, tmp_path / "errors") as parent:
        pids = first_line(out, parent)
        assert all(runs(pid) for pid in pids.split())
    assert ended(pids.split())


@pytest.mark.skipif(sys.platform != "linux", reason="mallopt is glibc's, and madvise that makes files resident Linux's")
def test_a_forked_process_is_measured_like_a_started_one() -> None:
    (forked, kept), (started, _) = (answer_once(serve, {"do": "measure"}, **options) for options in WAYS.values())
    assert forked == pytest.approx(started, rel=0.05)
    assert kept >= 60 * 2**20


def test_an_objects_methods_answer_what_they_are_asked_to_do() -> None:
    worker = Worker(Counter, {"do": "add", "number": 2}, limit_s(60), variables=VARIABLES)
    try:
        assert (worker.ready, worker.ask({"do": "add", "number": 3})) == (2, 5)
        with pytest.raises(WorkerError, match="no attribute 'take'"):
            worker.ask({"do": "take", "number": 1})
    finally:
        worker.close()


def test_functions_answer_by_their_names() -> None:
    def add(request: dict[str, int]) -> int:
        return request["number"] + 1

    assert by_name(add)({"do": "add", "number": 1}) == 2
    with pytest.raises(KeyError, match="take"):
        by_name(add)({"do": "take", "number": 1})


def test_a_free_port_stays_free_for_who_listens_there() -> None:
    port = free_port()
    with socket.socket() as other, pytest.raises(OSError, match="in use"):
        other.bind(("127.0.0.1", port))
    socket.create_server(("", port)).close()  # as torch's store does


def test_a_command_that_cannot_start_says_so() -> None:
    with pytest.raises(WorkerError, match=r"the process ended \(exit status 3\): no such place"):
        answer_once(serve, {"do": "answer"}, limit_s(60), launch=["sh", "-c", "echo no such place; exit 3"])
