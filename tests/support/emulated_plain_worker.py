"""A rank without a process group: does what the request says. See recipes/emulated/test_cluster.py."""

import os
import signal
import time
from typing import Any

from retime.foundations.workers import tell


def serve(request: dict[str, Any]) -> dict[str, Any]:
    rank = int(os.environ["RANK"])
    tell(f"rank {rank} runs as {os.getpid()}")
    if request["do"] == "die" and rank == 1:
        print("rank 1 says goodbye", flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    if request["do"] in ("die", "sleep"):
        time.sleep(600)
    if request["do"] == "nothing":
        os._exit(3)
    return {"rank": rank, "address": os.environ["MASTER_ADDR"]}
