"""Starts one process a host, watches them, and hands back what each answered. If one dies, the others are ended."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from retime.recipes.emulated.namespaces import temporary_folder
from retime.recipes.emulated.network import Network

PROGRESS = "@ "
"""A rank's output lines that begin so are for `progress`."""
TAIL = 2000
_POLL_SECONDS = 0.05
_GRACE_SECONDS = 3.0
"""How long the other ranks may take to say in their output what they saw of a rank's death."""


class RankError(RuntimeError):
    """A rank died, or all took too long; the message has the end of each rank's output."""


def run_ranks(
    network: Network,
    module: str,
    request: dict[str, Any],
    *,
    timeout_s: float = 600,
    environment: dict[str, str] | None = None,
    progress: Callable[[str], None] = lambda text: None,
) -> list[Any]:
    """Run `python -m module` on every host and return their answers by rank; the module calls `serve_rank`.

    The ranks get torchrun's environment variables, so Lightning joins them and starts none of its own. `environment`
    adds more. Rank 0's output lines that begin with "@ " go to `progress`.

    Raises:
        RankError: a rank died, ended without an answer, or `timeout_s` went by. None is left running.
    """
    with temporary_folder() as folder:
        (folder / "request.json").write_text(json.dumps(request), encoding="utf-8")
        ranks: list[subprocess.Popen[bytes]] = []
        try:
            for rank in range(len(network.hosts)):
                ranks.append(  # noqa: PERF401 -- one by one, so that those started are ended if the next fails
                    _start(network, rank, module, folder, environment or {})
                )
            _watch(ranks, folder, module, timeout_s, progress)
        finally:
            for process in ranks:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        return [json.loads(_answer(folder, rank).read_text(encoding="utf-8")) for rank in range(len(ranks))]


def _start(
    network: Network, rank: int, module: str, folder: Path, environment: dict[str, str]
) -> subprocess.Popen[bytes]:
    host = network.hosts[rank]
    variables = {
        "MASTER_ADDR": network.hosts[0].address,
        "MASTER_PORT": str(network.port),
        "WORLD_SIZE": str(len(network.hosts)),
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(len(network.hosts)),
        "GROUP_RANK": "0",
        "TORCHELASTIC_RUN_ID": "retime",  # Lightning then starts no processes of its own
        "GLOO_SOCKET_IFNAME": host.interface,
        "OMP_NUM_THREADS": "1",
        "PYTHONUNBUFFERED": "1",
        "RETIME_PARENT": str(os.getpid()),
    }
    command = [*host.launch, sys.executable, "-m", module, str(folder / "request.json"), str(_answer(folder, rank))]
    with _log(folder, rank).open("wb") as log:
        # A session of its own: Ctrl-C reaches the parent alone, which then ends the ranks and what they started.
        return subprocess.Popen(
            command, env={**os.environ, **environment, **variables}, stdout=log, stderr=log, start_new_session=True
        )


def _watch(
    ranks: list[subprocess.Popen[bytes]],
    folder: Path,
    module: str,
    timeout_s: float,
    progress: Callable[[str], None],
) -> None:
    deadline, shown, reason = time.monotonic() + timeout_s, 0, ""
    while any(process.poll() is None for process in ranks):
        time.sleep(_POLL_SECONDS)
        shown = _show(_log(folder, 0), shown, progress)
        dead = [rank for rank, process in enumerate(ranks) if process.poll() not in (None, 0)]
        if dead and not reason:
            reason = f"rank {dead[0]} of {len(ranks)} died ({_death(ranks[dead[0]].returncode)})"
            deadline = time.monotonic() + _GRACE_SECONDS
        if time.monotonic() > deadline:
            reason = reason or f"the ranks took longer than {timeout_s:.0f} s: use smaller sizes or fewer rounds"
            break
    _show(_log(folder, 0), shown, progress)
    bad = [rank for rank, process in enumerate(ranks) if process.returncode not in (None, 0)]
    silent = [rank for rank in range(len(ranks)) if not _answer(folder, rank).exists()]
    if not reason and bad:
        reason = f"rank {bad[0]} of {len(ranks)} died ({_death(ranks[bad[0]].returncode)})"
    if not reason and silent:
        reason = f"rank {silent[0]} of {len(ranks)} ended without an answer"
    if reason:
        tails = [f"--- rank {rank}:\n{_tail(_log(folder, rank))}" for rank in range(len(ranks))]
        raise RankError("\n".join([f"{module}: {reason}", *tails]))


def _show(log: Path, start: int, progress: Callable[[str], None]) -> int:
    """Hand on the new complete lines for `progress`; returns how far the log was read, in bytes."""
    with log.open("rb") as stream:
        stream.seek(start)
        new = stream.read()
    whole = new[: new.rfind(b"\n") + 1]
    for line in whole.decode(errors="replace").splitlines():
        if line.startswith(PROGRESS):
            progress(line.removeprefix(PROGRESS))
    return start + len(whole)


def _death(code: int) -> str:
    return f"by {signal.Signals(-code).name}" if code < 0 else f"exit status {code}"


def _tail(log: Path) -> str:
    return log.read_text(errors="replace")[-TAIL:].strip() or "(no output)"


def _log(folder: Path, rank: int) -> Path:
    return folder / f"{rank}.log"


def _answer(folder: Path, rank: int) -> Path:
    return folder / f"{rank}.json"
