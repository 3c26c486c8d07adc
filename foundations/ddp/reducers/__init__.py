"""Ways to sum gradients over ranks: where they are, or in host memory."""

from retime.foundations.ddp.reducers.device import DeviceReducer, OwnGroupsReducer
from retime.foundations.ddp.reducers.reducer import Reducer, ScalingReducer

__all__ = [
    "DeviceReducer",
    "OwnGroupsReducer",
    "Reducer",
    "ScalingReducer",
]
