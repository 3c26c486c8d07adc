"""Ways to sum gradients over ranks: where they are, or in host memory."""

from retime.mechanisms.ddp.reducers.device import DeviceReducer, OwnGroupsReducer
from retime.mechanisms.ddp.reducers.host import HostReducer
from retime.mechanisms.ddp.reducers.reducer import Reducer

__all__ = [
    "DeviceReducer",
    "HostReducer",
    "OwnGroupsReducer",
    "Reducer",
]
