"""A rank that gets a signal ends, and the others end with its name, whatever they wait in; nothing is left."""

import os
import re
from itertools import product

import psutil
import pytest

from support.two_ranks import run_two_ranks

ENDS = {"SIGTERM": "SIGTERMException", "SIGINT": "SystemExit 1", "SIGKILL": None}
"""Signals, and how they end a rank's fit."""
NAMES, PHASES = ("ooo_pipeline", "update_on_host", "ooo_ddp", "fused_optimizer_ddp"), ("training", "validation")
CASES = [
    (name, number, phase)
    for name, number, phase in product(NAMES, ENDS, PHASES)
    if name in NAMES[:2] or (number, phase) != ("SIGINT", "validation")  # the others validate as ddp does
]


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(("name", "number", "phase"), CASES)
def test_a_signal_ends_all_ranks(name: str, number: str, phase: str, rank: int) -> None:
    ranks = run_two_ranks("killed_fit.py", name, phase, number, str(rank), timeout_s=60)
    hit, other = ranks[rank], ranks[1 - rank]
    assert f"\n{ENDS[number]}" in hit.stdout if ENDS[number] else hit.returncode == -9, hit.stdout + hit.stderr[-2000:]
    process, _, how = other.stdout.partition("\n")
    assert re.match(rf"(RankLostError|RuntimeError) .*rank {rank} .*(ended|failed)", how), how + other.stderr[-2000:]
    began = float(re.findall(r"hit (\S+)", hit.stdout)[0])
    assert all(float(end) - began < 15 for one in ranks for end in re.findall(r"end (\S+)\n", one.stdout))
    for ended in (process, hit.stdout.split()[0]):
        assert not psutil.pid_exists(int(ended))
        assert not [file for file in os.listdir("/dev/shm") if ended in file]
