"""Which k the next step uses: the one that was asked for, that an earlier run found, or that the search measures now.

All ranks come to the same number, within the memory bound; where they differ in what they compute, the order stays.
"""

import time
import zlib
from typing import Annotated, Literal

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from retime.foundations.arguments import AtLeast
from retime.foundations.ddp import RankAgreement
from retime.foundations.measure import peak_so_far
from retime.foundations.no_effect import warn_no_effect
from retime.foundations.weight_gradients import WeightGradientDeferral
from retime.mechanisms.out_of_order.k_tuner import KTuner
from retime.mechanisms.out_of_order.memory import largest_affordable_k
from retime.mechanisms.out_of_order.saved_k import SavedK

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
        self._known: SavedK | None = None
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
        """Whether ``"auto"`` is still measuring."""
        return self._wanted == "auto"

    @property
    def known_k(self) -> SavedK | None:
        """The k of an earlier run that ``"auto"`` takes up, if there is one for as many ranks."""
        return self._known

    @property
    def measured(self) -> dict[int, float] | None:
        """Seconds a step by k, in the order in which they were measured; None: nothing was searched for."""
        return dict(self._tuner.measured) if self._tuner is not None else None

    def want(self, k: K) -> None:
        """Use this k from the next step on; ``"auto"`` searches again.

        Raises:
            ValueError: k is above the number of blocks.
        """
        self.check_range(k)
        self._wanted, self._tuner, self._known, self._changed = k, None, None, True

    def use_known(self, saved: SavedK) -> None:
        """Let ``"auto"`` take up the k of an earlier run, if that had as many ranks and blocks."""
        if saved.world_size == dist.get_world_size(self._model.process_group):
            self._known = saved

    def to_save(self) -> SavedK | None:
        """What a checkpoint should keep; None while k is searched for, or before there are blocks."""
        blocks = len(self._deferral.blocks)
        if self.is_searching or not blocks:
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
        known = self._known
        if self._wanted == "auto" and self._tuner is None and known is not None and known.blocks == blocks:
            self._wanted, is_first = known.k, True
        if self._wanted != "auto":
            if not is_first and not self._changed:
                return None
            chosen = self._bounded(self._wanted)
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
        found = repr([(block.name, [layer.name for layer in block.layers]) for block in self._deferral.blocks])
        mark = float(zlib.crc32(found.encode()))
        if (self._largest(mark), -self._largest(-mark)) != (mark, mark):
            self.keep_order(RANKS_DIFFER)

    def _bounded(self, k: int) -> int:
        self.check_range(k)
        return min(k, self._affordable())

    def _affordable(self) -> int:
        if self._max_memory is None:
            return len(self._deferral.blocks)
        peak = peak_so_far(next(self._model.module.parameters()).device)
        return largest_affordable_k(self._deferral, self._max_memory, int(self._largest(peak)))

    def _largest(self, value_here: float) -> float:
        return self._ranks.largest(lambda: value_here, _CHOOSING)
