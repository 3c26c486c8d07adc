"""CUDA graphs of parts of a model, simulated: plain bits in every order of kernels, reasons by name, faults found."""

import copy
import pickle
import random
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from retime.foundations.messages import DifferenceWarning, NoEffectWarning
from retime.mechanisms.two_streams import GraphReport, Setting, TwoStreamBackward, graph
from retime.mechanisms.two_streams.search import settings_for
from retime.mechanisms.two_streams.static_code import Snapshot, StaticCode
from retime.mechanisms.two_streams.sub_stream import DeviceStream
from support.simulated_cuda import ORDERS, SimulatedCuda, simulated_cuda

STEPS = 10
NO_GRAPH = 2
"""Steps before the first replay: layers stay in order, gradients' forms are seen."""


class Mlp(nn.Module):
    """Three linear layers, one of which is not used, and dropout."""

    inputs = (6,)

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last, self.unused = nn.Linear(6, 8), nn.Linear(8, 6), nn.Linear(2, 2)
        self.drop = nn.Dropout(0.3)
        self.scale = 1.0

    def forward(self, x: Tensor) -> Any:
        return self.last(self.drop(torch.tanh(self.first(x)))) * self.scale


class ConvNet(nn.Module):
    """Convolutions with batch statistics, in a block of its own."""

    inputs = (2, 8, 8)

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU())
        self.deep, self.out = nn.Conv2d(4, 4, 3, groups=4, bias=False), nn.Linear(144, 6)

    def forward(self, x: Tensor) -> Any:
        return self.out(self.deep(self.body(x)).flatten(1))


def make(kind: type[Any]) -> Any:
    torch.manual_seed(0)
    return kind()


def square_mean(out: Tensor) -> Tensor:
    return out.square().mean()


Between = Callable[[Any, int], object]
Loss = Callable[[Any], Tensor]


class Loop:
    """Trains a model step by step; what it returns is all that a user could see of it."""

    def __init__(
        self,
        model: Any,
        *,
        loss: Loss = square_mean,
        between: Between = lambda model, step: None,
        sizes: dict[int, int] | None = None,
        accumulate: int = 1,
        retain: bool = False,
    ) -> None:
        self.model, self.loss, self.between = model, loss, between
        self.sizes, self.accumulate, self.retain = sizes or {}, accumulate, retain
        self.seen: list[Tensor] = []

    def call(self, x: Tensor, step: int) -> Any:
        return self.model(x)

    def run(self, steps: int = STEPS) -> list[Tensor]:
        torch.manual_seed(3)
        optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        data = torch.Generator().manual_seed(1)
        for step in range(steps):
            self.between(self.model, step)
            out = self.call(torch.randn(self.sizes.get(step, 3), *self.model.inputs, generator=data), step)
            loss = self.loss(out)
            loss.backward(retain_graph=self.retain)
            if self.retain:
                loss.backward()
            self.seen += [loss.detach(), *(one for one in (out if isinstance(out, tuple) else (out,)))]
            if (step + 1) % self.accumulate == 0:
                self.seen += [p.grad for p in self.model.parameters() if p.grad is not None]
                optimizer.step()
                optimizer.zero_grad()
        state = [*self.model.parameters(), *self.model.buffers()]
        return [one.detach().clone() for one in (*state, *self.seen)]


def graphed(loop: Loop, order: str = "late", **options: Any) -> tuple[list[Tensor], SimulatedCuda, GraphReport]:
    with simulated_cuda(order) as device:
        two_streams = TwoStreamBackward(loop.model, **{"threads": (1, 1), "graph": True, **options})
        try:
            values = loop.run()
            report = two_streams.report().graph
        finally:
            two_streams.remove()
        torch.cuda.synchronize()
    assert not any("forward" in vars(module) for module in loop.model.modules())
    assert report is not None
    return values, device, report


def assert_same(one: list[Tensor], other: list[Tensor]) -> None:
    assert len(one) == len(other)
    assert all(map(torch.equal, one, other))


def check(loop: Callable[[], Loop], **options: Any) -> GraphReport:
    """Train plainly and with graphs, compare all bits, and return the report."""
    values, device, report = graphed(loop(), **options)
    assert device.faults == []
    assert_same(loop().run(), values)
    return report


