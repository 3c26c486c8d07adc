"""The backward pass of recurrent layers as a parallel scan.

From "BPPSA: Scaling Back-propagation by Parallel Scan Algorithm".
:func:`scan_layer` runs one layer; modules in ``retime.modules`` run it in place of torch.nn's layers.
"""

from retime.mechanisms.scan.calibrate import calibrate
from retime.mechanisms.scan.jacobians import (
    CsrPattern,
    JacobianScan,
    LayerJacobian,
    ProductPlan,
    UnknownJacobian,
    VectorPlan,
    count_flops,
    flop_of_product,
    flop_of_vector,
    full_levels,
    jacobian_of,
    product_pattern,
    prune_class_blind,
    prune_class_uniform,
    scan_plan,
    transposed_jacobian,
)
from retime.mechanisms.scan.layer import scan_bidirectional, scan_layer
from retime.mechanisms.scan.solvers import (
    CostModel,
    Solver,
    check_solver,
    choose_solver,
    keeps_torchs_own,
    parse_solver,
    set_cost_model,
)

__all__ = [
    "CostModel",
    "CsrPattern",
    "JacobianScan",
    "LayerJacobian",
    "ProductPlan",
    "Solver",
    "UnknownJacobian",
    "VectorPlan",
    "calibrate",
    "check_solver",
    "choose_solver",
    "count_flops",
    "flop_of_product",
    "flop_of_vector",
    "full_levels",
    "jacobian_of",
    "keeps_torchs_own",
    "parse_solver",
    "product_pattern",
    "prune_class_blind",
    "prune_class_uniform",
    "scan_bidirectional",
    "scan_layer",
    "scan_plan",
    "set_cost_model",
    "transposed_jacobian",
]
