"""All gradients of a model go through a reducer.

reduction = BucketReduction(model, HostReducer())     # a DistributedDataParallel model; all its ranks do this
...
reduction.close()
"""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor, nn
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from retime.foundations.arguments import checked
from retime.foundations.ddp import Reducer, comm_hook_of
from retime.foundations.torch_private import GradBucket
from retime.mechanisms.cpu_accumulation.host_report import HostReductionReport

__all__ = ["BucketReduction"]


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
        self.parameters = _alike(model)
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
        """What was reduced so far."""
        return replace(self._report)

    def close(self, *, failed: bool = False) -> None:
        """Leave reductions to DDP again; when no backward pass runs.

        Args:
            failed: whether a reduction may never be done.
        """
        reducer, self._reducer = self._reducer, None
        if reducer is None:
            return
        self._slot.give_back(self)
        if failed:
            reducer.abort()
        else:
            reducer.close()


def _alike(model: DistributedDataParallel) -> frozenset[Tensor]:
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
