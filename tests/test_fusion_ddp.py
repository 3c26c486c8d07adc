"""Fusion under bare DistributedDataParallel: accumulation, unused layers, bucket views, static graphs, guards."""

import os
import socket
import subprocess
import sys
from pathlib import Path


def test_two_ranks_keep_the_bits_of_plain_ddp() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2"}
    worker = str(Path(__file__).with_name("fusion_ddp_worker.py"))
    ranks = [
        subprocess.Popen(
            [sys.executable, worker],
            env={**os.environ, **common, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        outputs = [rank.communicate(timeout=180) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    for number, (out, err) in enumerate(outputs):
        assert f"rank {number}: same bits" in out, err
