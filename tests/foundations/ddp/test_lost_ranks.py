"""Which rank an error is about: told by the processes that have ended, for more than two ranks too."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist

from retime.foundations.ddp import OwnGroupsReducer, RankLostError, RankProcesses, agreement, reductions
from support.ranks import run_ranks

pytestmark = pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="the system has no descriptors of processes")
CLOSED = RuntimeError("[/gloo/transport/tcp/pair.cc:553] Connection closed by peer")


@pytest.fixture
def others(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[subprocess.Popen[bytes]]]:
    """The processes of ranks 1 and 2; this one is rank 0."""
    processes = [subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) for _ in range(2)]

    def gather(into: list[Any], mine: Any, group: Any) -> None:
        into[:] = [mine, *((mine[0], one.pid) for one in processes)]

    for name, value in {"get_process_group_ranks": [0, 1, 2], "get_rank": 0}.items():
        monkeypatch.setattr(agreement.dist, name, lambda *_, value=value: value)
    monkeypatch.setattr(agreement.dist, "all_gather_object", gather)
    monkeypatch.setattr(agreement, "_PATIENCE_MS", 50)
    yield processes
    for one in processes:
        one.kill()
        one.communicate()


def test_the_rank_whose_process_ended_is_named(others: list[subprocess.Popen[bytes]]) -> None:
    ranks = RankProcesses()
    first, second = (f"rank {rank} (process {one.pid})" for rank, one in enumerate(others, 1))
    assert str(ranks.explain(CLOSED)).startswith(f"{first} or {second} failed or ended; see its own error")
    others[1].send_signal(signal.SIGKILL)
    others[1].wait()
    for error in (CLOSED, RuntimeError("Socket Timeout")):
        assert ranks.explain(error) == f"{second} ended; see its own error, or what killed it ({error})"
    ranks.close()


def test_who_waits_for_a_reduction_hears_of_a_rank_that_ended(
    others: list[subprocess.Popen[bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gloo does not tell: what was half sent when the other rank ended waits for its timeout."""
    monkeypatch.setattr(reductions, "_ASK_S", 0.05)
    monkeypatch.setattr(agreement, "_PASSED_ON_S", 0.2)
    ranks = RankProcesses()
    late: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    threading.Timer(0.2, late.set_result, [torch.ones(1)]).start()
    reductions.Reduction([], late, ranks.check).wait()
    assert late.done()
    others[0].kill()
    others[0].wait()
    with pytest.raises(RankLostError, match=rf"^rank 1 \(process {others[0].pid}\) ended; see its own error"):
        reductions.Reduction([], torch.futures.Future(), ranks.check).wait()
    ranks.close()


def stands_still() -> None:
    """The second rank; prints how many seconds the first one's abort took."""
    processes: list[int] = [0, 0]
    dist.all_gather_object(processes, os.getpid())
    reducer = OwnGroupsReducer(timeout=timedelta(seconds=40))
    if dist.get_rank():
        os.kill(os.getpid(), signal.SIGSTOP)
    else:
        while psutil.Process(processes[1]).status() != psutil.STATUS_STOPPED:
            time.sleep(0.02)
        reducer.start(0, torch.ones(8))
        began = time.monotonic()
        reducer.abort()
        print(time.monotonic() - began, flush=True)
        os.kill(processes[1], signal.SIGKILL)
    os._exit(0)


def test_an_abort_does_not_wait_for_a_rank_that_stands_still() -> None:
    assert float(run_ranks(2, __file__, "stands_still", timeout_s=60)[0].stdout.splitlines()[1]) < 10


@pytest.mark.usefixtures("others")
def test_other_errors_stay_as_they_are_and_ours_is_taken_out_of_what_torch_says_around_it() -> None:
    ranks = RankProcesses()
    for error in (RuntimeError("DataLoader timed out after 5 s"), ValueError("peer"), RankLostError("gloo: timed out")):
        assert ranks.explain(error) is None
    around = "Got the following error when running the callback: RankLostError: rank 1 ended\n\nAt:\n  file.py(1): then"
    assert ranks.explain(RuntimeError(around)) == "rank 1 ended"
    ranks.close()
