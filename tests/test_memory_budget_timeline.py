"""MemoryTimeline between fits and processes: what it holds, and what it can predict."""

from __future__ import annotations

import pickle

import memory_budget_support as support
from memory_budget_support import Net, fit
from retime.callbacks import MemoryTimeline

pytestmark = support.IGNORED


def test_goes_to_other_processes() -> None:
    """``ddp_spawn`` pickles callbacks, before the first fit and after it."""
    timeline = MemoryTimeline(every_n_steps=1, png=False, warm_up=0)
    for fits in (1, 2):
        timeline = pickle.loads(pickle.dumps(timeline))
        fit(Net(), callbacks=[timeline])
        assert len(timeline.steps) == 3 * fits
