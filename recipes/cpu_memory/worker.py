"""Trains one network in a process of its own, started with one allocator, and says how long steps took."""

from __future__ import annotations

import gc
from typing import Any

import torch

from retime.callbacks import CPUMemoryPool
from retime.foundations.cpu_pool import MemoryPool, trim_heap
from retime.foundations.measure import MemoryProbe, status_bytes
from retime.recipes.core.build import CPU, build_model
from retime.recipes.fusion.variants import VARIANTS, BareLoop


class Server:
    """Builds a network, trains blocks of steps, and says at the end what the process holds."""

    def build(self, request: dict[str, Any]) -> None:
        """Make the network, with the pool or without."""
        torch.set_num_threads(1)
        batch = torch.load(request["batch"])
        self._counter = MemoryPool()
        if request["pool"]:  # libraries load, and keep what is theirs and not the pool's for this network, before
            with CPUMemoryPool():
                loop = _loop({**request, "variant": "fused"}, batch)
                for _ in range(2):
                    loop.step()
                del loop
                gc.collect()
            trim_heap()
        self._base = status_bytes("VmRSS")
        self._pool = CPUMemoryPool()
        if request["pool"]:
            self._pool.__enter__()
            if not self._counter.install():
                raise RuntimeError(f"there is no pool here: {self._counter.why_not}")
            self._counter.reset_peaks()
        self._loop = _loop(request, batch)
        self._probe = MemoryProbe(CPU)
        self._probe.start()

    def block(self, request: dict[str, Any]) -> float:
        """Return the milliseconds of the typical one of so many steps."""
        return self._loop.block(request["steps"])[-1]

    def end(self, request: dict[str, Any]) -> dict[str, Any]:
        """Return the bytes of the process and, with the pool, of its tensors; and what reports say."""
        self._probe.stop()
        peak = self._probe.peaks()["batch"]
        answer: dict[str, Any] = {"resident_bytes": peak}
        if self._counter.installed:
            answer |= {
                "grown_bytes": peak - self._base,
                "live_bytes": self._counter.counts().peak_live,
                "report": self._pool.report().one_line,
            }
        if self._loop.wired.report is not None:
            answer["fusion"] = self._loop.wired.report().one_line
        return answer


def _loop(request: dict[str, Any], batch: Any) -> BareLoop:
    model = build_model(request["model"], CPU, request["seed"])
    return BareLoop(VARIANTS[request["variant"]], model, batch, request["optimizer"])
