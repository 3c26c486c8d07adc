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

from typing import Protocol

import torch

from retime.foundations.measure import process_peak
from retime.foundations.measure.memory_sampler import SAMPLE_SECONDS, MemorySampler
from retime.foundations.measure.process_peak import forget_peak, status_bytes, take_peak
from retime.foundations.measure.step_timer import OTHER, PHASES, check_phase

__all__ = ["MemoryProbe"]

# The kernel counts resident pages per thread and adds them up late: a peak this close to the present size is one.
_COUNTER_SLACK_BYTES = 16 * 2**20


class _Peak(Protocol):
    """A peak of bytes in use that can be forgotten."""

    name: str

    def open(self) -> None:
        """Begin watching."""

    def take(self) -> int:
        """The peak since :meth:`open` or the last ``take``, and begin anew."""

    def close(self) -> None:
        """Stop watching."""


class _CudaPeak:
    name = "cuda allocator"

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def open(self) -> None:
        forget_peak(self._device)

    def take(self) -> int:
        # No synchronise: the allocator hands out memory when the host asks, ahead of the device.
        return take_peak(self._device)

    def close(self) -> None:
        pass


class _KernelPeak:
    name = "VmHWM"

    def open(self) -> None:
        forget_peak()

    def take(self) -> int:
        return take_peak()

    def close(self) -> None:
        pass


class _SampledPeak:
    name = "sampled rss"

    def __init__(self) -> None:
        self._sampler = MemorySampler("cpu")

    def open(self) -> None:
        self._sampler.start()

    def take(self) -> int:
        return max(nbytes for _, nbytes in self._sampler.take())

    def close(self) -> None:
        self._sampler.stop()


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
        device = torch.device(device)
        self.note = ""
        self._peak: _Peak
        if device.type == "cuda":
            self._peak = _CudaPeak(device)
        else:
            self.note = _why_not_kernel_peak()
            self._peak = _SampledPeak() if self.note else _KernelPeak()
        self.source = self._peak.name
        self._phase: str | None = None
        self._bytes: dict[str, int] = {}

    def start(self) -> None:
        """Open a batch, in no phase.

        Raises:
            RuntimeError: when the last batch was not stopped.
        """
        if self._phase is not None:
            raise RuntimeError("start() was called twice: call stop() at the end of each batch")
        self._peak.open()
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
            self._peak.close()
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
        self._bytes[phase] = max(self._bytes.get(phase, 0), self._peak.take())


def _why_not_kernel_peak() -> str:
    """Empty when the kernel keeps and forgets this process's peak; otherwise what is in the way."""
    try:
        forget_peak()
        left_bytes = status_bytes("VmHWM") - status_bytes("VmRSS")
    except (OSError, LookupError) as error:
        return f"the process's peak cannot be reset ({error}): resident size sampled every {SAMPLE_SECONDS * 1e3:g} ms"
    if left_bytes > _COUNTER_SLACK_BYTES:
        return (
            f"{process_peak.CLEAR_REFS} was written but VmHWM stayed {left_bytes} bytes above the resident size: "
            f"resident size sampled every {SAMPLE_SECONDS * 1e3:g} ms"
        )
    return ""
