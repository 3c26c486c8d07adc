"""Reductions that are on their way while training goes on, and who waits for them.

From the end of the backward pass each parameter watches for reads (the lazy-update engine of forward fusion): whoever
looks at its gradient first waits until the all-reduce of that gradient has ended. So clipping, scalers, loggers and
plain optimizers see complete gradients without knowing of any of this.
"""

import sys
import threading
import time
import weakref
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from retime.foundations.ddp.comm_hook import Reducer, start_mean
from retime.foundations.lazy_updates import PendingUpdate, gradient_of, is_pending, unwatchable
from retime.foundations.messages import warn_difference
from retime.foundations.torch_private.distributed import GradBucket
from retime.foundations.torch_private.tensors import version_of

# Where DistributedDataParallel keeps each parameter's gradient, learned from the buckets its hook is shown.


@dataclass(frozen=True)
class Place:
    """The piece of a bucket that holds one gradient: elements ``start`` to ``end``."""

    bucket: int
    start: int
    end: int


@dataclass(frozen=True, eq=False)
class Region:
    """Neighbouring gradients, reduced together."""

    place: Place
    """Where all of them lie in the bucket."""
    parameters: tuple[Tensor, ...]
    values: Tensor
    """One-dimensional, inside the bucket."""


class BucketMap:
    """The buckets of a model's reducer, which it builds anew once, after its first or second backward pass."""

    def __init__(self) -> None:
        self._buffers: dict[int, Tensor] = {}
        self._places: dict[Tensor, Place] = {}
        self.is_steady = False
        """Whether all buckets are known and will stay as they are."""

    def learn(self, bucket: GradBucket, *, final: bool) -> bool:
        """Note one bucket of a backward pass.

        Args:
            bucket: as it is full.
            final: whether the reducer will not build its buckets anew.

        Returns:
            Whether it is as it was.
        """
        index, buffer = bucket.index(), bucket.buffer()
        before = self._buffers.get(index)
        same = before is not None and (before.data_ptr(), before.numel()) == (buffer.data_ptr(), buffer.numel())
        if not same:
            self.is_steady = False
            self._buffers[index] = buffer
            self._places = {p: place for p, place in self._places.items() if place.bucket != index}
            for parameter, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True):
                start = int(gradient.storage_offset() - buffer.storage_offset())
                self._places[parameter] = Place(index, start, start + gradient.numel())
        if bucket.is_last():
            self.is_steady = final
        return same

    def forget(self) -> None:
        """Let go of buckets that are about to be replaced."""
        self._buffers.clear()
        self._places.clear()
        self.is_steady = False

    def first_bucket_of(self, parameters: Iterable[Tensor]) -> int | None:
        """The first bucket that holds any of these: it and those behind it cannot be sent before they are done."""
        return min((place.bucket for p in parameters if (place := self._places.get(p))), default=None)

    def parameters_from(self, bucket: int) -> list[Tensor]:
        """The parameters of this bucket and of those behind it."""
        return [p for p, place in self._places.items() if place.bucket >= bucket]

    def regions(self, parameters: Iterable[Tensor]) -> list[Region]:
        """Cut these parameters' gradients into as few pieces of neighbours as there are, as they lie in buckets."""
        lying = sorted(
            ((place, p) for p in dict.fromkeys(parameters) if (place := self._places.get(p))),
            key=lambda item: (item[0].bucket, item[0].start),
        )
        groups: list[list[tuple[Place, Tensor]]] = []
        for place, parameter in lying:
            last = groups[-1][-1][0] if groups else None
            if last is not None and (last.bucket, last.end) == (place.bucket, place.start):
                groups[-1].append((place, parameter))
            else:
                groups.append([(place, parameter)])
        return [self._region(group) for group in groups]

    def _region(self, group: list[tuple[Place, Tensor]]) -> Region:
        first, last = group[0][0], group[-1][0]
        place = Place(first.bucket, first.start, last.end)
        return Region(place, tuple(p for _, p in group), self._buffers[place.bucket][place.start : place.end])


# A bucket size for DistributedDataParallel, from what the network carries.

WIRE_SECONDS = 0.02
"""What a bucket should take: long against an all-reduce's fixed cost, short against a step that it has to hide in."""
SIZES_MB = (25, 16, 8, 4, 2, 1)
"""DistributedDataParallel's own default and below. Few, so that a measurement's noise seldom changes the choice."""
_PROBE_MB = 2
_REPEATS = 3


def bucket_mb(seconds_per_mb: float) -> int:
    """The largest of ``SIZES_MB`` that takes ``WIRE_SECONDS`` or less, else the smallest."""
    return next((size for size in SIZES_MB if size * seconds_per_mb <= WIRE_SECONDS), SIZES_MB[-1])


