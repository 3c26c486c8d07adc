"""The ways of data-parallel training that the out-of-order recipes compare, by name, and a peer of their own.

ddp                 Lightning's DDPStrategy with static_graph and gradient_as_bucket_view: what one gets today
ddp_layer_buckets   the same with buckets of about one layer: the strongest plain setting where buckets are the limit
ddp_tuned_buckets   the same with buckets of the size that ours takes, by the same measurement of the links
priority            as BytePS: first layers' gradients leave first, in partitions, and no weight gradient is deferred
priority_4          the same with up to 4 partitions on their way at once (ByteScheduler's credit; the number is ours)
ooo_k3              out of order, weight gradients of the first 3 layers deferred
ooo_auto            out of order, k found by its own search in the first steps of this run
ooo_tuned           out of order with the k that ooo_auto found before in the same process
..._waiting         out of order, but step() waits for all communication (cross_iteration=False)
..._layer_buckets   with buckets of about one layer

The peer, ``priority``, sends gradients in the order in which the next forward pass needs them, as BytePS and
ByteScheduler do. Peng et al. 2019 (ByteScheduler), section 4: gradients are cut into partitions, of which the most
urgent that is there leaves next, as soon as fewer are on their way than the credit allows: many fill the link, few can
be overtaken soon. All-reduces have to come in one order on all ranks: rank 0 chooses.
"""

import re
import threading
from collections.abc import Hashable
from dataclasses import dataclass
from functools import partial
from itertools import cycle
from typing import Any, Literal

import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy, Strategy
from torch import Tensor
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from retime.foundations.ddp import bucket_mb, close_group, measured_seconds_per_mb, own_group
from retime.strategies import OOODataParallelStrategy

_NAME = re.compile(
    r"priority(?:_(?P<credit>[1-9]\d*))?|ddp(?P<tuned>_tuned_buckets)"
    r"|(?:ddp|ooo_(?P<k>auto|tuned|k\d+)(?P<waiting>_waiting)?)(?P<small>_layer_buckets)?"
)
BOUNDS = COMPUTE, COMMUNICATION = "compute", "communication"
"""The bounds, measured beside the variants: a rank alone, and nothing but the all-reduce of all gradients."""


@dataclass(frozen=True)
class Variant:
    """One way of training. `k` is None for peers; "tuned" stands for what a search found before."""

    name: str
    k: int | str | None
    cross_iteration: bool
    layer_buckets: bool
    tuned_buckets: bool = False
    priority: int = 0  # partitions on their way at once

    def strategy(self, layer_bucket_mb: float, tuned_k: int | None = None) -> Strategy:
        """A new strategy; `tuned_k` is what "tuned" stands for. With tuned buckets all ranks call this."""
        if self.priority:
            return PriorityDataParallel(layer_bucket_mb, self.priority)
        options: dict[str, Any] = {"static_graph": True, "gradient_as_bucket_view": True}
        if self.layer_buckets:
            options["bucket_cap_mb"] = layer_bucket_mb
        if self.tuned_buckets:
            options["bucket_cap_mb"] = bucket_mb(measured_seconds_per_mb())
        if self.k is None:
            return DDPStrategy(**options)
        k: int | Literal["auto"] | None
        k = tuned_k if self.k == "tuned" else "auto" if isinstance(self.k, str) else self.k
        if k is None:
            raise ValueError(f"{self.name} needs the k of a search: run one first")
        strategy: Strategy = OOODataParallelStrategy(k=k, cross_iteration=self.cross_iteration, **options)
        return strategy


def variant(name: str) -> Variant:
    """The variant of a name.

    Raises:
        ValueError: no such variant.
    """
    match = _NAME.fullmatch(name)
    if not match:
        raise ValueError(
            f"variant {name!r} is unknown: write ddp, ooo_auto, ooo_tuned or ooo_k<number>, then _waiting (ooo only) "
            "for cross_iteration=False and _layer_buckets for small buckets; or ddp_tuned_buckets, or priority, then "
            "_<number> for so many partitions at once"
        )
    k: int | str | None = match["k"]
    if isinstance(k, str) and k.startswith("k"):
        k = int(k[1:])
    priority = int(match["credit"] or 1) if name.startswith("priority") else 0
    small = bool(match["small"] or priority)
    return Variant(name, k, not match["waiting"], small, bool(match["tuned"]), priority)


