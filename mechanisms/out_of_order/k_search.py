"""Which k the next step uses: the one that was asked for, that an earlier run found, or that the search measures now.

All ranks come to the same number, within the memory bound; where they differ in what they compute, the order stays.
"""

import statistics
import time
import zlib
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Annotated, Any, Literal

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from retime.foundations.arguments import AtLeast
from retime.foundations.ddp import RankAgreement
from retime.foundations.measure import peak_so_far
from retime.foundations.messages import warn_no_effect
from retime.foundations.weight_gradients import WeightGradientDeferral
from retime.schedules import KSearch, largest_k, reverse_first_k, simulate, step_buffers

# Finds k while training goes on: every step counts for training, some are timed too (Oh et al. 2022, section 5.1).

SETTLING_STEPS = 1
"""Steps after a change of k that are not timed: the first one still waits for gradients sent in the former order."""
TIMED_STEPS = 2
"""Steps timed together for each k. Their mean counts and not the fastest: a step can lend time to the next one."""
MOST_STEPS = 57
"""Steps that the search may take, with the three that come before it 60."""
FINALISTS = 3
REPEATS = 2
"""As far as steps are left, the best few are timed again, so often each."""

TIE = 0.01
"""By how much slower than the best a smaller k may be and still be chosen: it needs less memory."""


class KTuner:
    """Drives the search from the times at which steps begin.

    Args:
        blocks: L.
        largest: the largest k allowed.
        agree: turns this rank's seconds into the number that all ranks use.
    """

    def __init__(self, blocks: int, largest: int, agree: Callable[[float], float]) -> None:
        self._visits = MOST_STEPS // (SETTLING_STEPS + TIMED_STEPS)
        self._search = KSearch(blocks, largest=largest, budget=self._visits)
        self._agree = agree
        self._times: dict[int, list[float]] = {}
        self._again: list[int] | None = None
        self._began: float | None = None
        self._settling = SETTLING_STEPS
        self._timed: list[float] = []

    @property
    def k(self) -> int:
        """The k to use now."""
        if self._search.next_k is not None:
            return self._search.next_k
        if self._again:
            return self._again[0]
        means = self.measured
        good_enough = (1 + TIE) * min(means.values(), default=0.0)
        return min((k for k, seconds in means.items() if seconds <= good_enough), default=0)

    @property
    def is_done(self) -> bool:
        """Return whether the search has ended."""
        return self._search.next_k is None and not self._again

    @property
    def measured(self) -> dict[int, float]:
        """Seconds a step by k, in the order in which they were first measured."""
        return {k: statistics.fmean(times) for k, times in self._times.items()}

    def discard(self) -> None:
        """Do not count the step that is under way: something else took time in it."""
        self._began = None

    def tick(self, now: float) -> bool:
        """A step begins; all ranks must call this equally often: it ends in a collective when a k has been timed.

        Args:
            now: seconds.

        Returns:
            Whether k changes with it.
        """
        began, self._began = self._began, now
        if self.is_done or began is None:
            return False
        if self._settling:
            self._settling -= 1
            return False
        self._timed.append(now - began)
        if len(self._timed) < TIMED_STEPS:
            return False
        before = self.k
        self._note(before, self._agree(statistics.fmean(self._timed)))
        self._timed, self._settling = [], SETTLING_STEPS
        return self.k != before

    def _note(self, k: int, seconds: float) -> None:
        self._times.setdefault(k, []).append(seconds)
        if self._search.next_k is not None:
            self._search.record(seconds)
        elif self._again:
            del self._again[0]
        if self._search.next_k is None and self._again is None:
            left = min(self._visits - len(self._search.measured), REPEATS * FINALISTS)
            best = sorted(self._search.measured, key=self._search.measured.__getitem__)[:FINALISTS]
            self._again = [best[i % len(best)] for i in range(left - left % len(best))]


# What deferring costs in memory, and the k that a byte bound allows (Oh et al. 2022, algorithm 2, lines 1 and 2).


def sizes_of(deferral: WeightGradientDeferral) -> tuple[dict[int, int], dict[int, int]]:
    """Bytes that blocks keep for their weight gradients: inputs by number of the tensor, output gradients by O."""
    inputs: dict[int, int] = {}
    gradients: dict[int, int] = {}
    for number, block in enumerate(deferral.blocks, start=1):
        inputs[number - 1] = sum(deferral.split.first_pass.input_bytes.get(layer, 0) for layer in block.layers)
        gradients[number + 1] = sum(deferral.split.first_pass.waiting_bytes.get(layer, 0) for layer in block.layers)
    return inputs, gradients


