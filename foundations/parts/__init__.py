"""A batch and its parts: cut, keyed, joined, and weighed so that gradients add up to the whole batch's."""

from retime.foundations.parts.batch_shape import key_of, name_of, no_larger, sizes_of
from retime.foundations.parts.batchnorm import (
    BatchNormChoice,
    batch_statistics_layers,
    check_choice,
    fix_statistics,
    ghost_momentum,
)
from retime.foundations.parts.certificate import (
    Certificate,
    Example,
    NotSeparableError,
    WeightsUnclearError,
    loss_weights,
)
from retime.foundations.parts.combine import WholeOutput, combined, combined_scalar, has_entries
from retime.foundations.parts.dry_part import dry_part
from retime.foundations.parts.equal_parts import balanced_parts, part_lengths
from retime.foundations.parts.loss import loss_of
from retime.foundations.parts.split import (
    Split,
    map_leaves,
    part_of,
    replaced_tensors,
    samples_in,
    split_batch,
    tensors_of,
)
from retime.foundations.parts.weights import COMPARED, OPPOSITE, Count, Weighting, compares, counts_of, normalised

__all__ = [
    "BatchNormChoice",
    "COMPARED",
    "Certificate",
    "Count",
    "Example",
    "NotSeparableError",
    "OPPOSITE",
    "Split",
    "Weighting",
    "WeightsUnclearError",
    "WholeOutput",
    "balanced_parts",
    "batch_statistics_layers",
    "check_choice",
    "combined",
    "combined_scalar",
    "compares",
    "counts_of",
    "dry_part",
    "fix_statistics",
    "ghost_momentum",
    "has_entries",
    "key_of",
    "loss_of",
    "loss_weights",
    "map_leaves",
    "name_of",
    "no_larger",
    "normalised",
    "part_lengths",
    "part_of",
    "replaced_tensors",
    "samples_in",
    "sizes_of",
    "split_batch",
    "tensors_of",
]
