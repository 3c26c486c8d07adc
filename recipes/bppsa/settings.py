"""What BPPSA's recipes are told, and what the paper (Wang, Bai and Pekhimenko 2020) states, as in `claims.yaml`.

Most figures' points have no printed number.
"""

from dataclasses import dataclass, field
from functools import partial
from typing import Any

from retime.foundations.measure import Spread
from retime.recipes.core.claims import CLOSE, Check, Claim, Comparison, claim_of, paper
from retime.recipes.core.schema import Settings
from retime.recipes.core.verdicts import accepted, inside


@dataclass
class RecurrentSettings(Settings):
    """The settings of the parallel-scan recipes for recurrent networks."""

    model: dict[str, Any] = field(default_factory=dict)  # takes input_size, returns logits
    data: dict[str, Any] = field(default_factory=dict)  # a data set of (sequence, class) pairs
    optimizer: dict[str, Any] = field(default_factory=dict)
    variants: list[str] = field(default_factory=list)  # "baseline" is torch.nn, any other name a solver
    batch_size: int = 16
    sequence_length: int = 1000
    # axes of the figures that have one
    sequence_lengths: list[int] = field(default_factory=list)
    batch_sizes: list[int] = field(default_factory=list)
    features: list[str] = field(default_factory=list)  # IRMAS's feature sets of Table 3: S, M, L
    cases: dict[str, Any] = field(default_factory=dict)


@dataclass
class ConvolutionalSettings(Settings):
    """The settings of the parallel-scan recipes for convolutional networks. `steps` are training steps."""

    model: dict[str, Any] = field(default_factory=dict)
    data: dict[str, Any] = field(default_factory=dict)  # a data set of (input, target) pairs; takes split="val" too
    optimizer: dict[str, Any] = field(default_factory=dict)
    batch_size: int = 32
    # Table 1
    operators: list[str] = field(default_factory=list)
    image_size: int = 32
    channels: int = 64  # of the first convolution
    columns: int = 100  # of a Jacobian that the baselines compute; their time for all columns is this time, scaled
    # Figure 6
    precisions: list[str] = field(default_factory=list)
    levels: list[int | None] = field(default_factory=list)  # up-sweep levels of each scan; null is the whole one
    evaluate_every: int = 10  # training steps between two test losses, or accuracies
    # Figure 10
    share: float = 0.97  # of the weights that pruning takes away
    retrain_steps: int = 0
    cases: dict[str, Any] = field(default_factory=dict)  # name: {pruning, zeros, levels}
    # Figure 12
    ranks: int = 4  # GPUs of the pipeline
    decay_every: int = 0  # training steps, after which the learning rate falls to a tenth; 0: never


@dataclass
class ScanPlanSettings(Settings):
    """The settings of what is counted from a scan's plan."""

    # axes of the figure
    matrices: list[int] = field(default_factory=list)
    workers: list[int] = field(default_factory=list)


claim = partial(claim_of, "bppsa")


def compared(theirs: Claim, ours: Spread, words: str) -> Comparison:
    """Ours beside theirs, with `words` for the reason where they are not within a quarter of each other."""
    off = inside(ours, *accepted(Check(within=CLOSE), theirs.value, theirs.unit)) is False
    return Comparison(theirs, ours, f"does not hold: {words}" if off else words)


def of_epochs(table: str, what: str) -> dict[str, Claim]:
    """The speedups of a column or row of Tables 4 to 6, by phase: step and backward; none if it is not there.

    The tables are seconds an epoch; ratios of them need no epoch's length. A forward pass with the GRU's gates computed
    again is taken off instead of the plain one, where the table has it.
    """
    seconds = paper("bppsa").tables[table].get(what)
    if seconds is None:
        return {}
    forward, baseline, scan, *prepared = seconds
    backward = (baseline - forward) / (scan - (prepared or [forward])[0])
    return {
        "step": Claim("bppsa", table, "x", baseline / scan, f"{what}, whole step (V100)"),
        "backward": Claim("bppsa", table, "x", backward, f"{what}, backward (V100)"),
    }