def extra_bytes(deferral: WeightGradientDeferral, k: int) -> int:
    """Bytes by which the peak at this k is above that of the conventional order, simulated from measured sizes."""
    return max(0, _peak(deferral, k) - _peak(deferral, 0)) if deferral.blocks and k else 0


def _peak(deferral: WeightGradientDeferral, k: int) -> int:
    inputs, gradients = sizes_of(deferral)
    schedule = reverse_first_k(len(deferral.blocks), k)
    buffers = step_buffers(schedule, activation_bytes=inputs, output_gradient_bytes=gradients)
    return simulate(schedule, {"F": 1.0, "O": 1.0, "W": 1.0, "S": 0.0}, buffers=buffers).peak_bytes


# The k of a run as plain data, for checkpoints; what comes back is data from outside, and checked whole.

_MOST_MB = 2**20


@dataclass(frozen=True)
class SavedK:
    """The result of a search, and what it was for."""

    k: int
    blocks: int
    """L, of which k are re-ordered."""
    bucket_cap_mb: float
    world_size: int

    def state(self) -> dict[str, Any]:
        """Plain types, for :func:`read_saved_k`."""
        return asdict(self)

    def what_is_off(self) -> str | None:
        """Reason why this is the result of no search."""
        for name, value in (("k", self.k), ("blocks", self.blocks), ("world_size", self.world_size)):
            if type(value) is not int:
                return f"{name} is no whole number"
        if type(self.bucket_cap_mb) not in (int, float) or not 0 < self.bucket_cap_mb <= _MOST_MB:
            return "bucket_cap_mb is no number of MiB"
        if not 0 <= self.k <= self.blocks:
            return "k is not between 0 and blocks"
        return None


def read_saved_k(state: object) -> SavedK | None:
    """The k of an earlier run; None with a :class:`NoEffectWarning` where this is none, and k is then found anew."""
    try:
        saved = SavedK(**state) if type(state) is dict else None
    except TypeError:  # names that are missing, or others
        saved = None
    off = "it is no mapping with k, blocks, bucket_cap_mb and world_size" if saved is None else saved.what_is_off()
    if off is None:
        return saved
    warn_no_effect(f"the k of an earlier run has no effect, and k is searched for again: {off}")
    return None


K = Annotated[int, AtLeast(0)] | Literal["auto"]
RANKS_DIFFER = "the ranks ran the layers of their first step in different orders"
_CHOOSING = "choose k"


