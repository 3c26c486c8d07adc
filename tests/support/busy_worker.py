"""A worker that starts a process and is then busy, and a parent to be killed by foundations/test_workers.py."""

import os
import subprocess
import sys
import time
from typing import Any

import torch

from retime.foundations.measure import status_bytes
from retime.foundations.workers import Worker, keep_heap, tell, touch_libraries


def serve(request: dict[str, Any]) -> Any:
    if request["do"] == "answer":
        launchers = {name: os.environ[name] for name in ("RANK", "LOCAL_RANK") if name in os.environ}
        return {3: (1, 2), "launcher's": launchers}
    if request["do"] == "fail":
        print("before it failed", flush=True)
        raise ValueError("had enough")
    if request["do"] == "measure":
        touch_libraries()
        keep_heap()
        before = status_bytes("VmRSS")
        torch.ones(2**24)  # 64 MiB, which are free again
        return before, status_bytes("VmRSS") - before
    child = subprocess.Popen(["sleep", "600"])
    tell(f"{os.getpid()} {child.pid}")
    time.sleep(600)
    return None


class Counter:
    """Answers by its methods."""

    def __init__(self) -> None:
        self.total = 0

    def add(self, request: dict[str, Any]) -> int:
        self.total += request["number"]
        return self.total


def main() -> None:
    """Start a forked or a started worker, print its pid and its child's, and wait."""
    environment: dict[str, str] | None = {} if sys.argv[1] == "started" else None
    Worker(serve, {"do": "work"}, environment=environment, progress=lambda text: print(text, flush=True))


if __name__ == "__main__":
    from support.busy_worker import main as imported

    imported()  # a worker imports `serve` from here, not from `__main__`
