"""Out-of-order backprop on one device: weight gradients on a stream of their own (Oh et al. 2022, section 4.1)."""

from retime.mechanisms.two_streams.backward import NO_UPDATES_IN_GRAPHS, Threads, TwoStreamBackward, TwoStreamReport
from retime.mechanisms.two_streams.graph import GraphReport
from retime.mechanisms.two_streams.search import Setting

__all__ = ["NO_UPDATES_IN_GRAPHS", "GraphReport", "Setting", "Threads", "TwoStreamBackward", "TwoStreamReport"]
