"""The most memory each phase of a training step needs.

    probe = MemoryProbe("cuda")
    probe.start()
    probe.switch("forward");  loss = model(x).sum()
    probe.switch("backward"); loss.backward()
    probe.switch("update");   optimizer.step()
    probe.stop()
    print(probe.peaks())   # {"forward": 1234, "backward": ..., "update": ..., "batch": ...} in bytes

On CUDA the number is the caching allocator's peak of allocated bytes. On a CPU it is the process's peak resident size,
which the Linux kernel keeps (``VmHWM``) and forgets on request (``5`` into ``/proc/self/clear_refs``); where it cannot
be asked, the resident size is sampled and :attr:`MemoryProbe.note` says so.

Measuring a phase means forgetting the peak before it: ``torch.cuda.max_memory_allocated``, or ``VmHWM`` and
``ru_maxrss`` of this process, afterwards tell the peak since the last phase began, not since the start;
:func:`~retime.foundations.measure.peak_so_far` still does.
"""

from __future__ import annotations

import os
import resource
import threading
import time
import weakref
from pathlib import Path

import psutil
import torch

from retime.foundations.measure.timing import OTHER, PHASES, check_phase

# Bytes in use over one step, sampled by a thread.

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
            used_bytes = torch.cuda.memory_allocated(self._device) if cuda else self._process.memory_info().rss
            self.samples.append(((time.perf_counter() - self._begin) * 1e3, int(used_bytes)))

    def _run(self) -> None:
        while not self._done.wait(SAMPLE_SECONDS):
            self.sample()


# The most memory that this process has had, kept although others forget it.
#
# Whoever in this project lets a peak be forgotten calls :func:`forget_peak`, which notes it first;
# :func:`peak_so_far` knows all of them. Resets by others cannot be seen.

CLEAR_REFS = Path("/proc/self/clear_refs")
STATUS = Path("/proc/self/status")
_CPU = torch.device("cpu")

_noted: dict[torch.device, int] = {}
os.register_at_fork(after_in_child=_noted.clear)
_watches: weakref.WeakSet[PeakWatch] = weakref.WeakSet()


class PeakWatch:
    """The most resident bytes of this process from now on, though others let its peak be forgotten.

    Attributes:
        begin_bytes: resident now.

    Raises:
        OSError, LookupError: as :func:`forget_peak`.
    """

    def __init__(self) -> None:
        forget_peak()
        self.begin_bytes = self.peak_bytes = status_bytes("VmRSS")
        _watches.add(self)

    def read(self) -> int:
        """Return the peak so far."""
        peak_so_far()
        return self.peak_bytes


def forget_peak(device: torch.device = _CPU) -> int:
    """The peak in bytes since it was forgotten last, or the process began; it begins again at what is in use now.

    Args:
        device: a CUDA device for its allocated bytes; any other for the process's resident size.

    Raises:
        OSError: the kernel does not forget the resident size's peak.
        LookupError: the kernel does not tell it.
    """
    peak = _present_peak(device)
    _note(device, peak)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    else:
        CLEAR_REFS.write_text("5")
    return peak


def peak_so_far(device: torch.device = _CPU) -> int:
    """The most bytes that this process has had: allocated on a CUDA device, otherwise resident."""
    try:
        peak = _present_peak(device)
    except (OSError, LookupError):  # no Linux
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return _note(device, peak)


def status_bytes(field: str) -> int:
    """A field of ``/proc/self/status`` in bytes, such as VmRSS.

    Raises:
        LookupError: the kernel does not tell.
    """
    for line in STATUS.read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024  # the kernel writes "kB" and means KiB
    raise LookupError(f"{STATUS} has no {field}")


def _present_peak(device: torch.device) -> int:
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else status_bytes("VmHWM")


def _note(device: torch.device, peak: int) -> int:
    place = device if device.type == "cuda" else _CPU
    _noted[place] = max(peak, _noted.get(place, 0))
    for watch in _watches if place == _CPU else ():
        watch.peak_bytes = max(peak, watch.peak_bytes)
    return _noted[place]


# The kernel counts resident pages per thread and adds them up late: a peak this close to the present size is one.
_COUNTER_SLACK_BYTES = 16 * 2**20


class MemoryProbe:
    """Peak bytes by phase of one step, of one batch or of several accumulated ones.

    Args:
        device: where the step computes. CUDA devices are asked for their allocator's peak; for all others the
            process's resident size counts, which holds the interpreter and its libraries too.

    Attributes:
        source: ``"cuda allocator"``, ``"VmHWM"`` or ``"sampled rss"``.
        note: why memory is sampled; empty where the peak is exact.

    Phases do not nest: a switch ends the phase before it. A phase that comes several times counts with its largest.
    """

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self._device = torch.device(device)
        cuda = self._device.type == "cuda"
        self.note = "" if cuda else _why_not_kernel_peak()
        self.source = "cuda allocator" if cuda else "sampled rss" if self.note else "VmHWM"
        self._sampler = MemorySampler() if self.note else None
        self._phase: str | None = None
        self._bytes: dict[str, int] = {}

    def start(self) -> None:
        """Open a batch, in no phase.

        Raises:
            RuntimeError: when the last batch was not stopped.
        """
        if self._phase is not None:
            raise RuntimeError("start() was called twice: call stop() at the end of each batch")
        if self._sampler is not None:
            self._sampler.start()
        else:
            forget_peak(self._device)
        self._phase = OTHER

    def switch(self, phase: str) -> None:
        """End the current phase and begin ``phase``: ``"forward"``, ``"backward"``, ``"update"`` or ``"other"``.

        Raises:
            ValueError: for any other phase.
            RuntimeError: before :meth:`start` or after :meth:`stop`.
        """
        check_phase(phase, self._phase is not None)
        assert self._phase is not None
        self._book(self._phase)
        self._phase = phase

    def stop(self) -> None:
        """Close the batch; does nothing when none is open."""
        if self._phase is not None:
            self._book(self._phase)
            if self._sampler is not None:
                self._sampler.stop()
        self._phase = None

    def peaks(self) -> dict[str, int]:
        """Peak bytes of each phase that ran, and of everything from ``start`` to ``stop`` under ``"batch"``.

        Raises:
            RuntimeError: when nothing was measured.
        """
        if not self._bytes:
            raise RuntimeError("nothing to report: call start() and stop() around a batch first")
        measured = {phase: self._bytes[phase] for phase in PHASES if phase in self._bytes}
        return {**measured, "batch": max(self._bytes.values())}

    def _book(self, phase: str) -> None:
        if self._sampler is not None:
            peak = max(nbytes for _, nbytes in self._sampler.take())
        else:  # no synchronise on CUDA: the allocator hands out memory when the host asks, ahead of the device
            peak = forget_peak(self._device)
        self._bytes[phase] = max(self._bytes.get(phase, 0), peak)


def _why_not_kernel_peak() -> str:
    """Empty when the kernel keeps and forgets this process's peak; otherwise what is in the way."""
    try:
        forget_peak()
        left_bytes = status_bytes("VmHWM") - status_bytes("VmRSS")
    except (OSError, LookupError) as error:
        return f"the process's peak cannot be reset ({error}): resident size sampled every {SAMPLE_SECONDS * 1e3:g} ms"
    if left_bytes > _COUNTER_SLACK_BYTES:
        return (
            f"{CLEAR_REFS} was written but VmHWM stayed {left_bytes} bytes above the resident size: "
            f"resident size sampled every {SAMPLE_SECONDS * 1e3:g} ms"
        )
    return ""
