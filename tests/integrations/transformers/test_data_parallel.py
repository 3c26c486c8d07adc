"""Objects of a ``transformers.Trainer`` on two ranks, beside the plain Trainer's DistributedDataParallel."""

import sys

import pytest

pytest.importorskip("transformers", reason="needs the extra lightning-retime[transformers]")
from support.ranks import run_two_ranks

WAYS = ("forward", "backward", "out of order", "host", "budget")


@pytest.mark.skipif(sys.platform != "linux", reason="shared memory is for Linux")
def test_two_ranks_have_the_same_bits() -> None:
    for run in run_two_ranks("transformers_worker.py"):
        assert [way for way in WAYS if f"same bits {way}" not in run.stdout] == [], run.stderr[-3000:]
