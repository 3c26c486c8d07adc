"""The k of a run as plain data, for checkpoints; what comes back is data from outside, and checked whole."""

from dataclasses import asdict, dataclass
from typing import Any

from retime.foundations.no_effect import warn_no_effect

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
        """Why this is the result of no search."""
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
    warn_no_effect(f"the k of an earlier run has no effect, and is found anew: {off}")
    return None
