"""Mechanisms with streams run whole, as fits, on a simulated CUDA device; and with faults seeded, which are found.

Each fit is right in every order of execution: the bits of the plain strategy, and no fault. A fault takes the place of
a part of the product; it is found in one order or more.
"""

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from retime import FusedOptimizerStrategy, FuseOptimizer, MemoryBudgetStrategy, OOOSingleDeviceStrategy
from retime.foundations.streams import Mark, SideStream
from retime.mechanisms.cpu_accumulation import HostReducer, reduction
from retime.mechanisms.fusion.backward import BackwardFusion
from retime.mechanisms.memory_budget.offload import OffloadSavedTensors, hosts
from retime.schedules.budget import OffloadPlan
from retime.strategies import CPUAccumulateStrategy
from support.memory_budget import IGNORED, SHALLOW, Net, assert_close, fit
from support.simulated_cuda import ORDERS, SimulatedCuda, simulated_cuda

EACH_ORDER = pytest.mark.parametrize(
    "order", [*ORDERS[:3], *(pytest.param(one, marks=pytest.mark.long) for one in ORDERS[3:])]
)
pytestmark = [*IGNORED, pytest.mark.filterwarnings("ignore:.*the process grew by"), pytest.mark.usefixtures("offloads")]


class Half(Net):
    """Half as deep: planning takes as long as a model is deep."""

    def __init__(self) -> None:
        super().__init__(depth=4)


class Adam(Half):
    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


class OneRank(CPUAccumulateStrategy):
    """Gradients go through the host although there is nothing to add up, so that a fit of one process shows it."""

    def make_reducer(self, model: DistributedDataParallel) -> HostReducer:
        return HostReducer(self.root_device)


FITS: dict[str, Callable[[], Any]] = {
    "fusion": lambda: FusedOptimizerStrategy(side_stream=True, bucket_bytes=2000),
    "memory budget": lambda: MemoryBudgetStrategy(SHALLOW, host="memory"),
    "host reduction": lambda: OneRank(bucket_cap_mb=0.002),
    "two streams": lambda: OOOSingleDeviceStrategy(threads=(1, 1), max_memory=3000),
    "graph": lambda: OOOSingleDeviceStrategy(threads=(1, 1), graph=True),
}
MODELS: dict[str, type[Net]] = dict.fromkeys(FITS, Adam) | {"memory budget": Half}


@pytest.fixture(scope="module")
def plain() -> dict[str, Net]:
    """What the plain strategy trains, without a device."""
    trained = {name: make() for name, make in MODELS.items()}
    for name, module in trained.items():
        fit(module, "ddp" if name == "host reduction" else "auto")
    if dist.is_initialized():
        dist.destroy_process_group()
    return trained


def fit_on_device(name: str, order: str, *callbacks: Any) -> tuple[Net, SimulatedCuda, Any]:
    """Fit, with the host's access to what it adds up told to the simulation, which cannot see it."""
    module = MODELS[name]()
    sums = reduction.host_sums
    with simulated_cuda(order) as device, pytest.MonkeyPatch.context() as patched:
        patched.setattr(reduction, "host_sums", lambda *given: WatchedSums(sums(*given), device))
        trainer = fit(module, FITS[name](), callbacks=list(callbacks))
        report = trainer.strategy.report()
        torch.cuda.synchronize()
    return module, device, report


class WatchedSums:
    """Sums in host memory, of which the simulation hears."""

    def __init__(self, sums: Any, device: SimulatedCuda) -> None:
        self._sums, self._device = sums, device

    def add(self, values: Tensor, scale: float = 1.0) -> None:
        self._device.host_access(values, writes=True)
        self._sums.add(values, scale)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sums, name)


@EACH_ORDER
@pytest.mark.parametrize("name", FITS)
def test_a_fit_is_right_in_every_order(name: str, order: str, plain: dict[str, Net]) -> None:
    module, device, report = fit_on_device(name, order)
    assert device.faults == []
    assert_close(plain[name], module, 0)
    assert (device.deferred > 0) == (order != "eager")
    if name == "fusion":
        assert report.fused_updates > 0
    elif name == "host reduction":
        assert report.buckets > 3
    elif name == "two streams":
        assert report.sub_stream > 3
    elif name == "graph":
        assert report.graph.replays == 1
        assert report.sub_stream == 2 * 6
    else:
        assert report.offload.storages > 3
        assert report.offload.bytes_in == report.offload.bytes_out


