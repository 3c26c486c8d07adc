"""Sparse transposed Jacobians and the backward pass as a scan over them (BPPSA: Wang, Bai and Pekhimenko 2020)."""

from retime.mechanisms.jacobian.chain import JacobianScan
from retime.mechanisms.jacobian.flops import StepFlop, count_flops, flop_of_product, flop_of_vector
from retime.mechanisms.jacobian.layer import LayerJacobian, UnknownJacobian
from retime.mechanisms.jacobian.layers import jacobian_of, transposed_jacobian
from retime.mechanisms.jacobian.matrix import SparseJacobian
from retime.mechanisms.jacobian.pattern import CsrPattern
from retime.mechanisms.jacobian.product import ProductPlan, VectorPlan, product_count, product_pattern
from retime.mechanisms.jacobian.pruning import prune_class_blind, prune_class_uniform
from retime.mechanisms.jacobian.scan_plan import Multiply, ScanPlan, full_levels, scan_plan

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
