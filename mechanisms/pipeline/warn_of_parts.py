"""Layers that do something else with micro-batches than with a batch."""

from __future__ import annotations

import warnings

from torch import nn

from retime.mechanisms.no_effect import NoEffectWarning
from retime.mechanisms.torch_private import BatchNormBase

__all__ = ["warn_of_parts"]

_DROPOUT = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)


def warn_of_parts(model: nn.Module) -> None:
    """Say of layers that see parts of a batch that they do, once each kind."""
    norms = [name for name, one in model.named_modules() if isinstance(one, BatchNormBase)]
    if norms:
        warnings.warn(
            f"{norms[0]!r} and other BatchNorm layers take their statistics from micro-batches under a pipeline, so "
            "training differs from that on one device: use microbatches=1, or another normalisation",
            NoEffectWarning,
            stacklevel=2,
        )
    drops = [name for name, one in model.named_modules() if isinstance(one, _DROPOUT) and one.p]
    if drops:
        warnings.warn(
            f"{drops[0]!r} and other dropout layers draw other masks under a pipeline than on one device",
            NoEffectWarning,
            stacklevel=2,
        )
