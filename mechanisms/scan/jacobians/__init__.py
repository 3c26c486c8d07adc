"""Sparse transposed Jacobians and the backward pass as a scan over them (BPPSA: Wang, Bai and Pekhimenko 2020)."""

from retime.mechanisms.scan.jacobians.chain import JacobianScan
from retime.mechanisms.scan.jacobians.flops import StepFlop, count_flops, flop_of_product, flop_of_vector
from retime.mechanisms.scan.jacobians.layer import LayerJacobian, UnknownJacobian
from retime.mechanisms.scan.jacobians.layers import jacobian_of, transposed_jacobian
from retime.mechanisms.scan.jacobians.matrix import SparseJacobian
from retime.mechanisms.scan.jacobians.pattern import CsrPattern
from retime.mechanisms.scan.jacobians.product import ProductPlan, VectorPlan, product_count, product_pattern
from retime.mechanisms.scan.jacobians.pruning import prune_class_blind, prune_class_uniform
from retime.mechanisms.scan.jacobians.scan_plan import Multiply, ScanPlan, full_levels, scan_plan

__all__ = [
    "CsrPattern",
    "JacobianScan",
    "LayerJacobian",
    "Multiply",
    "ProductPlan",
    "ScanPlan",
    "SparseJacobian",
    "StepFlop",
    "UnknownJacobian",
    "VectorPlan",
    "count_flops",
    "flop_of_product",
    "flop_of_vector",
    "full_levels",
    "jacobian_of",
    "product_count",
    "product_pattern",
    "prune_class_blind",
    "prune_class_uniform",
    "scan_plan",
    "transposed_jacobian",
]
