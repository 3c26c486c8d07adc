"""Gradient accumulation on the host's processors for Accelerate (Sekiyama et al. 2017)."""

from __future__ import annotations

import sys

from accelerate import Accelerator
from torch import nn

from retime.foundations.arguments import Timeout, checked
from retime.foundations.ddp import sparse_layer
from retime.foundations.messages import warn_no_effect
from retime.integrations.accelerate.prepared import prepared_for_ranks
from retime.mechanisms.cpu_accumulation import BucketReduction, HostReducer, HostReductionReport


class CPUAccumulate:
    """Sum gradients on the host's processors, in memory that the ranks of a machine share.

    The loop stays as it is, accumulation, clipping and fp16 included; see
    :class:`retime.strategies.CPUAccumulateStrategy` for what happens. All processes make one of these, on the model
    that ``accelerator.prepare()`` returned. With one process this does nothing, with one ``NoEffectWarning``.

    Args:
        timeout: how long another process may take; None is torch's default.

    Raises:
        ValueError: another engine than DistributedDataParallel, a custom communication hook, sparse gradients.
    """

    @checked
    def __init__(self, accelerator: Accelerator, model: nn.Module, *, timeout: Timeout | None = None) -> None:
        self._reduction: BucketReduction | None = None
        self._last_report = HostReductionReport()
        if accelerator.num_processes < 2:
            warn_no_effect("CPUAccumulate has no effect: with one process there are no gradients to add up")
            return
        wrapped = prepared_for_ranks(accelerator, model, type(self).__name__)
        layer = sparse_layer(wrapped.module)
        if layer is not None:
            raise ValueError(f"CPUAccumulate cannot add up the sparse gradients of {layer!r}: use sparse=False")
        reducer = HostReducer(accelerator.device, wrapped.process_group, timeout)
        self._reduction = BucketReduction(
            wrapped, reducer, name="accumulation on the processors", instead="leave out CPUAccumulate"
        )

    def report(self) -> HostReductionReport:
        """Report of what was summed so far, and where."""
        return self._last_report if self._reduction is None else self._reduction.report()

    def remove(self) -> None:
        """Return gradients to DistributedDataParallel; call it on all processes, between two steps."""
        self._last_report = self.report()
        reduction, self._reduction = self._reduction, None
        if reduction is not None:
            reduction.close(failed=sys.exc_info()[0] is not None)
