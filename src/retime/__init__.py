"""retime re-orders one training step and leaves its result unchanged.

Importing it registers its strategy names with Lightning: ``Trainer(strategy="fused_optimizer")``.
"""

from importlib.metadata import version

from lightning.pytorch.strategies import StrategyRegistry

from retime.callbacks import FuseOptimizer, PeakMemory, StepTimeline
from retime.mechanisms.fusion import declare_per_parameter, fuse_optimizer
from retime.mechanisms.no_effect import NoEffectWarning
from retime.strategies import FusedOptimizerDDPStrategy, FusedOptimizerStrategy

__all__ = [
    "FuseOptimizer",
    "FusedOptimizerDDPStrategy",
    "FusedOptimizerStrategy",
    "NoEffectWarning",
    "PeakMemory",
    "StepTimeline",
    "declare_per_parameter",
    "fuse_optimizer",
]
__version__ = version("lightning-retime")

for _name, _strategy, _options in (
    ("fused_optimizer", FusedOptimizerStrategy, {"mode": "backward"}),
    ("fused_optimizer_forward", FusedOptimizerStrategy, {"mode": "forward"}),
    ("fused_optimizer_ddp", FusedOptimizerDDPStrategy, {"mode": "backward"}),
):
    StrategyRegistry.register(_name, _strategy, description=_strategy.__doc__.splitlines()[0], **_options)
