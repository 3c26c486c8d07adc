"""Whether a step does with as many samples as are really run what it does with the few that were probed."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Any

from torch import nn

from retime.foundations.parts import Certificate, Split, samples_in, split_batch
from retime.mechanisms.memory_budget.separability.by_size import unlike
from retime.mechanisms.memory_budget.separability.dry_flow import dry_flows

__all__ = ["compared"]

_SIZES = 3
"""So many sizes show what grows with them."""


def compared(
    step: Callable[[Any], Any],
    batch: Any,
    model: nn.Module,
    found: Certificate,
    sizes: Collection[int],
    *,
    split: Split = split_batch,
    given: bool = False,
) -> Certificate:
    """The same certificate, if the step does with batches of these sizes what it does with the probed samples.

    The step is run without values, on the first samples of the batch.

    Args:
        found: one that says that the batch may be split.
        sizes: of the parts that are to run, and of the batch.
        given: the user counts what the loss is a mean over, and so answers for a step that cannot be compared.
    """
    probed = range(2, found.samples + 1)
    new = {size for size in sizes if size not in probed}
    wanted = sorted({*probed[-max(_SIZES - len(new), _SIZES - 1) :], *sizes})
    total = samples_in(batch, split)
    wanted = [size for size in wanted if size <= total]
    if len(wanted) == 1:
        return _known(found, wanted)
    batches = [batch if size == total else split(batch, size)[0] for size in wanted]
    try:
        flows = dry_flows(step, model, batches, found.reads)
    except Exception as error:  # whatever a step says to tensors without values
        text = str(error).splitlines()[0] if str(error) else "no message"
        why = f"the step does not run without values ({type(error).__name__}: {text})"
        if given:
            note = f"batches of more than {found.samples} samples were taken to do the same as that many, as {why}"
            return replace(_known(found, wanted), notes=tuple(dict.fromkeys((*found.notes, note))))
        reason = (
            f"whether the step does the same with {max(sizes)} samples as with {found.samples} is not known, as "
            f"{why}. Give loss_weight(part), which counts what the loss is a mean over, or offload only"
        )
        return Certificate(None, reason, samples=found.samples)
    if reason := unlike(flows, wanted):
        reason = (
            f"the step does something else with more samples than with fewer: with "
            f"{', '.join(map(str, wanted))} samples {reason}. Offload only"
        )
        return Certificate(None, reason, samples=found.samples)
    return _known(found, wanted)


def _known(found: Certificate, sizes: Collection[int]) -> Certificate:
    return replace(found, sizes=found.sizes | set(sizes))
