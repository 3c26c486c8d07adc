"""Gradients of CUDA ranks are summed in host memory, by the processors, while the backward pass goes on.

    reduction = HostReduction(model)     # a DistributedDataParallel model; all its ranks do this
    ...
    reduction.close()

moDNN, section 6.2 (Figure 8): devices without a fast way to one another send gradients through the host's memory either
way, so the host may as well add them up. Each bucket leaves on a stream of its own as soon as it is full, a thread
reduces one after the other over gloo, and each comes back on the same stream; the compute stream waits at the end of
the backward pass only. The device needs no memory for it.
"""

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from retime.mechanisms.streams import Mark, SideStream

__all__ = ["HostReduction", "reduce_on_host"]


class HostReduction:
    """Takes over a model's reductions, with a communication hook and a process group of its own.

    Args:
        model: on one device; all of its ranks make one of these.
        timeout: of a reduction; None is torch's default.

    Attributes:
        bytes_out: sent to the host so far.

    Raises:
        ValueError: the model lies on several devices.
        RuntimeError: it has a communication hook.
    """

    def __init__(self, model: DistributedDataParallel, timeout: timedelta | None = None) -> None:
        devices = {parameter.device for parameter in model.parameters()}
        if len(devices) > 1:
            raise ValueError(f"reductions in host memory take a model on one device, not on {len(devices)}")
        self._device_group = model.process_group
        ranks = dist.get_process_group_ranks(self._device_group)
        self._size = len(ranks)
        local = len(ranks) != dist.get_world_size()
        # Of its own: the thread's reductions have no order with whatever else the ranks say to one another.
        self._group = dist.new_group(ranks, timeout=timeout, backend="gloo", use_local_synchronization=local)
        # One thread: all ranks reduce their buckets in the same order.
        self._thread: ThreadPoolExecutor | None = ThreadPoolExecutor(1, thread_name_prefix="retime-host-reduction")
        self._buffers: dict[int, Tensor] = {}
        self._side = SideStream(next(iter(devices), "cpu"))
        self.bytes_out = 0
        model.register_comm_hook(self, reduce_on_host)

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
            buffer = torch.empty(values.shape, dtype=values.dtype, device="cpu", pin_memory=values.is_cuda)
            self._buffers[index] = buffer
        self.bytes_out += values.nbytes
        left = self._side.copy(buffer, values)
        done: Future[Tensor] = Future(devices=[values.device] if values.is_cuda else [])
        self._thread.submit(self._reduce, values, buffer, left, done)
        return done

    def close(self) -> None:
        """Leave reductions to the model's own group again, as it cannot get rid of its hook; when no backward runs."""
        thread, self._thread = self._thread, None
        if thread is None:
            return
        thread.shutdown()
        self._buffers.clear()
        if dist.is_initialized():
            dist.destroy_process_group(self._group)

    def _reduce(self, values: Tensor, buffer: Tensor, left: Mark, done: Future[Tensor]) -> None:
        try:
            if values.is_cuda:
                torch.cuda.set_device(values.device)  # a new thread's is device 0
            left.synchronize()
            buffer.div_(self._size)
            dist.all_reduce(buffer, group=self._group)
            with self._side.after_itself():  # whoever waits for the result waits for what this stream has
                values.copy_(buffer, non_blocking=True)
                done.set_result(values)
        except Exception as error:  # then DistributedDataParallel cannot read the result, and says this in its error
            done.set_exception(error)  # type: ignore[arg-type]


def reduce_on_host(reduction: HostReduction, bucket: dist.GradBucket) -> Future[Tensor]:  # type: ignore[name-defined]
    """A communication hook for ``DistributedDataParallel.register_comm_hook``: the ranks' mean.

    Where the number of ranks is a power of two, gloo's sum has the same bits as without the hook on CPUs.
    """
    return reduction.start(bucket.index(), bucket.buffer())
