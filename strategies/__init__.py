"""Lightning strategies; ``import retime`` registers their names."""

from retime.strategies.fused_optimizer import FusedOptimizerDDPStrategy, FusedOptimizerStrategy

__all__ = ["FusedOptimizerDDPStrategy", "FusedOptimizerStrategy"]
