"""Which gradients leave when, if the weight gradients of the first k blocks are computed last."""

from torch import Tensor

from retime.foundations.ddp import BucketMap, Region
from retime.foundations.weight_gradients import Block

SMALLEST_MESSAGE_BYTES = 1024 * 1024
"""Gradients of neighbouring blocks are sent together until they are this large."""


class SendPlan:
    """For one k: a cut through the wrapper's buckets.

    Args:
        buckets: of the wrapper, as it will keep them.
        blocks: the first k.
    """

    def __init__(self, buckets: BucketMap, blocks: list[Block]) -> None:
        mine = [[p for layer in block.layers for p in layer.parameters] for block in blocks]
        chosen = {p for parameters in mine for p in parameters}
        self._first_bucket = buckets.first_bucket_of(chosen)
        self.others: list[Region] = []
        """Sent before the first weight gradient that waited: they share buckets with those that wait."""
        self._behind: dict[str, list[Region]] = {}
        if self._first_bucket is None:
            return
        self.others = buckets.regions(p for p in buckets.parameters_from(self._first_bucket) if p not in chosen)
        gathered: list[Tensor] = []
        sent: set[Tensor] = set()
        for block, parameters in zip(blocks, mine, strict=True):
            gathered += [p for p in parameters if p not in sent]
            sent.update(parameters)
            size = sum(p.numel() * p.element_size() for p in gathered)
            if gathered and (size >= SMALLEST_MESSAGE_BYTES or block is blocks[-1]):
                self._behind[block.name] = buckets.regions(gathered)
                gathered = []

    @property
    def is_empty(self) -> bool:
        """Whether everything leaves when the wrapper finds its bucket full."""
        return self._first_bucket is None

    def holds(self, bucket: int) -> bool:
        """Whether this bucket's gradients leave by this plan, not when the wrapper finds the bucket full."""
        return self._first_bucket is not None and bucket >= self._first_bucket

    def behind(self, block: Block) -> list[Region]:
        """What leaves behind this block's weight gradients."""
        return self._behind.get(block.name, [])
