"""Who sums the gradients of a strategy's model."""

from typing import Literal

from torch.nn.parallel import DistributedDataParallel

from retime.foundations.ddp import Reducer, sparse_layer
from retime.mechanisms.cpu_accumulation import HostReducer
from retime.strategies.support.lightning_private import MomentsOfDDP, timeout_of

__all__ = ["ReduceOn", "ReducerOfChoice"]

ReduceOn = Literal["device", "host"]
"""Where gradients are summed."""


class ReducerOfChoice(MomentsOfDDP):
    """A DDP strategy that hands its mechanism a reducer; which one is decided here and nowhere else."""

    reduce_on: ReduceOn = "device"
    urgent_sums = False
    """Whether some sums are to overtake others."""

    def make_reducer(self, model: DistributedDataParallel) -> Reducer | None:
        """What sums this model's gradients; None: all-reduces where they are. All ranks call this before they train.

        Raises:
            ValueError: it has sparse gradients, which the host does not sum.
        """
        if self.reduce_on == "device" or self.world_size < 2:
            return None
        layer = sparse_layer(model.module)
        if layer is not None:
            raise ValueError(
                f"the sparse gradients of {layer!r} cannot be summed on the host, as they cannot go through DDP's "
                "communication hook: use sparse=False, or strategy='ddp' or reduce_on='device'"
            )
        return HostReducer(self.root_device, model.process_group, timeout_of(self), overtakes=self.urgent_sums)
