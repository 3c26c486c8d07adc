"""Runs a part of a recipe in a fresh process: distributed jobs, and peaks of memory that a process has only once."""

import json
import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

# What a launcher leaves in the environment; inherited, it would make a new job join the old one as a single rank.
_LAUNCHER_VARIABLES = (
    *("LOCAL_RANK", "RANK", "GROUP_RANK", "NODE_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"),
    *("MASTER_ADDR", "MASTER_PORT", "PL_TRAINER_STRATEGY", "PL_TRAINER_DEVICES", "TORCHELASTIC_RUN_ID"),
)


def run_fresh(module: str, request: dict[str, Any], *, timeout_s: float = 600) -> dict[str, Any]:
    """Run `python -m module <request.json> <answer.json>` and return the answer.

    Raises:
        RuntimeError: the process failed or took longer than `timeout_s`; the message ends with what it printed.
    """
    environment = {key: value for key, value in os.environ.items() if key not in _LAUNCHER_VARIABLES}
    environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory(prefix="retime-") as folder:
        question, answer = Path(folder, "request.json"), Path(folder, "answer.json")
        question.write_text(json.dumps(request), encoding="utf-8")
        command = [sys.executable, "-m", module, str(question), str(answer)]
        try:
            done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=timeout_s)
        except subprocess.TimeoutExpired as error:
            raise RuntimeError(f"{module} took longer than {timeout_s:.0f} s: use smaller sizes") from error
        if done.returncode or not answer.exists():
            raise RuntimeError(
                f"{module} failed (exit status {done.returncode}):\n{(done.stdout + done.stderr)[-4000:]}"
            )
        found: dict[str, Any] = json.loads(answer.read_text(encoding="utf-8"))
        return found


def free_port() -> int:
    """A TCP port that nobody listens on at the moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def serve(answer: Any) -> None:
    """The other side of `run_fresh`: call `answer(request)` and write what it returns, unless that is None."""
    question, reply = Path(sys.argv[1]), Path(sys.argv[2])
    found = answer(json.loads(question.read_text(encoding="utf-8")))
    if found is not None:
        draft = reply.with_suffix(".part")
        draft.write_text(json.dumps(found), encoding="utf-8")
        os.replace(draft, reply)