Around = Callable[[Tensor, list[Tensor]], contextlib.AbstractContextManager[Any]]


def gradients_of_three_steps(around: Around) -> list[Tensor]:
    """All gradients of a small network.

    Args:
        around: the context of a forward pass, from its inputs and the parameters.
    """
    torch.manual_seed(0)
    layers = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4)))
    gradients = []
    for _ in range(3):
        inputs = torch.randn(16, 8)
        with around(inputs, list(layers.parameters())):
            loss = layers(inputs).exp().square().sum()
        loss.backward()
        gradients += [parameter.grad.clone() for parameter in layers.parameters() if parameter.grad is not None]
        layers.zero_grad()
    return gradients


def offload(order: str, prefetch: int = 1) -> tuple[list[Tensor], SimulatedCuda]:
    """The same where all that is saved is offloaded, and copies hold two of the sources.

    A fit lets go of a source at once where it has no bytes to spare for sources in flight, so waits hide there.
    """
    plan = OffloadPlan(1, frozenset(range(20)), prefetch, 20)
    contexts = []

    def around(inputs: Tensor, parameters: list[Tensor]) -> OffloadSavedTensors:
        keep = [*parameters, inputs]
        contexts.append(OffloadSavedTensors(plan, host, keep, 2 * inputs.nbytes, on_mismatch=lambda _: None))
        return contexts[-1]

    with simulated_cuda(order) as device:
        host = hosts.parse_host("memory", "cpu")
        gradients = gradients_of_three_steps(around)
        host.close()
        torch.cuda.synchronize()
    for context in contexts:
        report = context.report()
        assert report.storages == 5
        assert report.bytes_in > 0
    return gradients, device


@EACH_ORDER
def test_forward_fusion_beside_two_streams(order: str, plain: dict[str, Net]) -> None:
    module, device, report = fit_on_device("two streams", order, FuseOptimizer("forward"))
    assert device.faults == []
    assert report.sub_stream > 0
    assert all(map(torch.equal, module.parameters(), plain["two streams"].parameters()))


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("prefetch", [0, 1, 2])
def test_offloading_is_right_in_every_order(order: str, prefetch: int, expected: list[Tensor]) -> None:
    gradients, device = offload(order, prefetch)
    assert device.faults == []
    assert all(map(torch.equal, gradients, expected))


@pytest.fixture(scope="module")
def expected() -> list[Tensor]:
    return gradients_of_three_steps(lambda inputs, parameters: contextlib.nullcontext())


# Faults: each is a part of the product, and what takes its place.


def unwaited(mark: Mark) -> bool:
    """In the place of ``Mark.wait``: nobody waits, and what is held is let go of."""
    mark._held.clear()
    return False


def waited_unless_done(mark: Mark) -> bool:
    """As it was: no wait where query() says that the work has ended."""
    event, stream = mark._event, mark._given_on
    waits = event is not None and stream is not None and not event.query()
    if waits:
        stream.wait_event(event)
    mark._held.clear()
    return waits


def unjoined(side: SideStream) -> None:
    side._held.clear()


@contextlib.contextmanager
def behind_nothing(side: SideStream, hold: Any = ()) -> Iterator[None]:
    """In the place of ``after_current``: the side stream does not wait for the compute stream."""
    stream = side._get()
    side._held += hold
    with contextlib.nullcontext() if stream is None else torch.cuda.stream(stream):
        yield


AFTER_CURRENT = SideStream.after_current
COPY = SideStream.copy


def holding_nothing(side: SideStream, hold: Any = ()) -> Any:
    return AFTER_CURRENT(side)


def copy_holding_nothing(side: SideStream, into: Tensor, source: Tensor, hold: Any = ()) -> Mark:
    return COPY(side, into, source)


def copy_marked_too_early(side: SideStream, into: Tensor, source: Tensor, hold: Any = ()) -> Mark:
    stream = side._get()
    given_on = torch.cuda.current_stream()
    with side.after_current():
        event = stream.record_event()
        into.copy_(source, non_blocking=True)
    return Mark(event, given_on, hold)


