"""Modules that replace torch.nn's: recurrent ones whose backward pass through time is a parallel scan."""

from retime.modules.conversion_report import ConversionReport
from retime.modules.convert import convert, convert_back
from retime.modules.layers import ScanGRU, ScanLSTM, ScanRNN

__all__ = ["ConversionReport", "ScanGRU", "ScanLSTM", "ScanRNN", "convert", "convert_back"]
