"""All gradients of a model go through a reducer.

reduction = BucketReduction(model, HostReducer())     # a DistributedDataParallel model; all its ranks do this
...
reduction.close()
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from retime.foundations.arguments import Timeout, checked
from retime.foundations.ddp import Reducer, comm_hook_of
from retime.foundations.messages import Report, show_bytes
from retime.foundations.streams import Mark, SideStream, has_streams
from retime.foundations.torch_private.distributed import GradBucket
from retime.mechanisms.cpu_accumulation.host_update import HostUpdateReport
from retime.mechanisms.cpu_accumulation.shared_sums import HostSums, SumTimes, host_sums

# Gradients are summed in host memory, by the processors, while the backward pass goes on.
#
# Sekiyama et al. 2017, Algorithms 5 to 7: each bucket leaves for the host as soon as it is full, is added up there, and
# comes back; the compute stream waits at the end of the backward pass only. On CUDA each direction has a stream of its
# own (Algorithm 6, lines 5 and 8), so that a bucket leaves while another comes back: links carry both at once. The
# paper goes layer by layer; DDP's buckets are its layers here. moDNN, section 6.2 (Figure 8), does the same, since
# devices without a fast way to one another send gradients through the host's memory either way. The device needs no
# memory for it.


@dataclass(frozen=True)
class TimedSum:
    """One sum as it went on this rank; times of day are ``time.perf_counter()``'s."""

    bytes: int
    given: float
    began: float
    ended: float
    times: SumTimes | None
    """Where the time between went; None where sums go through gloo."""


class HostReducer:
    """Sums in memory that the ranks of a machine share, and through gloo between machines or where they cannot.

    Where the values lie on a CPU they are summed in place, beside the backward pass.

    Args:
        device: where the values are.
        group: whose ranks; None: all. Each of them makes one of these.
        timeout: how long another rank may take; None is torch's default.
        overtakes: whether urgent sums overtake others, for which a second thread adds up in memory of its own.
        watch: gets each sum when it was made, in the thread that made it; without it no clock is asked.

    Attributes:
        bytes_out: sent to the host so far.
        note: how sums are made.
    """

    @checked
    def __init__(
        self,
        device: torch.device | str = "cpu",
        group: dist.ProcessGroup | None = None,
        timeout: Timeout | None = None,
        *,
        overtakes: bool = False,
        watch: Callable[[TimedSum], None] | None = None,
    ) -> None:
        self._to_host = SideStream(device)
        self._to_device = SideStream(device)
        self._lanes = [_Lane(host_sums(group, timeout)) for _ in range(2 if overtakes else 1)]
        self._buffers: dict[Hashable, Tensor] = {}
        self._watch = watch
        if watch is not None:
            for lane in self._lanes:
                lane.sums.times()
        self.note = self._lanes[0].sums.note
        self.bytes_out = 0

    def start(self, key: Hashable, values: Tensor, *, urgent: bool = False) -> Future[Tensor]:
        """Begin to replace ``values``, shape ``(n,)``, by their sum over the ranks.

        Args:
            key: values on a device that come again under the same key use the same host memory.
            values: on the device.
            urgent: the next forward pass needs these first.
        """
        return self.start_scaled(key, values, 1.0, urgent=urgent)

    def start_scaled(self, key: Hashable, values: Tensor, scale: float, *, urgent: bool = False) -> Future[Tensor]:
        """The same, each rank's values times ``scale``, in the same turn through memory."""
        self.bytes_out += values.nbytes
        streamed = has_streams(values.device)
        buffer = self._buffer(key, values) if streamed else values
        # The buffer's last copy back, on the other stream, has ended: the caller has waited for it (see Reducer.start).
        left = self._to_host.copy(buffer, values) if streamed else Mark()
        done: Future[Tensor] = Future(devices=[values.device] if streamed else [])
        lane = self._lanes[-1 if urgent else 0]
        given = 0.0 if self._watch is None else time.perf_counter()
        lane.thread.submit(self._reduce, lane.sums, values, buffer, scale, left, done, given)
        return done

    def _buffer(self, key: Hashable, values: Tensor) -> Tensor:
        buffer = self._buffers.get(key)
        if buffer is None or buffer.shape != values.shape or buffer.dtype != values.dtype:
            buffer = torch.empty(values.shape, dtype=values.dtype, device="cpu", pin_memory=True)
            self._buffers[key] = buffer
        return buffer

    def close(self) -> None:
        """Give threads, host memory and process groups back; when nothing is on its way."""
        self._end(_Lane.close)

    def abort(self) -> None:
        """The same without a wait for sums that other ranks may never join; theirs end with an error at once."""
        self._end(_Lane.abort)

    def _end(self, end: Callable[[_Lane], None]) -> None:
        lanes, self._lanes = self._lanes, []
        for lane in lanes:
            end(lane)
        self._buffers.clear()

    def _reduce(
        self,
        sums: HostSums,
        values: Tensor,
        buffer: Tensor,
        scale: float,
        left: Mark,
        done: Future[Tensor],
        given: float,
    ) -> None:
        try:
            if buffer is not values:
                torch.cuda.set_device(values.device)  # a new thread's is device 0
            left.synchronize()
            if self._watch is None:
                sums.add(buffer, scale)
            else:
                began = time.perf_counter()
                sums.add(buffer, scale)
                self._watch(TimedSum(values.nbytes, given, began, time.perf_counter(), sums.times()))
            with self._to_device.after_itself():  # whoever waits for the result waits for what this stream has
                if buffer is not values:
                    values.copy_(buffer, non_blocking=True)
                done.set_result(values)
        except Exception as error:  # then DistributedDataParallel cannot read the result, and says this in its error
            done.set_exception(error)  # type: ignore[arg-type]


