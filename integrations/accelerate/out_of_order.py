"""Out-of-order data parallel for Accelerate (Oh et al. 2022, section 5.1)."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

from accelerate import Accelerator
from torch import nn
from torch.optim import Optimizer

from retime.foundations.arguments import checked
from retime.foundations.compatibility import Mechanism
from retime.foundations.messages import parse_bytes, warn_no_effect
from retime.integrations.accelerate.accelerate_private import renew_captured_steps
from retime.integrations.accelerate.prepared import (
    note_gone,
    note_there,
    prepared_for_ranks,
    prepared_optimizer,
    refuse_beside,
)
from retime.integrations.accelerate.state_file import StateFile
from retime.mechanisms.out_of_order import ALONE, K, OutOfOrderReport, read_saved_k
from retime.mechanisms.out_of_order import OutOfOrderDataParallel as Deferred


class OutOfOrderDataParallel:
    """Hide gradient communication behind weight gradients and the next forward pass (Oh et al. 2022, section 5.1).

    The loop stays as it is, accumulation, clipping and fp16 included; see
    :class:`retime.mechanisms.out_of_order.OutOfOrderDataParallel` for what happens and for the arguments. Prepare the
    model with ``Accelerator(kwargs_handlers=[DistributedDataParallelKwargs(gradient_as_bucket_view=True)])``. The k
    that ``"auto"`` found is kept by ``accelerator.save_state()`` in a separate file, which plain code ignores and
    ``load_state()`` does not need. With one process this does nothing, with one ``NoEffectWarning``.

    Raises:
        ValueError: another engine than DistributedDataParallel, a custom communication hook, a memory budget.
    """

    @checked
    def __init__(
        self,
        accelerator: Accelerator,
        model: nn.Module,
        optimizer: Optimizer,
        k: K = "auto",
        *,
        max_memory: int | str | None = None,
        cross_iteration: bool = True,
        blocks: Iterable[str] | None = None,
    ) -> None:
        self._optimizer = prepared_optimizer(optimizer, type(self).__name__)
        self._ooo: Deferred | None = None
        if accelerator.num_processes < 2:
            if max_memory is not None:
                parse_bytes("max_memory", max_memory)
            warn_no_effect(f"OutOfOrderDataParallel has no effect: {ALONE}")
        else:
            wrapped = prepared_for_ranks(accelerator, model, type(self).__name__)
            self._mechanism = Mechanism.out_of_order(cross_iteration=cross_iteration)
            refuse_beside(self._optimizer, self._mechanism)
            self._ooo = Deferred(
                wrapped,
                [self._optimizer.optimizer] if cross_iteration else [],
                k=k,
                max_memory=max_memory,
                cross_iteration=cross_iteration,
                blocks=blocks,
            )
            renew_captured_steps(self._optimizer)
            note_there(self._optimizer, self._mechanism)
        self._kept = StateFile(accelerator, type(self).__name__, self.state_dict, self.load_state_dict)

    @property
    def k(self) -> int:
        """The number of blocks whose weight gradients run last at the moment."""
        return 0 if self._ooo is None else self._ooo.k

    @checked
    def set_k(self, k: K) -> None:
        """Use this k from the next step on; all ranks must be given the same."""
        if self._ooo is not None:
            self._ooo.set_k(k)

    def state_dict(self) -> dict[str, Any]:
        """State kept by ``accelerator.save_state()``: the k that was found, nothing while the search is under way."""
        saved = None if self._ooo is None else self._ooo.k_choice.to_save()
        return {} if saved is None else saved.state()

    def load_state_dict(self, state: Any) -> None:
        """Use the k of an earlier run with as many processes, so that ``"auto"`` need not search again."""
        saved = read_saved_k(state)
        if saved is not None and self._ooo is not None:
            self._ooo.k_choice.use_known(saved)

    def flush(self) -> None:
        """Wait for all gradients and run all pending updates now, before reads that bypass torch functions."""
        if self._ooo is not None:
            self._ooo.flush()

    def report(self) -> OutOfOrderReport:
        """Report of what was re-ordered so far."""
        return OutOfOrderReport() if self._ooo is None else self._ooo.report()

    def remove(self) -> None:
        """Run all pending updates and remove all hooks."""
        self._kept.remove()
        if self._ooo is not None:
            self._ooo.remove(failed=sys.exc_info()[0] is not None)
            note_gone(self._optimizer, self._mechanism)
            renew_captured_steps(self._optimizer)
