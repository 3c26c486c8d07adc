"""A rank that gets a signal ends, and the others end with its name, whatever they wait in; nothing is left."""

import re

import pytest

from support.process_ends import in_shared_memory, runs
from support.time_limits import limit_s
from support.two_ranks import run_two_ranks

ENDS = {"SIGTERM": "SIGTERMException", "SIGINT": "SystemExit 1", "SIGKILL": None}
"""Signals, and how they end a rank's fit."""
NAMES = ("ooo_pipeline", "update_on_host", "ooo_ddp", "fused_optimizer_ddp")
HITS = [
    ("SIGTERM", "training", 0),
    ("SIGINT", "training", 1),
    ("SIGKILL", "training", 1),
    ("SIGTERM", "validation", 1),
    ("SIGKILL", "validation", 0),
]
"""Signals, where they come, and to which rank."""
ALL_HITS = [
    pytest.param(name, *hit, marks=[pytest.mark.long] if name in NAMES[2:] or hit not in (HITS[0], HITS[-1]) else [])
    for name in NAMES
    for hit in HITS
]
"""`make test` has two for each way to wait: a pipeline's messages, and reductions."""


@pytest.mark.parametrize(("name", "number", "phase", "rank"), ALL_HITS)
def test_a_signal_ends_all_ranks(name: str, number: str, phase: str, rank: int) -> None:
    ranks = run_two_ranks("killed_fit.py", name, phase, number, str(rank), timeout_s=60)
    hit, other = ranks[rank], ranks[1 - rank]
    assert f"\n{ENDS[number]}" in hit.stdout if ENDS[number] else hit.returncode == -9, hit.stdout + hit.stderr[-2000:]
    process, _, how = other.stdout.partition("\n")
    lost = rf"^(RankLostError|RuntimeError) .*rank {rank} .*(ended|failed)"
    assert re.search(lost, how, re.MULTILINE), how + other.stderr[-2000:]
    began = float(re.findall(r"hit (\S+)", hit.stdout)[0])
    assert all(float(end) - began < limit_s(15) for one in ranks for end in re.findall(r"end (\S+)\n", one.stdout))
    for ended in (process, hit.stdout.split()[0]):
        assert not runs(ended)
        assert not in_shared_memory(ended)


@pytest.mark.long
@pytest.mark.parametrize(("rank", "later_ms"), [(0, 0), (0, 50), (1, 20)])
@pytest.mark.parametrize("name", [name for name in NAMES if name != "update_on_host"])
def test_a_signal_to_all_ranks_ends_all_alike(name: str, later_ms: int, rank: int) -> None:
    for one in run_two_ranks("killed_fit.py", name, "training", "SIGTERM", str(rank), str(later_ms), timeout_s=60):
        assert "\ncallback SIGTERMException\nSIGTERMException" in one.stdout, one.stdout + one.stderr[-2000:]