class _Lane:
    """One thread, so that all ranks sum in the same order, and its sums."""

    def __init__(self, sums: HostSums) -> None:
        self.sums = sums
        self.thread = ThreadPoolExecutor(1, thread_name_prefix="retime-host-reducer")

    def close(self) -> None:
        self.thread.shutdown()
        self.sums.close()

    def abort(self) -> None:
        ends = self.sums.stop()
        self.thread.shutdown(wait=ends, cancel_futures=True)
        self.sums.close(running=not ends)


# What host memory added up.


@dataclass
class HostReductionReport(Report):
    """Counts of one rank.

    Attributes:
        buckets: gradient buckets that were summed.
        bytes: of their gradients.
        how: in what memory, among how many ranks.
        update: what the ranks of the machine updated together; None: each updates all.
    """

    buckets: int = 0
    bytes: int = 0
    how: str = ""
    update: HostUpdateReport | None = None

    def what_was_done(self) -> list[str]:
        if not self.buckets:
            return ["gradients on the host: none were summed"]
        update = [] if self.update is None else self.update.what_was_done()
        return [f"gradients on the host: {self.buckets} buckets, {show_bytes(self.bytes)}, {self.how}", *update]

    def what_stayed_plain(self) -> list[str]:
        return [] if self.update is None else self.update.what_stayed_plain()

    def what_was_measured(self) -> list[str]:
        return [] if self.update is None else self.update.what_was_measured()


class BucketReduction:
    """Takes a model's communication hook, and gives every bucket to a reducer.

    Buckets are divided as DDP divides them, so on two ranks results have the bits of plain DDP.

    Args:
        model: on one device; all of its ranks make one of these.
        reducer: of these ranks; closed with this, also where this cannot be made.
        name: what it is, for errors.
        instead: what a user can do who has another hook.

    Attributes:
        parameters: those that stay alike on all ranks: the model reduces their gradients, if this is made before any is
            frozen or thawed, and no forward pass changes them (``max_norm`` of an embedding).

    Raises:
        ValueError: the model lies on several devices, or has a communication hook.
    """

    @checked
    def __init__(
        self,
        model: DistributedDataParallel,
        reducer: Reducer,
        *,
        name: str = "a reduction in host memory",
        instead: str = "use reduce_on='device', or leave out the other hook",
    ) -> None:
        self._reducer: Reducer | None = reducer
        self._report = HostReductionReport(how=getattr(reducer, "note", ""))
        self._slot = comm_hook_of(model)
        self.parameters = _replicated_parameters(model)
        try:
            devices = {parameter.device for parameter in model.parameters()}
            if len(devices) > 1:
                raise ValueError(f"{name} takes a model on one device, not on {len(devices)}")
            self._slot.take(self, name, instead)
            self._slot.mean()
        except BaseException:
            reducer.close()
            raise

    def reduce(self, bucket: GradBucket) -> Future[Tensor]:
        """Begin to replace a bucket's gradients by their mean over the ranks."""
        self._report.buckets += 1
        self._report.bytes += bucket.buffer().nbytes
        # a failure of Python's becomes torch's own on the way, which DDP can read
        return self._slot.reduce_as_ddp(bucket, self._reducer).then(lambda reduced: reduced.value())

    def report(self) -> HostReductionReport:
        """Report of the reductions so far."""
        return replace(self._report)

    def close(self, *, failed: bool = False) -> None:
        """Leave reductions to DDP again; when no backward pass runs.

        Args:
            failed: whether a reduction may never be done.
        """
        reducer, self._reducer = self._reducer, None
        if reducer is not None:
            self._slot.give_back(self, reducer, failed=failed)


def _replicated_parameters(model: DistributedDataParallel) -> frozenset[Tensor]:
    rescaled = {
        layer.weight
        for layer in model.modules()
        if isinstance(layer, nn.Embedding | nn.EmbeddingBag) and layer.max_norm is not None
    }
    return frozenset(
        parameter
        for name, parameter in model.module.named_parameters()
        if parameter.requires_grad and name not in model.parameters_to_ignore and parameter not in rescaled
    )
