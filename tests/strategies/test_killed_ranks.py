"""A rank that gets a signal ends, and the others end with its name, whatever they wait in; nothing is left."""

import re

import pytest

from support.process_ends import in_shared_memory, runs
from support.ranks import run_ranks
from support.time_limits import limit_s

ENDS = {"SIGTERM": "SIGTERMException", "SIGINT": "SystemExit 1", "SIGKILL": None}
"""Signals, and how they end a rank's fit."""
HITS = [
    ("SIGTERM", "training", 0),
    ("SIGINT", "training", 1),
    ("SIGKILL", "training", 1),
    ("SIGTERM", "validation", 1),
    ("SIGKILL", "validation", 0),
]
"""Signals, where they come, and to which rank."""
HITS_OF = {
    "ooo_pipeline": HITS,
    "update_on_host": HITS,
    "ooo_ddp": HITS[::2],  # two that wait in DDP's reductions
    "fused_optimizer_ddp": HITS[1::2],
}
SOON = [("update_on_host", HITS[0]), ("ooo_pipeline", HITS[-1])]
"""`make test` has one for each way to wait: reductions, and a pipeline's messages."""
ALL_HITS = [
    pytest.param(name, *hit, marks=[] if (name, hit) in SOON else [pytest.mark.long])
    for name, hits in HITS_OF.items()
    for hit in hits
]
LATER = [(0, 0), (0, 50), (1, 20)]
"""Which rank's signal comes first, and how many milliseconds the other's comes later."""
ALL_LATER = [*(("ooo_pipeline", *one) for one in LATER), ("ooo_ddp", *LATER[1]), ("fused_optimizer_ddp", *LATER[2])]


@pytest.mark.parametrize(("name", "number", "phase", "rank"), ALL_HITS)
def test_a_signal_ends_all_ranks(name: str, number: str, phase: str, rank: int) -> None:
    ranks = run_ranks(2, "killed_fit.py", name, phase, number, str(rank), timeout_s=60)
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
@pytest.mark.parametrize(("name", "rank", "later_ms"), ALL_LATER)
def test_a_signal_to_all_ranks_ends_all_alike(name: str, rank: int, later_ms: int) -> None:
    for one in run_ranks(2, "killed_fit.py", name, "training", "SIGTERM", str(rank), str(later_ms), timeout_s=60):
        assert "\ncallback SIGTERMException\nSIGTERMException" in one.stdout, one.stdout + one.stderr[-2000:]