@pytest.mark.parametrize("order", [pytest.param(one, marks=[pytest.mark.long] * (one in ORDERS[3:])) for one in ORDERS])
@pytest.mark.parametrize("kind", [Mlp, ConvNet])
@pytest.mark.parametrize("options", [{}, {"max_memory": 1000}], ids=["free", "bounded"])
def test_all_bits_are_the_plain_ones_in_every_order(order: str, kind: type[Any], options: dict[str, Any]) -> None:
    report = check(lambda: Loop(make(kind)), order=order, **options)
    assert report == GraphReport(1, {}, STEPS - NO_GRAPH, {})


def test_weight_gradients_run_on_the_sub_stream_of_a_replay() -> None:
    loop = Loop(make(ConvNet))
    with simulated_cuda("late") as device:
        two_streams = TwoStreamBackward(loop.model, threads=(1, 1), graph=True)
        loop.run()
        report = two_streams.report()
        two_streams.remove()
    assert device.deferred > 3 * (STEPS - NO_GRAPH)
    assert (report.sub_stream, report.main_stream) == (3 * (STEPS - 1), 0)
    assert "graph: 8 replays of 1 parts" in str(report)


# Calls that differ from the capture.


def freeze(model: Any, step: int) -> None:
    model.first.weight.requires_grad_(step < 6)


def move(model: Any, step: int) -> None:
    if step == 6:
        model.last.weight.data = model.last.weight.data.clone()


def less_dropout(model: Any, step: int) -> None:
    model.drop.p = 0.1 if step >= 6 else 0.3


def scaled(model: Any, step: int) -> None:
    model.scale = 2.0 if step >= 6 else 1.0


def hooked(model: Any, step: int) -> None:
    if step == 6:
        model.last.register_forward_hook(lambda module, args, out: out * 2)


def replaced(model: Any, step: int) -> None:
    if step == 6:
        model.last = nn.Linear(8, 6)
        with torch.no_grad():
            for parameter in model.last.parameters():
                parameter.fill_(0.1)


@pytest.mark.filterwarnings("ignore:.*stays in order from now on")
@pytest.mark.parametrize(
    ("between", "why"),
    [
        *((freeze, graph.STATE), (move, graph.STATE), (less_dropout, graph.STATE), (scaled, graph.STATE)),
        *((hooked, graph.HOOKS), (replaced, graph.STATE)),
    ],
)
def test_what_changes_between_steps_ends_the_replays_by_name(between: Between, why: str) -> None:
    with pytest.warns(NoEffectWarning, match="runs kernel by kernel where"):
        report = check(lambda: Loop(make(Mlp), between=between))
    assert report.issued == {why: 4}
    assert report.replays == 4


@pytest.mark.parametrize("sizes", [{9: 2}, {1: 2}, {5: 4, 6: 4, 7: 1}])
def test_other_shapes_run_kernel_by_kernel_and_are_warned_of_once(sizes: dict[int, int]) -> None:
    with pytest.warns(
        NoEffectWarning, match="graph: 'the model' runs kernel by kernel where inputs have other"
    ) as told:
        report = check(lambda: Loop(make(ConvNet), sizes=sizes))
    assert len(told) == 1
    assert report.replays == STEPS - NO_GRAPH - len(sizes)
    assert report.issued == {graph.FORMS: len(sizes)}


@pytest.mark.filterwarnings("ignore:graph")
def test_settings_of_torch_are_looked_at() -> None:
    report = check(lambda: Loop(make(Mlp), between=lambda _, step: torch.use_deterministic_algorithms(step == 7)))
    assert report.issued == {graph.SETTINGS: 1}


@pytest.fixture(autouse=True)
def _settings_put_back() -> Iterator[None]:
    yield
    torch.use_deterministic_algorithms(False)


# Passes that differ from the capture's.


def evaluate(model: Any, step: int) -> None:
    with torch.no_grad():
        model.eval()(torch.ones(3, 6))
        model.train()


def changing_loss() -> Loss:
    calls = []

    def loss(out: Tensor) -> Tensor:
        calls.append(1)
        return out.mean() if len(calls) % 3 == 0 else out.square().mean()

    return loss


