"""When a backward pass starts its all-reduces: buckets as they fill, gradients that waited as the plan says."""

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from retime.foundations.ddp import BucketMap, Reducer, Reduction, Reductions
from retime.foundations.torch_private import GradBucket, has_rebuilt_buckets
from retime.foundations.weight_gradients import Block
from retime.mechanisms.out_of_order.send_plan import SendPlan


class Sending:
    """Learns the wrapper's buckets, and begins each all-reduce once.

    Args:
        model: whose buckets are sent.
        reducer: sums; it stays its owner's.
        divide: whether gradients are divided by the number of ranks, or multiplied by its rounded reciprocal.
    """

    def __init__(self, model: DistributedDataParallel, reducer: Reducer, *, divide: bool) -> None:
        self._model = model
        self._map = BucketMap()
        self._reductions = Reductions(reducer, dist.get_world_size(model.process_group), divide=divide)
        self.never_rebuilds = model.find_unused_parameters and not model.static_graph
        """Whether the wrapper keeps the buckets that it was built with."""
        self._plan: SendPlan | None = None

    @property
    def is_steady(self) -> bool:
        """Whether the wrapper's buckets are known, and will stay."""
        return self._map.is_steady

    @property
    def has_plan(self) -> bool:
        """Whether blocks have been chosen whose gradients leave in our own order."""
        return self._plan is not None

    @property
    def waits_for_some(self) -> bool:
        """Whether some gradients leave in our own order."""
        return self._plan is not None and not self._plan.is_empty

    def forget_buckets(self) -> None:
        """The wrapper is about to build its buckets anew."""
        self._map.forget()

    def forget_plan(self) -> None:
        """Everything leaves when its bucket is full."""
        self._plan = None

    def plan(self, blocks: list[Block]) -> None:
        """The gradients of these blocks, the first k, leave in our own order from now on."""
        self._plan = SendPlan(self._map, blocks)

    def start_full(self, bucket: GradBucket, *, defers: bool) -> None:
        """Begin the all-reduce of a bucket that the wrapper has found full, unless it leaves in our own order.

        Args:
            bucket: of the running backward pass.
            defers: whether weight gradients wait in this pass.

        Raises:
            RuntimeError: the wrapper has built its buckets anew, and gradients were sent from the old ones.
        """
        ours = defers and self._plan is not None and self._plan.holds(bucket.index())
        final = has_rebuilt_buckets(self._model) or self.never_rebuilds
        if not self._map.learn(bucket, final=final) and ours:
            raise RuntimeError(
                "DistributedDataParallel built its buckets anew in the middle of training, and gradients were sent "
                "from the old ones: use k=0 for this model"
            )
        if not ours:
            self._reductions.start(bucket.index(), bucket.parameters(), bucket.buffer(), urgent=False)

    def start_behind(self, block: Block | None) -> None:
        """Begin what leaves behind this block's weight gradients; None: before the first of those that waited."""
        if self._plan is None:
            return
        for region in self._plan.others if block is None else self._plan.behind(block):
            self._reductions.start(region.place, region.parameters, region.values, urgent=block is not None)

    def take(self) -> list[Reduction]:
        """What was begun since the last call."""
        return self._reductions.take()
