"""How much of its processor core a training run leaves idle."""

import os
from typing import Any

import psutil
from lightning.pytorch import Callback


class IdleClock(Callback):
    """Milliseconds a step in which this process's cores had nothing to do, kernel and other processes included.

    Only a process pinned to cores of its own learns something from it. The kernel counts in ticks of 10 ms, so it takes
    a few steps.

    Args:
        warm_up: steps that are not counted.
    """

    def __init__(self, warm_up: int) -> None:
        self._warm_up = warm_up
        self._steps = 0
        self._began = self._ended = 0.0

    def on_train_batch_end(self, *_: Any) -> None:
        self._steps += 1
        if self._steps == self._warm_up:
            self._began = _idle_ms()
        elif self._steps > self._warm_up:
            self._ended = _idle_ms()

    @property
    def idle_ms(self) -> float:
        """Of each counted step, all cores together.

        Raises:
            ValueError: no step was counted.
        """
        counted = self._steps - self._warm_up
        if counted < 1:
            raise ValueError(f"{self._steps} steps leave none to count after {self._warm_up} of warm-up: train longer")
        return max(0.0, self._ended - self._began) / counted


def _idle_ms() -> float:
    times = psutil.cpu_times(percpu=True)
    return float(1e3 * sum(times[core].idle + times[core].iowait for core in os.sched_getaffinity(0)))