REPLAYED: dict[str, Callable[[], Loop]] = {
    "gradients of several batches add up": lambda: Loop(make(Mlp), accumulate=3),
    "evaluation runs as it is": lambda: Loop(make(Mlp), between=evaluate),
    # An expanded gradient, of a mean, has other strides, for which kernels may round otherwise.
    "gradients in another form take the captured nodes": lambda: Loop(make(ConvNet), loss=changing_loss()),
    "an expanded gradient is captured as it is": lambda: Loop(make(ConvNet), loss=torch.mean),
    "a graph that is kept has a second backward pass": lambda: Loop(make(Mlp), retain=True),
}


@pytest.mark.parametrize("name", REPLAYED)
def test_passes_that_are_replayed(name: str) -> None:
    assert check(REPLAYED[name]).replays == STEPS - NO_GRAPH


class Heads(Mlp):
    """Two results."""

    def forward(self, x: Tensor) -> Any:
        x = torch.tanh(self.first(x))
        return self.last(x), x + 1


@pytest.mark.parametrize("both", [True, False])
def test_results_that_a_loss_does_not_use_get_no_gradient(both: bool) -> None:
    calls: list[int] = []

    def loss(out: tuple[Tensor, Tensor]) -> Tensor:
        calls.append(1)
        return out[0].square().mean() + (out[1].exp().mean() if both or len(calls) % 4 == 0 else 0)

    def loop() -> Loop:
        calls.clear()
        return Loop(make(Heads), loss=loss)

    assert check(loop).replays == STEPS - NO_GRAPH


class Twins(nn.Module):
    """Calls one part twice in a step."""

    inputs = Mlp.inputs

    def __init__(self) -> None:
        super().__init__()
        self.net = Mlp()
        self.trainer: Any = object()

    def forward(self, x: Tensor) -> Any:
        if self.trainer is None:
            raise ValueError(self)
        return self.net(x), self.net(x + 1)


@pytest.mark.filterwarnings("ignore:graph", "ignore:two streams have no effect")
def test_a_call_before_the_backward_pass_of_another_runs_kernel_by_kernel() -> None:
    report = check(lambda: Loop(make(Twins), loss=lambda out: (out[0] * out[1]).mean()))
    assert report.issued[graph.OPEN] == report.replays > 0


def test_a_forward_pass_without_backward_pass_holds_nothing_up() -> None:
    def looks(model: Any, step: int) -> None:
        model(torch.ones(3, 6))

    assert check(lambda: Loop(make(Mlp), between=looks)).replays >= 2 * (STEPS - NO_GRAPH)


def attached(kind: type[Any]) -> tuple[Any, TwoStreamBackward, Loop]:
    model = make(kind)
    two_streams = TwoStreamBackward(model, threads=(1, 1), graph=True)
    loop = Loop(model)
    loop.run(4)
    return model, two_streams, loop


def test_gradients_of_gradients_and_second_passes_are_refused() -> None:
    with simulated_cuda("late"):
        model, two_streams, _ = attached(Mlp)
        with pytest.raises(RuntimeError, match=r"create_graph=True\) need graph=False"):
            model(torch.ones(3, 6)).sum().backward(create_graph=True)
        loss = model(torch.ones(3, 6)).sum()
        loss.backward()
        with pytest.raises(RuntimeError, match="the first one needs retain_graph=True"):
            loss.backward()
        loss = model(torch.ones(3, 6)).sum()
        with torch.no_grad():
            model.last.weight.add_(1)
        with pytest.raises(RuntimeError, match="was written into between"):
            loss.backward()
        two_streams.remove()


def test_hooks_of_parameters_and_gradients_of_inputs_are_outside() -> None:
    class Deep(nn.Module):
        inputs = Mlp.inputs

        def __init__(self) -> None:
            super().__init__()
            self.before, self.net = nn.Linear(6, 6), Mlp()
            self.net.last.weight.register_hook(lambda gradient: gradient * 2)
            self.trainer: Any = object()

        def forward(self, x: Tensor) -> Any:
            if self.trainer is None:
                raise ValueError(self)
            return self.net(self.before(x))

    report = check(lambda: Loop(make(Deep)))
    assert report.replays == STEPS - 1
    assert list(report.outside.values()) == [1]
    assert "Deep.trainer, which is a object" in next(iter(report.outside))


@pytest.mark.parametrize("cache", [True, False])
def test_autocast_is_captured(cache: bool) -> None:
    class Cast(Loop):
        def call(self, x: Tensor, step: int) -> Any:
            with torch.autocast("cpu", torch.bfloat16, cache_enabled=cache):
                return self.model(x)

    assert check(lambda: Cast(make(Mlp))).replays == STEPS - NO_GRAPH


