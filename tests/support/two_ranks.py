"""Run a worker script as gloo ranks, two or more, and collect what they print."""

import os
import socket
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path


def run_two_ranks(script: str, *arguments: str, timeout_s: float = 180) -> list[subprocess.CompletedProcess[str]]:
    """Start `tests/support/<script>` twice, with the variables torchrun sets; every process is gone afterwards."""
    return run_ranks(2, script, *arguments, timeout_s=timeout_s)


def run_ranks(
    count: int, script: str, *arguments: str, timeout_s: float = 180
) -> list[subprocess.CompletedProcess[str]]:
    """Start `tests/support/<script>` so many times, with torchrun's variables; every process is gone afterwards."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    tests = Path(__file__).parents[1]
    common = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(count),
        "GROUP_RANK": "0",
        "TORCHELASTIC_RUN_ID": "tests",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(tests), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep),
    }
    command = [sys.executable, str(Path(__file__).with_name(script)), *arguments]
    with ExitStack() as ends:  # closes pipes, else they would be warned of in a later test
        ranks = []
        for rank in range(count):
            worker = subprocess.Popen(
                command,
                env={**os.environ, **common, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            ranks.append(ends.enter_context(worker))
            ends.callback(worker.kill)
        outputs = [worker.communicate(timeout=timeout_s) for worker in ranks]
    return [
        subprocess.CompletedProcess(command, rank.returncode, out, err)
        for rank, (out, err) in zip(ranks, outputs, strict=True)
    ]
