"""Two streams on one device for Accelerate (Oh et al. 2022, section 4.1)."""

from __future__ import annotations

from collections.abc import Collection

from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch import nn

from retime.foundations.arguments import checked
from retime.foundations.compatibility import Mechanism
from retime.integrations.accelerate.accelerate_private import prepared_optimizers
from retime.integrations.accelerate.prepared import note_gone, note_there, refuse_beside
from retime.mechanisms.two_streams import Threads, TwoStreamBackward, TwoStreamReport


class TwoStreams:
    """Run weight gradients on a stream beside the output gradients (Oh et al. 2022, section 4.1).

    The loop stays as it is, accumulation, clipping and mixed precision included; see
    :class:`retime.mechanisms.two_streams.TwoStreamBackward` for what happens and for the arguments. Gradients are the
    plain loop's, bit by bit, with ``threads=(n, n)`` and ``n = torch.get_num_threads()``.

    Args:
        accelerator: of one process.
        model: what ``accelerator.prepare()`` returned.
        threads: of each kernel on the main stream and on the sub-stream, on a CPU; None: a search chooses them.
        max_memory: bytes, or ``"500MB"``, of inputs and output gradients that may wait; None: no bound.
        layers: names of layers whose weight gradients may run on the sub-stream; None: all, or those that the
            search chooses.
        graph: capture parts of the model as CUDA graphs.

    Raises:
        ValueError: several processes, or an engine such as DeepSpeed; ``layers`` with other names; ``graph=True``
            without a CUDA device; or an optimizer of this model has backward fusion, a memory budget or two streams.
    """

    @checked
    def __init__(
        self,
        accelerator: Accelerator,
        model: nn.Module,
        *,
        threads: Threads | None = None,
        max_memory: int | str | None = None,
        layers: Collection[str] | None = None,
        graph: bool = False,
    ) -> None:
        if accelerator.num_processes > 1 or accelerator.distributed_type is not DistributedType.NO:
            raise ValueError(
                f"TwoStreams runs on one device, got {accelerator.distributed_type} with {accelerator.num_processes} "
                "processes: use OutOfOrderDataParallel with several"
            )
        own = {id(parameter) for parameter in model.parameters()}
        self._prepared = [
            optimizer
            for optimizer in prepared_optimizers(accelerator)
            if any(id(parameter) in own for group in optimizer.param_groups for parameter in group["params"])
        ]
        for optimizer in self._prepared:
            refuse_beside(optimizer, Mechanism.TWO_STREAMS, once=True)
        self._two_streams = TwoStreamBackward(model, threads=threads, max_memory=max_memory, layers=layers, graph=graph)
        for optimizer in self._prepared:
            note_there(optimizer, Mechanism.TWO_STREAMS)

    def report(self) -> TwoStreamReport:
        """Return what ran where so far."""
        return self._two_streams.report()

    def remove(self) -> None:
        """Restore the layers' ``forward``, and end the second thread."""
        self._two_streams.remove()
        for optimizer in self._prepared:
            note_gone(optimizer, Mechanism.TWO_STREAMS)
        self._prepared = []