def label(name: str) -> str:
    """A variant's name for people."""
    if name in BOUNDS:
        return f"{name} alone"
    one = variant(name)
    if one.priority:
        return "sent by priority" + (f", {one.priority} at once" if one.priority > 1 else "")
    words = "DDP" if one.k is None else f"reverse-first-k, k {'' if isinstance(one.k, str) else '= '}{one.k}"
    words += "" if one.cross_iteration else ", step waits"
    return words + (", small buckets" if one.layer_buckets else ", tuned buckets" if one.tuned_buckets else "")


PARTITION_BYTES = 4_096_000
"""BytePS's default."""
_END = -1
_AT_ONCE = 2
"""All-reduces that a process group of gloo runs at the same time, in threads of its own."""


class _Bucket:
    """A bucket's values and those of its partitions that have not left."""

    def __init__(self, values: Tensor, partition_bytes: int) -> None:
        self.parts = list(values.chunk(-(-values.nbytes // partition_bytes)))
        self.done: Future[Tensor] = Future()
        self._values, self._missing, self._lock = values, len(self.parts), threading.Lock()

    def fail(self, error: Exception) -> None:
        """Tell whoever waits for the gradients that another rank is gone."""
        if not self.done.done():
            self.done.set_exception(error)  # type: ignore[arg-type]

    def arrived(self, free: threading.Semaphore, part: Future[Any]) -> None:
        """Count a partition that has been added up, and give its place to the next."""
        with self._lock:
            self._missing -= 1
            try:
                part.value()
                if not self._missing and not self.done.done():
                    self.done.set_result(self._values)
            except Exception as error:
                self.fail(error)
        free.release()


class PriorityReducer:
    """Sums partitions of buckets, the most urgent first: DDP's highest number is that of the first layers.

    Args:
        credit: partitions that may be on their way at once.
        partition_bytes: the most that is sent at once.
    """

    def __init__(self, credit: int = 1, partition_bytes: int = PARTITION_BYTES) -> None:
        self._partition_bytes = partition_bytes
        self._choices, *self._groups = (own_group() for _ in range(1 - (-credit // _AT_ONCE)))
        self._buckets: dict[int, _Bucket] = {}
        self._changed, self._free = threading.Condition(), threading.Semaphore(credit)
        self._ending = False
        self._thread = threading.Thread(target=self._send, name="retime-priorities", daemon=True)
        self._thread.start()

    def start(self, key: Hashable, values: Tensor, *, urgent: bool = False) -> Future[Tensor]:
        """Begin to replace the values of the bucket with this number, shape ``(n,)``, by their sum over the ranks."""
        assert isinstance(key, int)
        bucket = _Bucket(values, self._partition_bytes)
        with self._changed:
            self._buckets[key] = bucket
            self._changed.notify()
        return bucket.done

    def close(self) -> None:
        """End the thread and give the process groups back; when nothing is on its way."""
        with self._changed:
            self._ending = True
            self._changed.notify()
        self._thread.join()
        self.abort()

    def abort(self) -> None:
        """Give the process groups back; the thread ends with the process."""
        for group in (self._choices, *self._groups):
            close_group(group)

    def _send(self) -> None:
        try:
            for group in cycle(self._groups):
                self._free.acquire()
                if (number := self._chosen()) == _END:
                    return
                with self._changed:
                    self._changed.wait_for(lambda number=number: number in self._buckets)  # type: ignore[misc]
                    bucket = self._buckets[number]
                work = dist.all_reduce(bucket.parts.pop(0), group=group, async_op=True)
                if not bucket.parts:
                    with self._changed:
                        del self._buckets[number]
                work.get_future().then(partial(bucket.arrived, self._free))
        except Exception as error:
            for bucket in self._buckets.values():
                bucket.fail(error)

    def _chosen(self) -> int:
        """The number of the bucket of which all ranks send a partition now."""
        choice = torch.full((1,), _END)
        if dist.get_rank() == 0:
            with self._changed:
                self._changed.wait_for(lambda: self._buckets or self._ending)
                choice.fill_(max(self._buckets, default=_END))
        dist.broadcast(choice, 0, group=self._choices)
        return int(choice)


class PriorityDataParallel(OOODataParallelStrategy):
    """`ddp` with such a reducer, buckets of about one layer and updates that wait for their own gradients only."""

    def __init__(self, bucket_cap_mb: float, credit: int) -> None:
        super().__init__(k=0, static_graph=True, gradient_as_bucket_view=True, bucket_cap_mb=bucket_cap_mb)
        self._credit = credit

    def make_reducer(self, model: DistributedDataParallel) -> Any:
        return PriorityReducer(self._credit)
