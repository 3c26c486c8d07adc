"""Gradients of CUDA ranks are summed in host memory, by the processors, while the backward pass goes on.

    reduction = HostReduction(torch.distributed.new_group(backend="gloo"))
    model.register_comm_hook(reduction, reduce_on_host)     # a DistributedDataParallel model
    ...
    reduction.close()

moDNN, section 6.2 (Figure 8): devices without a fast way to one another send gradients through the host's memory either
way, so the host may as well add them up. Each bucket leaves on a stream of its own as soon as it is full, a thread
reduces one after the other over gloo, and each comes back on the same stream; the compute stream waits at the end of
the backward pass only. The device needs no memory for it.
"""

from concurrent.futures import ThreadPoolExecutor

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

__all__ = ["HostReduction", "reduce_on_host"]


class HostReduction:
    """The state of :func:`reduce_on_host`.

    Args:
        host_group: gloo's, of the ranks that reduce together; nothing else may use it while a backward pass runs. None
            is the default group.
        device_group: what reduces after :meth:`close`, as a model cannot get rid of its hook. None is the default
            group.

    Attributes:
        bytes_out: sent to the host so far.
    """

    def __init__(
        self, host_group: dist.ProcessGroup | None = None, device_group: dist.ProcessGroup | None = None
    ) -> None:
        if dist.get_backend(host_group) != "gloo":
            raise ValueError(
                f"{dist.get_backend(host_group)} does not reduce in host memory: give a group of gloo's, "
                "torch.distributed.new_group(backend='gloo')"
            )
        self._group, self._device_group = host_group, device_group
        self._size = dist.get_world_size(host_group)
        # One thread: all ranks reduce their buckets in the same order.
        self._thread: ThreadPoolExecutor | None = ThreadPoolExecutor(1, thread_name_prefix="retime-host-reduction")
        self._buffers: dict[int, Tensor] = {}
        self._stream: torch.cuda.Stream | None = None
        self.bytes_out = 0

    def start(self, index: int, values: Tensor) -> Future[Tensor]:
        """Begin to replace ``values``, shape ``(n,)``, by their mean over the ranks.

        Args:
            index: of the bucket; one that comes again uses the same host memory, so it must have ended before.
        """
        if self._thread is None:
            work = dist.all_reduce(values.div_(self._size), group=self._device_group, async_op=True)
            assert work is not None
            ended: Future[Tensor] = work.get_future().then(lambda future: future.value()[0])
            return ended
        buffer = self._buffers.get(index)
        if buffer is None or buffer.shape != values.shape or buffer.dtype != values.dtype:
            buffer = torch.empty(values.shape, dtype=values.dtype, pin_memory=values.is_cuda)
            self._buffers[index] = buffer
        self.bytes_out += values.nbytes
        left = self._copy(buffer, values, after_compute=True)
        done: Future[Tensor] = Future(devices=[values.device] if values.is_cuda else [])
        self._thread.submit(self._reduce, values, buffer, left, done)
        return done

    def close(self) -> None:
        """Give back the thread and the host memory; call it when no backward pass runs."""
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.shutdown()
        self._buffers.clear()

    def _reduce(self, values: Tensor, buffer: Tensor, left: torch.cuda.Event | None, done: Future[Tensor]) -> None:
        try:
            if left is not None:
                left.synchronize()
            buffer.div_(self._size)
            dist.all_reduce(buffer, group=self._group)
            self._copy(values, buffer)
            if self._stream is None:
                done.set_result(values)
                return
            with torch.cuda.stream(self._stream):  # whoever waits for the result waits for what this stream has
                done.set_result(values)
        except Exception as error:  # DistributedDataParallel raises it where it waits
            done.set_exception(error)  # type: ignore[arg-type]

    def _copy(self, into: Tensor, source: Tensor, *, after_compute: bool = False) -> torch.cuda.Event | None:
        device = into.device if into.is_cuda else source.device
        if device.type != "cuda":
            into.copy_(source)
            return None
        if self._stream is None:
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        if after_compute:
            self._stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(self._stream):
            into.copy_(source, non_blocking=True)
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(self._stream)
        return event


def reduce_on_host(reduction: HostReduction, bucket: dist.GradBucket) -> Future[Tensor]:  # type: ignore[name-defined]
    """A communication hook for ``DistributedDataParallel.register_comm_hook``: the ranks' mean.

    Where the number of ranks is a power of two, gloo's sum has the same bits as without the hook on CPUs.
    """
    return reduction.start(bucket.index(), bucket.buffer())
