"""Storages that something goes on writing into after autograd has saved a tensor on them: nothing changes."""

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence

from retime.mechanisms.memory_budget.offload.hosts import HostDisk, HostMemory
from retime.mechanisms.memory_budget.offload.saved_tensors import OffloadSavedTensors
from retime.mechanisms.memory_budget.offload.tier import HostTier
from support.memory_budget import offload_all

B, T, F, H = 3, 4, 5, 6
"""Samples, time steps, features and hidden units."""


@pytest.fixture(params=["memory", "disk"])
def host(request: pytest.FixtureRequest, tmp_path: Path) -> HostTier:
    return HostMemory("cpu") if request.param == "memory" else HostDisk(tmp_path)


class Recurrent(nn.Module):
    """A layer of torch's, between two of which something is saved."""

    def __init__(self, layer: nn.Module, packed: bool = False) -> None:
        super().__init__()
        self.before, self.layer, self.after = nn.Linear(F, F), layer, nn.LazyLinear(2)
        self.packed = packed

    def forward(self, values: Tensor) -> Tensor:
        hidden = self.before(values).tanh()
        if self.packed:
            out = self.layer(pack_padded_sequence(hidden, [T, T - 1, 1], batch_first=True))[0].data
        else:
            out = self.layer(hidden)[0]
        return self.after(out.tanh())


class Cells(Recurrent):
    def forward(self, values: Tensor) -> Tensor:
        state = None
        for hidden in self.before(values).tanh().unbind(1):
            state = self.layer(hidden, state)
        return self.after(state[0] if isinstance(state, tuple) else state)


class Chunks(nn.Module):
    """Parts that share memory, each with a version counter of its own, and are changed one after the other."""

    def __init__(self, cut: Callable[[Tensor], tuple[Tensor, ...]]) -> None:
        super().__init__()
        self.cut, self.layer = cut, nn.Linear(F, 3 * H)

    def forward(self, values: Tensor) -> Tensor:
        one, two, three = self.cut(self.layer(values))
        return one.sigmoid_() + two.sigmoid_() + three.mul_(0.5).sigmoid_()


class Data(nn.Module):
    """Writes that no version counter tells of, before another save and after the last one."""

    def __init__(self, again: bool) -> None:
        super().__init__()
        self.again, self.layer, self.after = again, nn.Linear(F, H), nn.Linear(H, 2)

    def forward(self, values: Tensor) -> Tensor:
        hidden = self.layer(values).exp()
        hidden.data.mul_(0.5)
        out = self.after(hidden) if self.again else hidden.sum(-1)
        hidden.data.clamp_(max=0.7)
        return out


class Arrays(nn.Module):
    """A constant that NumPy writes into, through memory of its own or of torch's."""

    def __init__(self, own: bool) -> None:
        super().__init__()
        self.own, self.layer = own, nn.Linear(F, H)

    def forward(self, values: Tensor) -> Tensor:
        array = np.ones(H, dtype=np.float32) if self.own else torch.ones(H).numpy()
        first = self.layer(values) * torch.from_numpy(array)
        array *= 2
        second = first.tanh() * torch.from_numpy(array)
        array += 1
        return second


MODELS: dict[str, Callable[[], nn.Module]] = {
    "GRU": lambda: Recurrent(nn.GRU(F, H, num_layers=2, batch_first=True)),
    "GRU, both ways": lambda: Recurrent(nn.GRU(F, H, batch_first=True, bidirectional=True)),
    "float64 GRU": lambda: Recurrent(nn.GRU(F, H, batch_first=True)).double(),
    "packed GRU": lambda: Recurrent(nn.GRU(F, H, batch_first=True), packed=True),
    "LSTM": lambda: Recurrent(nn.LSTM(F, H, batch_first=True)),
    "float64 LSTM": lambda: Recurrent(nn.LSTM(F, H, batch_first=True)).double(),
    "packed LSTM": lambda: Recurrent(nn.LSTM(F, H, batch_first=True), packed=True),
    "projected LSTM": lambda: Recurrent(nn.LSTM(F, H, batch_first=True, proj_size=2)),
    "RNN": lambda: Recurrent(nn.RNN(F, H, batch_first=True)),
    "GRUCell": lambda: Cells(nn.GRUCell(F, H)),
    "LSTMCell": lambda: Cells(nn.LSTMCell(F, H)),
    "unsafe_chunk": lambda: Chunks(lambda values: values.unsafe_chunk(3, -1)),
    "unsafe_split": lambda: Chunks(lambda values: values.unsafe_split(H, -1)),
    "unsafe_split_with_sizes": lambda: Chunks(lambda values: values.unsafe_split_with_sizes([H, H, H], -1)),
    "data, then saved again": lambda: Data(again=True),
    "data": lambda: Data(again=False),
    "from_numpy": lambda: Arrays(own=True),
    "numpy": lambda: Arrays(own=False),
}


def trained(model: nn.Module, values: Tensor, context: AbstractContextManager[object]) -> list[Tensor]:
    model.zero_grad()
    if isinstance(context, OffloadSavedTensors):
        context.keep = [*model.parameters(), values]
    for _ in range(2):
        with context:
            loss = model(values).square().mean()
        loss.backward()
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


@pytest.mark.filterwarnings("ignore:LSTM with projections")
@pytest.mark.parametrize("in_flight_bytes", [0, 200])
@pytest.mark.parametrize("name", MODELS)
def test_offloading_changes_no_gradient(host: HostTier, name: str, in_flight_bytes: int) -> None:
    torch.manual_seed(0)
    model = MODELS[name]()
    values = torch.randn(B, T, F, dtype=next(model.parameters()).dtype)
    model(values)
    offload = offload_all(host, (), in_flight_bytes, prefetch=2)
    plain, ours = trained(copy.deepcopy(model), values, nullcontext()), trained(model, values, offload)
    assert len(plain) == len(ours) > 0
    assert all(torch.equal(one, two) for one, two in zip(plain, ours, strict=True))
    assert host.live_bytes() == 0
    host.close()
