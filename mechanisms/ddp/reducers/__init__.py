"""Ways to sum gradients over ranks: where they are, or in host memory."""

from retime.mechanisms.ddp.reducers.device import DeviceReducer, OwnGroupsReducer
from retime.mechanisms.ddp.reducers.host import HostReducer, TimedSum
from retime.mechanisms.ddp.reducers.reducer import Reducer, ScalingReducer

__all__ = [
    "DeviceReducer",
    "HostReducer",
    "OwnGroupsReducer",
    "Reducer",
    "ScalingReducer",
    "TimedSum",
]
