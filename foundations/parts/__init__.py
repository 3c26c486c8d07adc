"""A batch and its parts: cut, keyed, joined, and weighed so that gradients add up to the whole batch's."""

from retime.foundations.parts.combine import (
    COMPARED,
    BatchNormChoice,
    Certificate,
    Example,
    NotSeparableError,
    Weighting,
    WeightsUnclearError,
    WholeOutput,
    batch_statistics_layers,
    combined,
    combined_scalar,
    fix_statistics,
    ghost_momentum,
    has_entries,
    loss_weights,
    normalised,
)
from retime.foundations.parts.loss_head import Head, NotUnderstoodError, head_of, head_of_loss
from retime.foundations.parts.operations import READS, RecordedRun, Recorder, record, record_altered
from retime.foundations.parts.split import (
    Split,
    balanced_parts,
    dry_part,
    key_of,
    leaves_of,
    loss_of,
    map_leaves,
    name_of,
    part_lengths,
    replaced_tensors,
    samples_in,
    sizes_of,
    split_batch,
    tensors_of,
)