def load_on_a_new_stream(copy: Any, into: torch.UntypedStorage) -> Any:
    """It does not wait for the copy out, whatever the compute stream has waited for."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        hosts._bytes_of(into).copy_(copy.copied.buffer, non_blocking=True)
        mark = Mark(stream.record_event(), torch.cuda.default_stream(), [into])
    return hosts._MemoryLoading(hosts._Copied(mark))


def wait_for_nothing(loading: Any) -> bool:
    return False


def settle_without_wait(copy: Any) -> bool:
    copy.copied.mark._held.clear()
    return False


def result_outside_of_the_stream(
    self: Any, sums: Any, values: Tensor, buffer: Tensor, scale: float, left: Mark, done: Any, given: float
) -> None:
    """The future's event is recorded on a stream that has nothing."""
    left.synchronize()
    sums.add(buffer, scale)
    with self._to_device.after_itself():
        values.copy_(buffer, non_blocking=True)
    done.set_result(values)


def reduced_before_it_has_left(mark: Mark) -> None:
    """In the place of ``Mark.synchronize``: the host adds up what may not be there."""


def one_buffer_for_all(self: HostReducer, key: Any, values: Tensor) -> Tensor:
    buffer = self._buffers.get("all")
    if buffer is None or buffer.numel() < values.numel():
        buffer = self._buffers["all"] = torch.empty(10_000, dtype=values.dtype, pin_memory=True)
    return buffer[: values.numel()]


def future_without_device(*, devices: Any = ()) -> Future[Tensor]:
    """Who waits for it makes no stream wait."""
    return Future()


def step_ends_without_join(fusion: BackwardFusion) -> None:
    """In the place of ``_join``: what is held is let go of."""
    if fusion._side is not None:
        fusion._side._held.clear()


FAULTS: dict[str, tuple[str, Any, str, Any]] = {
    "updates: no join": ("fusion", SideStream, "join", unjoined),
    "updates: before the gradients are there": ("fusion", SideStream, "after_current", behind_nothing),
    "updates: gradients are not held": ("fusion", SideStream, "after_current", holding_nothing),
    "updates: the step's end does not join": ("fusion", BackwardFusion, "_join", step_ends_without_join),
    "offloading: no waits": ("offloading", Mark, "wait", unwaited),
    "offloading: no wait where query() says done": ("offloading", Mark, "wait", waited_unless_done),
    "offloading: copies do not wait": ("offloading", SideStream, "after_current", behind_nothing),
    "offloading: copies hold nothing": ("offloading", SideStream, "copy", copy_holding_nothing),
    "offloading: marks stand before copies": ("offloading", SideStream, "copy", copy_marked_too_early),
    "offloading: the step uses what has not come back": ("offloading", hosts._MemoryLoading, "wait", wait_for_nothing),
    "offloading: sources are let go of at once": ("offloading", hosts._MemoryCopy, "settle", settle_without_wait),
    "offloading: back on another stream": ("offloading", hosts._MemoryCopy, "load", load_on_a_new_stream),
    "reduction: the host does not wait": ("host reduction", Mark, "synchronize", reduced_before_it_has_left),
    "reduction: copies out do not wait": ("host reduction", SideStream, "after_current", behind_nothing),
    "reduction: the result is set elsewhere": ("host reduction", HostReducer, "_reduce", result_outside_of_the_stream),
    "reduction: one host buffer for all buckets": ("host reduction", HostReducer, "_buffer", one_buffer_for_all),
    "reduction: the future knows no device": ("host reduction", reduction, "Future", future_without_device),
    "reduction: marks stand before copies": ("host reduction", SideStream, "copy", copy_marked_too_early),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", FAULTS)
def test_a_seeded_fault_is_found(
    name: str, plain: dict[str, Net], expected: list[Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    of, *replaced = FAULTS[name]
    monkeypatch.setattr(*replaced)
    for order in ("late", "eager", "random 0"):
        if of == "offloading":
            values, device = offload(order, prefetch=0)
            right = expected
        else:
            module, device, _ = fit_on_device(of, order)
            values, right = list(module.parameters()), list(plain[of].parameters())
        if device.faults or not all(map(torch.equal, values, right)):
            return
    pytest.fail("not found")


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("right", [True, False])
def test_values_are_given_again_before_their_sum_has_arrived(order: str, right: bool) -> None:
    """Each direction has a stream, so a host buffer may be filled again only behind a wait for the copy back."""
    with simulated_cuda(order) as device:
        reducer, values = HostReducer(), torch.ones(8)
        for _ in range(2):
            done = reducer.start("key", values)
            while not done.done():
                time.sleep(0.001)
            if right:
                done.wait()
        done.wait()
        torch.cuda.synchronize()
        reducer.close()
    assert bool(device.faults) != right
