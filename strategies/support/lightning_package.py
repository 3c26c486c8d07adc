"""Say so when the other Lightning package is in use."""

import sys

_HINT = "retime works with `lightning`: use `from lightning.pytorch import Trainer` in place of `pytorch_lightning`"


class LightningOnly:
    """Mix-in for strategies: ``pytorch_lightning.Trainer`` quotes the strategy's repr when it refuses an instance."""

    def __repr__(self) -> str:
        name = f"{type(self).__module__}.{type(self).__name__}()"
        return f"{name} ({_HINT})" if "pytorch_lightning" in sys.modules else name


def refuse_other_trainer(trainer: object) -> None:
    """Raise TypeError for a Trainer of ``pytorch_lightning``."""
    if type(trainer).__module__.partition(".")[0] == "pytorch_lightning":
        raise TypeError(_HINT)