class Late(Loop):
    """Under autocast, which keeps casts of weights for several uses; calls the part twice from a step on."""

    begin = 99

    def call(self, x: Tensor, step: int) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            out = self.model(x)
            return out + self.model(x + 1) if step >= self.begin else out


def test_shared_casts_of_autocast_are_refused() -> None:
    class Plus(Mlp):
        def __init__(self) -> None:
            super().__init__()
            self.more = nn.Parameter(torch.eye(6))

        def forward(self, x: Tensor) -> Any:
            return super().forward(x) @ self.more

    with pytest.warns(NoEffectWarning, match=f"not captured because {graph.CASTS}"):
        report = check(lambda: Late(make(Plus)))
    assert report.outside == {graph.CASTS: 3}


@pytest.mark.filterwarnings("ignore:two streams have no effect", "ignore:.* stays in order from now on")
def test_a_second_call_under_autocast_is_told_where_it_begins_late() -> None:
    loop = Late(make(Mlp))
    loop.begin = 5
    with (
        pytest.warns(DifferenceWarning, match="called several times in a step. It was not before"),
        pytest.warns(NoEffectWarning, match=graph.OPEN),
    ):
        assert graphed(loop)[2].replays == 4
    loop = Late(make(Mlp))
    loop.begin = 0
    with pytest.warns(NoEffectWarning, match=f"not captured because {graph.CASTS}"):
        assert graphed(loop)[2].replays == 0


# Code that is not static.

COUNT = 0


class Reads(Mlp):
    def forward(self, x: Tensor) -> Any:
        out = super().forward(x)
        return out if out.sum() > 0 else out * 2


class Draws(Mlp):
    def forward(self, x: Tensor) -> Any:
        import random

        return super().forward(x) * random.random()


class Under(Draws):
    def forward(self, x: Tensor) -> Any:
        return super().forward(x)


class Counts(Mlp):
    calls = 0

    def forward(self, x: Tensor) -> Any:
        self.calls += 1
        return super().forward(x) * self.calls


class Appends(Mlp):
    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    def forward(self, x: Tensor) -> Any:
        self.sizes.append(len(x))
        return super().forward(x) * len(self.sizes)


class Writes(Mlp):
    def forward(self, x: Tensor) -> Any:
        return super().forward(x.mul_(2))


class Ties(Mlp):
    def forward(self, x: Tensor) -> Any:
        return self.last(torch.tanh(self.first(self.last(torch.tanh(self.first(x))))))


class Returns(Mlp):
    def forward(self, x: Tensor) -> Any:
        return super().forward(x).t().t()[:, ::2]


class Closes(Mlp):
    def __init__(self) -> None:
        super().__init__()
        factor = [2.0]
        self.act = lambda x: x * factor[0]

    def forward(self, x: Tensor) -> Any:
        return self.act(super().forward(x))


class Masks(Mlp):
    def forward(self, x: Tensor) -> Any:
        out = super().forward(x)
        return out * out[out > 0].numel() / out.numel()


class Prints(Mlp):
    def forward(self, x: Tensor) -> Any:
        print(end="")
        return super().forward(x)


class Fades(Mlp):
    def __init__(self) -> None:
        super().__init__()
        self.trace = torch.ones(6)

    def forward(self, x: Tensor) -> Any:
        return super().forward(x) * self.trace.mul_(0.9)


class Counted(Mlp):
    @property
    def count(self) -> int:
        return COUNT

    def forward(self, x: Tensor) -> Any:
        return super().forward(x) + self.count


CODE = {
    Draws: "Draws.forward changes or reads more than its arguments",
    Under: "Draws.forward changes or reads more than its arguments",
    Counts: "Counts.forward changes or reads more than its arguments .at calls",
    Closes: "uses variables of the function around it",
    Prints: "Prints.forward uses 'print'",
    Counted: "Counted.forward uses 'count'",
}
RUNS = {
    Reads: r"the host reads a value of it \(aten._local_scalar_dense.default\)",
    Writes: r"it writes into inputs, parameters or tensors that are no buffers \(aten.mul_.Tensor\)",
    Fades: r"it writes into inputs, parameters or tensors that are no buffers \(aten.mul_.Tensor\)",
    Ties: "several places",
    Returns: "other than dense tensors of its own",
    Masks: r"the host reads a value of it \(aten.index.Tensor\)",
}


