"""What training holds of the outputs of a batch's parts, of which a dry run makes only two."""

from __future__ import annotations

import torch
from torch import Tensor

from retime.foundations.parts import has_entries, tensors_of
from retime.foundations.storages import has_storage
from retime.mechanisms.memory_budget.dry_run.tracer import Tracer
from retime.schedules.budget import BlockKind

__all__ = ["KeptOutputs"]


class KeptOutputs:
    """One part's output, as :class:`~retime.foundations.parts.combine.WholeOutput` takes it up.

    Args:
        tracer: has just seen the part's forward pass.
        output: what the step returned.
        size: samples of the part.
        count: parts of the batch; the output of a batch in one piece stays as it is.

    Attributes:
        apart: tensors that each part keeps, since they do not have one entry a sample.
    """

    def __init__(self, tracer: Tracer, output: object, size: int, count: int) -> None:
        self._tracer, self._count = tracer, count
        leaves = list(tensors_of(output).values())
        self._joined = [leaf for leaf in leaves if count > 1 and has_entries(leaf, size)]
        with tracer.inside():  # detaching is none of the step's operations
            self.apart = [leaf.detach() for leaf in leaves if count == 1 or not has_entries(leaf, size)]

    def others(self, samples: int) -> list[Tensor]:
        """Stand-ins, counted from now on: a whole batch of so many samples, and what parts keep that are not run."""
        if self._count == 1:
            return []
        with self._tracer.inside():
            made = [torch.empty((samples, *leaf.shape[1:]), dtype=leaf.dtype, device="meta") for leaf in self._joined]
            # Also where there are no other parts: runs of all sub-batch sizes are to make the same storages.
            made.append(torch.empty((self._count - 2) * self._new_bytes(), dtype=torch.uint8, device="meta"))
            for one in made:
                self._tracer.mark(one, BlockKind.ACTIVATION)
        return made

    def _new_bytes(self) -> int:
        """Of storages that this part has made: what it returns of the model or the batch is there anyway."""
        trace = self._tracer.trace
        found = {self._tracer.index_of(leaf.untyped_storage()) for leaf in self.apart if has_storage(leaf)}
        storages = [trace.storages[index] for index in found if index is not None]
        return sum(storage.nbytes for storage in storages if storage.born >= trace.starts[-1])
