"""What plans go by of one batch, found out once and passed along."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from retime.foundations.parts import Split, key_of, name_of, no_larger, samples_in, sizes_of

__all__ = ["BatchRecord", "Key"]

Key = tuple[Any, ...]


@dataclass(frozen=True, eq=False)
class BatchRecord:
    """A batch, with what decides which plan it runs under.

    Attributes:
        batch: itself.
        key: everything of its shape but how many samples it has, and the model as it is.
        samples: how many it has.
        sizes: bytes of each of its tensors.
    """

    batch: Any
    key: Key
    samples: int
    sizes: tuple[int, ...]

    @classmethod
    def of(cls, batch: Any, model: nn.Module, gradients: str, split: Split) -> BatchRecord:
        """The record of a batch that comes now.

        Args:
            batch: on the model's device.
            model: as it is now.
            gradients: whether those of steps before are there.
            split: cuts the batch.
        """
        return cls(batch, key_of(batch, model, gradients), samples_in(batch, split), sizes_of(batch))

    @property
    def name(self) -> str:
        """The key as text, for checkpoints and files."""
        return name_of(self.key)

    def fits(self, samples: int, sizes: tuple[int, ...]) -> bool:
        """Whether it is no larger than a batch of so many samples and these sizes."""
        return self.samples <= samples and no_larger(self.sizes, sizes)
