"""Sparse transposed Jacobians and the backward pass as a scan over them (BPPSA: Wang, Bai and Pekhimenko 2020)."""

from retime.mechanisms.scan.jacobians.chain import (
    JacobianScan,
    count_flops,
    flop_of_product,
    flop_of_vector,
    full_levels,
    scan_plan,
)
from retime.mechanisms.scan.jacobians.layers import (
    LayerJacobian,
    UnknownJacobian,
    jacobian_of,
    prune_class_blind,
    prune_class_uniform,
    transposed_jacobian,
)
from retime.mechanisms.scan.jacobians.sparse import CsrPattern, ProductPlan, VectorPlan, product_pattern
