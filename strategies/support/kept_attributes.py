"""What a training step leaves on its module, where it runs once a micro-batch and not on all ranks."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

from lightning.pytorch import LightningModule
from torch import nn

from retime.foundations.no_effect import warn_difference

__all__ = ["KeptAttributes"]


_LIGHTNINGS = set(vars(LightningModule()))


class KeptAttributes:
    """Notices which attributes of a module a step writes, and which of its lists, sets and dictionaries grow.

    Args:
        module: whose step it is. Its submodules and Lightning's own attributes do not count.
    """

    def __init__(self, module: LightningModule) -> None:
        self._module = module
        self._names: dict[str, None] = {}
        self._logs = False

    def note_logger(self) -> None:
        """The step asks one of the Trainer's loggers to write."""
        self._logs = True

    @contextmanager
    def noticing(self) -> Iterator[None]:
        """Around one call of the step."""
        before = self._found()
        yield
        after = self._found()
        self._names |= dict.fromkeys(name for name, state in after.items() if before.get(name) != state)

    def warn(self) -> None:
        """Say what was noticed, if anything was."""
        if self._names:
            warn_difference(
                f"training_step keeps {', '.join(map(repr, self._names))} on the module: under a pipeline it runs once "
                "a micro-batch, and comes past its layers only on the rank of the last stage, so hooks find other "
                "values there, and old ones on other ranks. Return them in training_step's dictionary, which "
                "on_train_batch_end gets for the whole batch on all ranks, or use self.log()"
            )

        if self._logs:
            warn_difference(
                "training_step writes to self.logger: under a pipeline it runs once a micro-batch, and comes past its "
                "layers only on the rank of the last stage, while loggers write on the first. Use self.log(), or write "
                "in on_train_batch_end"
            )

    def _found(self) -> dict[str, tuple[int, int]]:
        return {
            name: (id(value), len(value) if isinstance(value, list | dict | set | deque) else 0)
            for name, value in vars(self._module).items()
            if name not in _LIGHTNINGS and not isinstance(value, nn.Module)
        }
