"""Where DistributedDataParallel keeps each parameter's gradient, learned from the buckets its hook is shown."""

from collections.abc import Iterable
from dataclasses import dataclass

from torch import Tensor

from retime.foundations.torch_private import GradBucket


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
    """Of all of them."""
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
        known = self._buffers.get(index)
        same = known is not None and (known.data_ptr(), known.numel()) == (buffer.data_ptr(), buffer.numel())
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
        """The parameters of this bucket and of those behind it, in the order in which they lie."""
        found = [(place.bucket, place.start, p) for p, place in self._places.items() if place.bucket >= bucket]
        return [p for *_, p in sorted(found, key=lambda item: item[:2])]

    def regions(self, parameters: Iterable[Tensor]) -> list[Region]:
        """Cut these parameters' gradients into as few pieces of neighbours as there are, in the given order."""
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
