"""The backward pass of recurrent layers as a parallel scan (BPPSA)."""

from retime.mechanisms.scan.layer import scan_bidirectional, scan_layer
from retime.mechanisms.scan.solver import Solver, check_solver, parse_solver

__all__ = ["Solver", "check_solver", "parse_solver", "scan_bidirectional", "scan_layer"]