def measured_seconds_per_mb() -> float:
    """Seconds that an all-reduce needs for each MiB, by the slowest rank's clock; all ranks get the same number.

    All ranks must call it. It sends 2 MiB a few times.
    """
    cuda = dist.get_backend() == "nccl"
    device = torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")
    probe = torch.zeros(_PROBE_MB * 2**18, device=device)
    seconds = []
    for _ in range(_REPEATS + 1):  # the first one opens connections
        dist.barrier()
        began = time.perf_counter()
        dist.all_reduce(probe)
        if cuda:
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - began)
    slowest = torch.tensor([min(seconds[1:])], dtype=torch.float64, device=device)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return float(slowest) / _PROBE_MB


class PendingGradient(PendingUpdate):
    """Parameters whose gradients are on their way; reading one waits for the all-reduce."""


_ASK_S = 1.0
"""How often who waits for a reduction asks whether the other ranks are there."""


class Reduction:
    """One all-reduce on its way, for the gradients of ``parameters``.

    Args:
        check_ranks: raises an error if another rank is gone.
    """

    def __init__(
        self, parameters: Iterable[Tensor], done: torch.futures.Future[Tensor], check_ranks: Callable[[], None]
    ) -> None:
        self.parameters = list(parameters)
        self._done, self._check_ranks = done, check_ranks
        self._seen: list[tuple[Tensor, int]] = []
        """Gradients whose sums are on their way, and how often each had been written into before."""

    def wait(self) -> None:
        """Return when the gradients are complete (on CUDA: when the current stream will see them so)."""
        if not self._done.done():
            came = threading.Event()
            self._done.add_done_callback(lambda _: came.set())
            while not came.wait(_ASK_S):
                self._check_ranks()
        self._done.wait()
        seen, self._seen = self._seen, []
        if any(version_of(gradient) != version for gradient, version in seen):
            raise RuntimeError(
                "a gradient was changed while its all-reduce was on its way, as by a second backward() without a "
                "forward pass of the model: call flush() before it, or use cross_iteration=False"
            )

    def watch(self, on_read: Callable[[], None]) -> None:
        """Make whoever reads one of these gradients wait for it; where that cannot be seen, wait now."""
        if not any(map(is_pending, self.parameters)) and not unwatchable(self.parameters):
            gradients = map(gradient_of, self.parameters)
            self._seen = [(gradient, version_of(gradient)) for gradient in gradients if gradient is not None]

            def wait() -> None:
                on_read()
                self.wait()

            PendingGradient(self.parameters, wait)
        else:
            self.wait()


class Reductions:
    """The reductions of one backward pass.

    Args:
        reducer: sums; it stays its owner's.
        ranks: how many there are.
        divide: whether gradients are divided by that number, or multiplied by its rounded reciprocal.
        check_ranks: raises an error if one of them is gone, which a reducer need not notice.
    """

    def __init__(self, reducer: Reducer, ranks: int, *, divide: bool, check_ranks: Callable[[], None]) -> None:
        self._reducer, self._check_ranks = reducer, check_ranks
        self._ranks = ranks
        self._divide = divide
        self._on_their_way: list[Reduction] = []

    def start(self, key: Hashable, parameters: Iterable[Tensor], values: Tensor, *, urgent: bool) -> None:
        """Begin to replace ``values``, the gradients of ``parameters``, by their mean over the ranks."""
        # .data has a version counter of its own: the sum's arrival is no change in place by somebody else
        done = start_mean(self._reducer, key, values.data, self._ranks, divide=self._divide, urgent=urgent)
        self._on_their_way.append(Reduction(parameters, done, self._check_ranks))

    def take(self) -> list[Reduction]:
        """Return the reductions that began since the last call."""
        taken, self._on_their_way = self._on_their_way, []
        return taken


class KeptGradients:
    """Finds gradients of a step that the program still holds when the next backward pass is about to write into them.

    They are views of the wrapper's buckets. Without ``gradient_as_bucket_view`` each step has tensors of its own.

    Args:
        parameters: whose gradients.
    """

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        self._parameters = list(parameters)
        self._seen: list[tuple[Tensor, weakref.ref[Tensor], int]] = []
        """The gradients of the last step, and how many references to each there were at its end."""

    def note(self) -> None:
        """A backward pass has ended, and the program has not asked for its gradients yet."""
        self._seen = []
        for parameter in self._parameters:
            if gradient_of(parameter) is not None:
                reference: weakref.ref[Tensor] = weakref.ref(gradient_of(parameter))  # type: ignore[arg-type]
                self._seen.append((parameter, reference, sys.getrefcount(reference())))

    def warn(self) -> None:
        """Say once if there are more references than then to gradients that their parameters have no more."""
        if any(
            reference() is not None
            and reference() is not gradient_of(parameter)
            and sys.getrefcount(reference()) > references
            for parameter, reference, references in self._seen
        ):
            self._parameters, self._seen = [], []
            warn_difference(
                "gradients of an earlier step are still held, and the next backward pass writes into them, which it "
                "would not without bucket views: hold p.grad.clone()"
            )
