"""Modules that replace torch.nn's and go backward as a parallel scan: recurrent ones, and chains of layers."""

from retime.modules.convert import ConversionReport, convert, convert_back
from retime.modules.layers import ScanGRU, ScanLSTM, ScanRNN
from retime.modules.scan_sequential import ScanReport, ScanSequential

__all__ = [
    "ConversionReport",
    "ScanGRU",
    "ScanLSTM",
    "ScanRNN",
    "ScanReport",
    "ScanSequential",
    "convert",
    "convert_back",
]
