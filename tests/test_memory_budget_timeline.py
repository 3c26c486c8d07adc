"""MemoryTimeline between fits and processes: what it holds, and what it can predict."""

from __future__ import annotations

import pickle
from typing import Any

import memory_budget_support as support
from memory_budget_support import Net, fit
from retime.callbacks import MemoryTimeline
from retime.mechanisms.memory.storages import tensors_in

pytestmark = support.IGNORED


def test_goes_to_other_processes() -> None:
    """``ddp_spawn`` pickles callbacks, before the first fit and after it."""
    timeline = MemoryTimeline(every_n_steps=1, png=False, warm_up=0)
    for fits in (1, 2):
        timeline = pickle.loads(pickle.dumps(timeline))
        fit(Net(), callbacks=[timeline])
        assert len(timeline.steps) == 3 * fits


class Stops(Net):
    """Ends an epoch before its second batch, which callbacks have seen."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        return -1 if batch_idx == 1 else None


def test_holds_no_batch_of_a_step_that_was_left() -> None:
    timeline = MemoryTimeline(every_n_steps=1, png=False, warm_up=0)
    fit(Stops(), callbacks=[timeline])
    assert not tensors_in(list(vars(timeline).values()))
    assert len(timeline.steps) == 1