@pytest.mark.parametrize("kind", CODE)
def test_code_that_may_differ_is_refused_before_the_first_step(kind: type[Any]) -> None:
    with simulated_cuda("late"), pytest.warns(NoEffectWarning, match=f"graph=True has no effect: .*{CODE[kind]}"):
        two_streams = TwoStreamBackward(make(kind), threads=(1, 1), graph=True)
    assert two_streams.report().graph == GraphReport(0, two_streams.report().graph.outside, 0, {})  # type: ignore
    two_streams.remove()


@pytest.mark.filterwarnings("ignore:two streams have no effect")
@pytest.mark.parametrize("kind", RUNS)
def test_what_a_run_on_copies_shows_is_refused_before_it_is_captured(kind: type[Any]) -> None:
    with pytest.warns(NoEffectWarning, match=f"graph: 'the model' is not captured because .*{RUNS[kind]}"):
        report = check(lambda: Loop(make(kind)))
    assert report.replays == 0
    assert report.parts == 0
    assert list(report.outside.values()) == [3]


@pytest.mark.filterwarnings("ignore:graph")
def test_code_that_changes_attributes_is_never_captured() -> None:
    report = check(lambda: Loop(make(Appends)))
    assert report.replays == 0
    assert report.issued == {graph.STATE: STEPS - NO_GRAPH}


def test_a_global_that_is_bound_anew_ends_the_replays(monkeypatch: pytest.MonkeyPatch) -> None:
    class Adds(Mlp):
        def forward(self, x: Tensor) -> Any:
            return super().forward(x) + COUNT

    def between(model: Any, step: int) -> None:
        monkeypatch.setitem(globals(), "COUNT", step // 6)

    with pytest.warns(NoEffectWarning, match="modules, parameters, attributes"):
        report = check(lambda: Loop(make(Adds), between=between))
    assert report.issued == {graph.STATE: 4}


def swap_code(model: Any, step: int) -> None:
    if step == 1:
        model.drop = Swapped()
    elif step == 6:
        model.drop.act = lambda x: x * 3


class Swapped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.act = torch.relu

    def forward(self, x: Tensor) -> Any:
        return self.act(x)


class SwappedReads(Swapped):
    def forward(self, x: Tensor) -> Any:
        return x * random.random()


@pytest.mark.filterwarnings("ignore:graph")
def test_code_is_read_anew_where_modules_were_replaced() -> None:
    report = check(lambda: Loop(make(Mlp), between=swap_code))
    assert report.replays == 4
    assert report.issued == {graph.STATE: 4}

    def swap(model: Any, step: int) -> None:
        if step == 1:
            model.drop = SwappedReads()
            random.seed(step)

    with pytest.warns(NoEffectWarning, match="is not captured because SwappedReads.forward uses 'random'"):
        assert check(lambda: Loop(make(Mlp), between=swap)).replays == 0


def test_torchs_own_models_have_static_code() -> None:
    layer = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True)
    assert StaticCode(nn.Sequential(nn.Linear(4, 4), layer, nn.MultiheadAttention(4, 2))).why_not is None
    assert StaticCode(nn.LSTM(2, 2)).why_not == "LSTM keeps its weights in a second place"


# What is around.


def test_a_cpu_has_no_graphs() -> None:
    with pytest.raises(ValueError, match="graph=True captures CUDA graphs, and the model is on cpu: move it"):
        TwoStreamBackward(make(Mlp), graph=True)


def test_a_search_tries_graphs_with_one_stream_and_two() -> None:
    with simulated_cuda():
        tried = settings_for(torch.device("cpu"), 1, graph=True)
    assert tried == [Setting(False), Setting(True), Setting(False, graph=True), Setting(True, graph=True)]
    assert [str(one) for one in tried[2:]] == ["one stream in a graph", "two streams in a graph"]


@pytest.mark.filterwarnings("ignore:two streams do not pay")
def test_a_whole_search_gives_plain_bits() -> None:
    class Long(Loop):
        def run(self, steps: int = 40) -> list[Tensor]:
            return super().run(40)

    check(lambda: Long(make(Mlp)), threads=None)