class KChoice:
    """Chooses k between two steps.

    Args:
        model: whose process group has to agree.
        deferral: of that model; knows its blocks after the first step.
        wanted: a number, or ``"auto"``.
        max_memory: bytes; None: no bound.
        known_k: what an earlier run found; then ``"auto"`` does not search if the numbers of ranks and blocks fit.
    """

    def __init__(
        self,
        model: DistributedDataParallel,
        deferral: WeightGradientDeferral,
        wanted: K,
        max_memory: int | None,
        known_k: SavedK | None = None,
    ) -> None:
        self._model = model
        self._deferral = deferral
        self._ranks = RankAgreement(group=model.process_group)
        self._wanted: K = wanted
        self._max_memory = max_memory
        self.saved: SavedK | None = None
        """The k of an earlier run that ``"auto"`` takes up, if there is one for as many ranks."""
        self.order_stays_because: str | None = None
        """Why all weight gradients are computed in the conventional order, if they are."""
        self.search_steps = 0
        """Steps from the first one until the search had ended, or until now."""
        self._tuner: KTuner | None = None
        self._compared = self._changed = False
        if known_k is not None:
            self.use_known(known_k)

    @property
    def is_searching(self) -> bool:
        """Return whether ``"auto"`` is still measuring."""
        return self._wanted == "auto" and self.order_stays_because is None

    @property
    def measured(self) -> dict[int, float] | None:
        """Seconds a step by k, in the order in which they were measured; None: nothing was searched for."""
        return None if self._tuner is None else self._tuner.measured

    def want(self, k: K) -> None:
        """Use this k from the next step on; ``"auto"`` searches again.

        Raises:
            ValueError: k is above the number of blocks.
        """
        self.check_range(k)
        self._wanted, self._tuner, self.saved, self._changed = k, None, None, True

    def use_known(self, saved: SavedK) -> None:
        """Let ``"auto"`` take up the k of an earlier run, if that had as many ranks and blocks."""
        if saved.world_size == dist.get_world_size(self._model.process_group):
            self.saved = saved

    def to_save(self) -> SavedK | None:
        """Result that a checkpoint should keep; None while k is searched for, or before there are blocks."""
        blocks = len(self._deferral.blocks)
        if self._wanted == "auto" or not blocks:
            return None
        world_size = dist.get_world_size(self._model.process_group)
        return SavedK(self._deferral.k, blocks, self._model.bucket_bytes_cap / 2**20, world_size)

    def keep_order(self, reason: str) -> None:
        """Leave all weight gradients in the conventional order from now on; whoever asked for a k is warned."""
        self.order_stays_because = reason
        if isinstance(self._wanted, int) and self._wanted > 0:
            warn_no_effect(f"k={self._wanted} has no effect: {reason}")

    def check_range(self, k: K | None = None) -> None:
        """Look at this k, or the one that was asked for, once the number of blocks is known.

        Raises:
            ValueError: k is above it.
        """
        k = self._wanted if k is None else k
        blocks = self._deferral.blocks
        if isinstance(k, int) and k > len(blocks) > 0:
            names = ", ".join(block.name for block in blocks)
            raise ValueError(f"k={k}, but the model has {len(blocks)} blocks: {names}; choose 0 to {len(blocks)}")

    def next_step(self, *, is_first: bool, steps: int) -> int | None:
        """The k for the step that begins now; all ranks must ask equally often.

        Args:
            is_first: whether no k is in use yet.
            steps: done so far.

        Returns:
            None where k stays as it is.

        Raises:
            ValueError: the k that was asked for is above the number of blocks, or the memory bound below the floor.
        """
        if not self._compared:
            self._compare_ranks()
        blocks = len(self._deferral.blocks)
        if not blocks or self.order_stays_because is not None:
            return None
        saved = self.saved
        if self._wanted == "auto" and self._tuner is None and saved is not None and saved.blocks == blocks:
            self._wanted, is_first = saved.k, True
        if self._wanted != "auto":
            if not is_first and not self._changed:
                return None
            self.check_range()
            chosen = min(self._wanted, self._affordable())
            self._changed = False
            return chosen
        return self._search(blocks, steps)

    def _search(self, blocks: int, steps: int) -> int | None:
        changes = True
        if self._tuner is None:
            self._tuner = KTuner(blocks, self._affordable(), self._largest)
        else:
            changes = self._tuner.tick(time.perf_counter())
        self.search_steps = steps
        if self._tuner.is_done:
            self._wanted = self._tuner.k
        return self._tuner.k if changes else None

    def discard_measurement(self) -> None:
        """Something other than training took time since the last step: do not count it when searching for k."""
        if self._tuner is not None:
            self._tuner.discard()

    def _compare_ranks(self) -> None:
        """Leave the order alone unless all ranks found the same blocks: they have to send the same things in turn."""
        self._compared = True
        blocks = repr([(block.name, [layer.name for layer in block.layers]) for block in self._deferral.blocks])
        mark = float(zlib.crc32(blocks.encode()))
        if (self._largest(mark), -self._largest(-mark)) != (mark, mark):
            self.keep_order(RANKS_DIFFER)

    def _affordable(self) -> int:
        """The largest k within the memory bound of each rank; without a bound the number of blocks.

        Raises:
            ValueError: the bound is below what a step takes with nothing deferred.
        """
        blocks, bound = len(self._deferral.blocks), self._max_memory
        if bound is None:
            return blocks
        peak = self._largest(peak_so_far(next(self._model.module.parameters()).device))
        inputs, gradients = sizes_of(self._deferral)
        sizes: Any = {"activation_bytes": inputs, "output_gradient_bytes": gradients, "plain_peak_bytes": int(peak)}
        return -int(self._ranks.largest(lambda: -largest_k(blocks, bound, **sizes), _CHOOSING))  # batches may differ

    def _largest(self, value_here: float) -> float:
        return self._ranks.largest(lambda: value_here, _CHOOSING)
