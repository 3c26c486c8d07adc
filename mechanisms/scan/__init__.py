"""The backward pass of recurrent layers as a parallel scan.

From "BPPSA: Scaling Back-propagation by Parallel Scan Algorithm".
:func:`scan_layer` runs one layer; modules in ``retime.modules`` run it in place of torch.nn's layers.
"""

from retime.mechanisms.scan.calibrate import calibrate
from retime.mechanisms.scan.choice import choose_solver, keeps_torchs_own, set_cost_model
from retime.mechanisms.scan.cost_model import CostModel
from retime.mechanisms.scan.layer import scan_bidirectional, scan_layer
from retime.mechanisms.scan.solver import Solver, check_solver, parse_solver

__all__ = [
    "CostModel",
    "Solver",
    "calibrate",
    "check_solver",
    "choose_solver",
    "keeps_torchs_own",
    "parse_solver",
    "scan_bidirectional",
    "scan_layer",
    "set_cost_model",
]