def test_copies_of_an_attached_model_are_plain() -> None:
    with simulated_cuda("late"):
        model, two_streams, _ = attached(Mlp)
        for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            other(torch.ones(3, 6)).sum().backward()
            TwoStreamBackward(other, threads=(1, 1), graph=True).remove()
        two_streams.remove()
        torch.cuda.synchronize()


# Faults.


def fill_nothing(self: Any, buffers: Any, values: Any) -> None:
    """In the place of ``_fill``: a replay reads the batch before."""


def fill_beside(self: Any, buffers: Any, values: Any) -> None:
    """On a stream that nobody waits for."""
    with torch.cuda.stream(torch.cuda.Stream()):
        for buffer, value in zip(buffers, values, strict=True):
            buffer.data.copy_(value.detach())


def results_themselves(self: Any, inputs: Any) -> Any:
    self._fill(self._inputs, inputs)
    self._graphs[0].replay()
    return tuple(result.detach() for result in self._results)


BACKWARD = graph._Capture.backward


def gradients_themselves(self: Any, gradients: Any, counts: Any) -> Any:
    BACKWARD(self, gradients, counts)
    return [None] * len(self._inputs) + [
        None if place is None else self._flats[place[0]].as_strided(*place[1:]) for place in self._places
    ]


def always(self: Any) -> bool:
    return True


class NeverOpen(graph._Call):
    is_done = property(lambda self: True, lambda self, value: None)  # type: ignore[assignment]


def not_joined(stream: DeviceStream) -> None:
    stream._side._held.clear()


FAULTS: dict[str, tuple[Any, str, Any, Callable[[], Loop]]] = {
    "inputs are not copied in": (graph._Capture, "_fill", fill_nothing, lambda: Loop(make(Mlp))),
    "the replay does not wait for the copy": (graph._Capture, "_fill", fill_beside, lambda: Loop(make(Mlp))),
    "results are the graph's memory": (graph._Capture, "forward", results_themselves, lambda: Loop(make(Mlp))),
    "gradients are the graph's memory": (graph._Capture, "backward", gradients_themselves, lambda: Loop(make(Mlp))),
    "nothing runs before the capture": (graph, "_rehearse", lambda *_: None, lambda: Loop(make(Mlp))),
    "attributes are not looked at": (Snapshot, "holds", always, lambda: Loop(make(Mlp), between=less_dropout)),
    "calls that wait are not seen": (
        *(graph, "_Call", NeverOpen),
        lambda: Loop(make(Twins), loss=lambda out: (out[0] * out[1]).mean()),
    ),
    "the capture does not wait for the sub-stream": (DeviceStream, "join", not_joined, lambda: Loop(make(Mlp))),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", FAULTS)
def test_a_seeded_fault_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    owner, attribute, replacement, loop = FAULTS[name]
    plain = loop().run()
    monkeypatch.setattr(owner, attribute, replacement)
    for order in ORDERS:
        try:
            values, device, _ = graphed(loop(), order)
        except RuntimeError as error:
            assert "unjoined work" in str(error) or "backward pass has run" in str(error)  # noqa: PT017
            return
        if device.faults or not all(map(torch.equal, plain, values)):
            return
    pytest.fail("not found")


# On a device.


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("kind", [Mlp, ConvNet])
@pytest.mark.parametrize("amp", [False, True])
def test_weights_on_a_device_are_the_plain_ones(kind: type[Any], amp: bool) -> None:
    def train(with_graph: bool) -> tuple[list[Tensor], Any]:
        model = make(kind).cuda()
        two_streams = TwoStreamBackward(model, threads=(1, 1), graph=True) if with_graph else None
        torch.manual_seed(3)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        data = torch.Generator().manual_seed(1)
        for step in range(STEPS):
            around: AbstractContextManager[Any] = torch.autocast("cuda", torch.bfloat16) if amp else nullcontext()
            with around:
                out = model(torch.randn(2 if step == 7 else 3, *model.inputs, generator=data).cuda())
            out.float().square().mean().backward()
            if step % 2:
                optimizer.step()
                optimizer.zero_grad()
        report = None
        if two_streams is not None:
            report = two_streams.report().graph
            two_streams.remove()
        return [one.detach().clone() for one in (*model.parameters(), *model.buffers())], report

    torch.use_deterministic_algorithms(True)
    (plain, _), (values, report) = train(False), train(True)
    assert_same(plain, values)
    assert report.replays == STEPS - NO_GRAPH - 1
