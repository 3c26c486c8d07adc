"""Bytes in use over one step, sampled by a thread.

sampler = MemorySampler("cpu")
sampler.start(); loss = step(batch); sampler.switch("backward"); loss.backward(); sampler.stop()
sampler.samples        # [(ms since the start, bytes), ...]
"""

from __future__ import annotations

import threading
import time

import psutil
import torch

SAMPLE_SECONDS = 0.001


class MemorySampler:
    """Samples what a process holds: resident bytes on a CPU, the caching allocator's allocated bytes on CUDA.

    Args:
        device: where the step computes.

    Attributes:
        samples: milliseconds since :meth:`start`, and bytes, in order; one at each change of phase at least.
        phases: milliseconds at which each phase began, and its name.
    """

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self._device = torch.device(device)
        self._process = psutil.Process()
        self._lock = threading.Lock()
        self._done = threading.Event()
        self._thread: threading.Thread | None = None
        self._begin = 0.0
        self.samples: list[tuple[float, int]] = []
        self.phases: list[tuple[float, str]] = []

    def start(self) -> None:
        """Begin anew.

        Raises:
            RuntimeError: it runs already.
        """
        if self._thread is not None:
            raise RuntimeError("start() was called twice: call stop() first")
        self.samples, self.phases = [], []
        self._begin = time.perf_counter()
        self.sample()
        self._done.clear()
        self._thread = threading.Thread(target=self._run, name="retime-memory-sampler", daemon=True)
        self._thread.start()

    def switch(self, phase: str) -> None:
        """The step goes on with another phase."""
        self.phases.append(((time.perf_counter() - self._begin) * 1e3, phase))
        self.sample()

    def stop(self) -> None:
        """End; does nothing when it does not run."""
        if self._thread is None:
            return
        self._done.set()
        self._thread.join()
        self._thread = None
        self.sample()

    def take(self) -> list[tuple[float, int]]:
        """The samples so far, which are then forgotten but for one that is taken now."""
        self.sample()
        with self._lock:
            taken, self.samples = self.samples, self.samples[-1:]
        return taken

    def sample(self) -> None:
        """Take a sample now."""
        with self._lock:
            cuda = self._device.type == "cuda"
            held = torch.cuda.memory_allocated(self._device) if cuda else self._process.memory_info().rss
            self.samples.append(((time.perf_counter() - self._begin) * 1e3, int(held)))

    def _run(self) -> None:
        while not self._done.wait(SAMPLE_SECONDS):
            self.sample()
