"""Who sums the gradients of a strategy's model."""

from torch.nn.parallel import DistributedDataParallel

from retime.mechanisms.ddp.reducers import Reducer


class ReducerOfChoice:
    """A DDP strategy that hands its mechanism a reducer; which one is decided here and nowhere else."""

    def make_reducer(self, model: DistributedDataParallel) -> Reducer | None:
        """What sums this model's gradients; None: all-reduces where they are. All ranks call this before they train."""
        return None
