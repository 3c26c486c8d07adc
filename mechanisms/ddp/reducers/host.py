"""Gradients of CUDA ranks are summed in host memory, by the processors, while the backward pass goes on.

moDNN, section 6.2 (Figure 8): devices without a fast way to one another send gradients through the host's memory either
way, so the host may as well add them up. Each bucket leaves on a stream of its own as soon as it is full, a thread
reduces one after the other over gloo, and each comes back on the same stream; the compute stream waits at the end of
the backward pass only. The device needs no memory for it.
"""

from collections.abc import Hashable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from retime.mechanisms.ddp.own_group import close_group, own_group
from retime.mechanisms.streams import Mark, SideStream

__all__ = ["HostReducer"]


class HostReducer:
    """Sums in host memory, in a process group of its own; where the values lie on a CPU, too.

    Args:
        device: where the values are.
        group: whose ranks; None: all. Each of them makes one of these.
        timeout: of a sum; None is torch's default.

    Attributes:
        bytes_out: sent to the host so far.
    """

    def __init__(self, device: torch.device | str = "cpu", group: Any = None, timeout: timedelta | None = None) -> None:
        # Of its own: the thread's sums have no order with whatever else the ranks say to one another.
        self._group = own_group(group, backend="gloo", timeout=timeout)
        # One thread: all ranks sum their buckets in the same order.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="retime-host-reducer")
        self._buffers: dict[Hashable, Tensor] = {}
        self._side = SideStream(device)
        self.bytes_out = 0

    def start(self, key: Hashable, values: Tensor, *, urgent: bool = False) -> Future[Tensor]:
        """Begin to replace ``values``, shape ``(n,)``, by their sum over the ranks.

        Args:
            key: values that come again under the same key use the same host memory.
            values: on the device.
            urgent: has no effect: one thread sums all.
        """
        buffer = self._buffers.get(key)
        if buffer is None or buffer.shape != values.shape or buffer.dtype != values.dtype:
            buffer = torch.empty(values.shape, dtype=values.dtype, device="cpu", pin_memory=values.is_cuda)
            self._buffers[key] = buffer
        self.bytes_out += values.nbytes
        left = self._side.copy(buffer, values)
        done: Future[Tensor] = Future(devices=[values.device] if values.is_cuda else [])
        self._thread.submit(self._reduce, values, buffer, left, done)
        return done

    def close(self) -> None:
        """Give the thread, the host's memory and the process group back; when nothing is on its way."""
        self._end(wait=True)

    def abort(self) -> None:
        """The same without a wait for sums that other ranks may never join."""
        self._end(wait=False)

    def _end(self, *, wait: bool) -> None:
        self._thread.shutdown(wait=wait, cancel_futures=not wait)
        self._buffers.clear()
        group, self._group = self._group, None
        close_group(group)

    def _reduce(self, values: Tensor, buffer: Tensor, left: Mark, done: Future[Tensor]) -> None:
        try:
            if values.is_cuda:
                torch.cuda.set_device(values.device)  # a new thread's is device 0
            left.synchronize()
            dist.all_reduce(buffer, group=self._group)
            with self._side.after_itself():  # whoever waits for the result waits for what this stream has
                values.copy_(buffer, non_blocking=True)
                done.set_result(values)
        except Exception as error:  # then DistributedDataParallel cannot read the result, and says this in its error
            done.set_exception(error)  # type: ignore[arg-type]
