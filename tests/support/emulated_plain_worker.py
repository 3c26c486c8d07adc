"""A rank without torch, quick to start: does what the request says. See test_emulated_cluster.py."""

import json
import os
import signal
import sys
import time
from pathlib import Path

request = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
rank = int(os.environ["RANK"])
print(f"@ rank {rank} runs", flush=True)
if request["do"] == "die" and rank == 1:
    print("rank 1 says goodbye", flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
if request["do"] in ("die", "sleep"):
    time.sleep(600)
if request["do"] == "answer":
    Path(sys.argv[2]).write_text(json.dumps({"rank": rank, "address": os.environ["MASTER_ADDR"]}), encoding="utf-8")
