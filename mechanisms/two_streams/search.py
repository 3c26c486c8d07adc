"""Which way of running a step is the fastest: a short search in the first steps of training."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass

import torch

from retime.foundations.streams import has_streams

BLOCK_STEPS = 4
"""Steps in a row with one setting; the first of them is not counted."""
ROUNDS = 2
LEAST_GAIN = 1.01
"""By so much two streams have to be faster than a plain step to be worth their memory."""


@dataclass(frozen=True)
class Setting:
    """How a step runs.

    Args:
        two_streams: whether weight gradients run on the sub-stream.
        forward_threads: of each kernel of the forward pass, on a CPU; 0: as it is.
        main_threads: of each kernel of the backward pass's main stream.
        sub_threads: of each kernel of the sub-stream.
        graph: whether parts of the model are replayed as CUDA graphs.
    """

    two_streams: bool
    forward_threads: int = 0
    main_threads: int = 0
    sub_threads: int = 0
    graph: bool = False

    def __str__(self) -> str:
        if self.graph:
            return f"{'two streams' if self.two_streams else 'one stream'} in a graph"
        if not self.two_streams:
            many = "s" if self.forward_threads > 1 else ""
            return "plain" + (f" with {self.forward_threads} thread{many}" if self.forward_threads else "")
        if not self.forward_threads:
            return "two streams"
        return f"two streams with {self.main_threads} + {self.sub_threads} threads, {self.forward_threads} forward"


def settings_for(device: torch.device, threads: int, *, graph: bool = False) -> list[Setting]:
    """Return what to try on this device, the plain step first.

    On a CPU the threads of a kernel are halved too: with kernels too small for all cores a plain step may be faster
    with fewer, and two streams are to be compared with the best plain one.

    Args:
        device: of the model.
        threads: that kernels have on a CPU.
        graph: whether CUDA graphs may be captured.
    """
    if has_streams(device):
        return [Setting(two, graph=one) for one in ((False, True) if graph else (False,)) for two in (False, True)]
    plain = Setting(False, threads, threads)
    if threads < 2:
        return [plain]
    half = threads // 2
    return [
        plain,
        Setting(False, half, half),
        Setting(True, threads, threads - half, half),
        Setting(True, half, threads - half, half),
    ]


class Search:
    """Goes through settings, some steps each, round by round.

    A step is the time between the beginnings of two forward passes, so that it has everything that a step has.

    Args:
        settings: the plain one first.
        device: waited for at the beginning of each step while the search lasts, if it is a CUDA device.
    """

    def __init__(self, settings: list[Setting], device: torch.device) -> None:
        self._device = device
        self._order = [setting for _ in range(ROUNDS) for setting in settings for _ in range(BLOCK_STEPS)]
        self._step = 0
        self._began: float | None = None
        self.times_ms: dict[Setting, list[float]] = {setting: [] for setting in settings}

    def next_step(self) -> Setting | None:
        """Say that a step begins.

        Returns:
            Its setting; None: the search has ended.
        """
        if has_streams(self._device):
            torch.cuda.synchronize(self._device)
        now = time.perf_counter()
        if self._began is not None:
            if self._step % BLOCK_STEPS:
                self.times_ms[self._order[self._step]].append((now - self._began) * 1000)
            self._step += 1
        self._began = now
        return self._order[self._step] if self._step < len(self._order) else None

    def medians_ms(self) -> dict[Setting, float]:
        """Return the median step of each setting."""
        return {setting: statistics.median(times) for setting, times in self.times_ms.items() if times}

    def best(self) -> Setting:
        """Return the fastest setting.

        A plain one stays unless two streams, or a graph, are faster than every plain one by :data:`LEAST_GAIN`, and the
        first plain one unless another is faster than it by as much.
        """
        medians = self.medians_ms()
        first = next(iter(medians))
        plain = min((one for one in medians if not (one.two_streams or one.graph)), key=medians.__getitem__)
        fastest = min(medians, key=medians.__getitem__)
        if (fastest.two_streams or fastest.graph) and medians[plain] >= LEAST_GAIN * medians[fastest]:
            return fastest
        return plain if medians[first] >= LEAST_GAIN * medians[plain] else first
