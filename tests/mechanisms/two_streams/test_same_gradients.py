"""Two streams give the bits of the plain loop, whatever the loop does, and say what stays in order."""

import copy
import pickle
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_, prune
from torch.utils.checkpoint import checkpoint

from retime import fuse_optimizer
from retime.foundations.messages import DifferenceWarning, NoEffectWarning
from retime.mechanisms.two_streams import TwoStreamBackward, TwoStreamReport
from retime.mechanisms.two_streams.layers import called_module
from support.two_stream_steps import plain_step, stepping, twice

STEPS = 5
WIDTH = 12
LAYERS = 3
N = 1
"""Threads of the tests' kernels (``tests/conftest.py``)."""
Step = Callable[[nn.Module, torch.optim.Optimizer, Tensor, int], None]


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Conv1d(3, 4, 3, padding=1), nn.ReLU(inplace=True), nn.Flatten()),
        *(nn.Linear(16, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 2)),
    )


def inputs() -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(6, 3, 4, generator=generator) for _ in range(STEPS)]


class Trained:
    """What a loop leaves behind."""

    def __init__(self, step: Step, make: Callable[[], nn.Module], options: dict[str, Any] | None) -> None:
        self.model = make()
        optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        two_streams = None if options is None else TwoStreamBackward(self.model, **options)
        try:
            for index, x in enumerate(inputs()):
                step(self.model, optimizer, x, index)
        finally:
            if two_streams is not None:
                two_streams.remove()
        self.weights = [parameter.detach().clone() for parameter in self.model.parameters()]
        self.gradients = [parameter.grad for parameter in self.model.parameters()]
        self.two_streams = two_streams

    @property
    def report(self) -> TwoStreamReport:
        return self.two_streams.report()


def both(step: Step = plain_step, make: Callable[[], nn.Module] = network, **options: Any) -> TwoStreamReport:
    """Run a loop plain and on two streams, compare the bits, and return the report."""
    plain, ours = Trained(step, make, None), Trained(step, make, {"threads": (N, N), **options})
    for left, right in zip(plain.weights, ours.weights, strict=True):
        assert torch.equal(left, right)
    for one, other in zip(plain.gradients, ours.gradients, strict=True):
        assert (one is None) == (other is None)
        assert one is None or other is None or (torch.equal(one, other) and one.stride() == other.stride())
    return ours.report


def beside(report: TwoStreamReport) -> int:
    """How many weight gradients waited for a stream."""
    return report.sub_stream + report.main_stream


def test_a_plain_loop() -> None:
    report = both()
    assert (report.layers, report.in_order) == (LAYERS, {})
    assert beside(report) == LAYERS * (STEPS - 1)
    assert " weight gradients of 3 layers ran on the sub-stream" in report.headline


def clipped(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, index: int) -> None:
    model(x).square().mean().backward()
    clip_grad_norm_(model.parameters(), 0.01)
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)


def accumulated(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, index: int) -> None:
    for part in x.chunk(2):
        (model(part).square().mean() / 2).backward()
    if index % 2:
        optimizer.step()
        optimizer.zero_grad()


@stepping
def autocast(model: Any, x: Tensor, index: int) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(x).square().mean()
    loss.backward()


@stepping
def two_losses(model: Any, x: Tensor, index: int) -> None:
    y = model(x)
    y.square().mean().backward(retain_graph=True)
    y.abs().mean().backward()


def evaluated(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, index: int) -> None:
    plain_step(model.train(), optimizer, x, index)
    with torch.no_grad():
        assert not model.eval()(x).requires_grad
    with torch.inference_mode():
        model(x)


def in_anomaly_mode(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, index: int) -> None:
    with torch.autograd.set_detect_anomaly(True):
        plain_step(model, optimizer, x, index)


def scaled(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, index: int) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**index, growth_interval=1)
    scaler.scale(model(x).square().mean()).backward()
    scaler.unscale_(optimizer)
    clip_grad_norm_(model.parameters(), 0.1)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()


def frozen_and_thawed(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, index: int) -> None:
    model[0].requires_grad_(index > 1)  # type: ignore[index]
    plain_step(model, optimizer, x, index)


def weights_written_between(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, index: int) -> None:
    plain_step(model, optimizer, x, index)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.clamp_(-0.2, 0.2)


ALL_BESIDE = {
    "clipping by norm": (clipped, LAYERS * (STEPS - 1)),
    "accumulation": (accumulated, LAYERS * (2 * STEPS - 1)),
    "autocast": (autocast, LAYERS * (STEPS - 1)),
    "retained graph": (twice, LAYERS * (2 * STEPS - 1)),
    "two losses of one graph": (two_losses, LAYERS * (2 * STEPS - 1)),
    "evaluation": (evaluated, LAYERS * (STEPS - 1)),
    "scaler": (scaled, LAYERS * (STEPS - 1)),
    "a layer that thaws": (frozen_and_thawed, (LAYERS - 1) * (STEPS - 1) + STEPS - 3),
    "weights written between steps": (weights_written_between, LAYERS * (STEPS - 1)),
}


@pytest.mark.parametrize("name", ALL_BESIDE)
def test_what_goes_beside(name: str) -> None:
    step, count = ALL_BESIDE[name]
    report = both(step)
    assert beside(report) == count
    assert report.in_order == {}


def test_few_bytes_wait_where_they_are_bounded() -> None:
    assert both(max_memory=1).held_bytes <= 1 < both().held_bytes


# What code does between a forward pass and its backward pass.


@stepping
def frozen_between(model: Any, x: Tensor, index: int) -> None:
    loss = model(x).square().mean()
    model[3].weight.requires_grad_(False)
    model[0].bias.requires_grad_(False)
    loss.backward()
    model.requires_grad_(True)


@stepping
def cast_in_the_backward_pass(model: Any, x: Tensor, index: int) -> None:
    loss = model(x).square().mean()
    with torch.autocast("cpu", torch.bfloat16):
        loss.backward()


@stepping
def convolved_otherwise(model: Any, x: Tensor, index: int) -> None:
    model[0].dilation, model[0].padding = ((1,), (1,)) if index % 2 else ((2,), (2,))
    loss = model(x).square().mean()
    model[0].dilation, model[0].padding = (1,), (0,)
    loss.backward()


def padded_otherwise(model: Any, optimizer: torch.optim.Optimizer, x: Tensor, index: int) -> None:
    model[0].padding_mode = "circular" if index % 2 else "zeros"
    model[0].padding = "same" if index == 2 else (1,)
    plain_step(model, optimizer, x, index)


@stepping
def a_gradient_that_does_not_come(model: Any, x: Tensor, index: int) -> None:
    hidden = model[:4](x)
    model[4:](Stopped.apply(hidden) if index % 2 else hidden).square().mean().backward()  # type: ignore[no-untyped-call]


class Stopped(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> None:
        return None


@pytest.mark.parametrize(
    "step",
    [
        *(frozen_between, cast_in_the_backward_pass, convolved_otherwise, padded_otherwise),
        a_gradient_that_does_not_come,
    ],
)
def test_what_changes_between_the_passes(step: Step) -> None:
    assert (beside(both(step)) > 0) is (step is not cast_in_the_backward_pass)


def test_a_linear_layer_whose_weight_is_written_into_and_whose_input_needs_no_gradient() -> None:
    @stepping
    def step(model: Any, x: Tensor, index: int) -> None:
        loss = model(x).square().mean()
        with torch.no_grad():
            model[0].weight.clamp_(-0.2, 0.2)
        loss.backward()

    def make() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2))

    assert beside(both(step, make)) == 2 * (STEPS - 1)


@pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled")
def test_anomaly_mode_is_plain_and_says_so() -> None:
    with pytest.warns(NoEffectWarning, match="3 in order because anomaly detection looks at each gradient"):
        report = both(in_anomaly_mode)
    assert (report.layers, beside(report)) == (0, 0)


@pytest.mark.filterwarnings("ignore:two streams have no effect")
def test_an_input_whose_cast_is_shared() -> None:
    kept: list[Tensor | None] = []

    @stepping
    def step(model: Any, x: Tensor, index: int) -> None:
        x = x.clone().requires_grad_()
        with torch.autocast("cpu", torch.bfloat16):
            one, two, three = model
            (one(x) + two(x) * three(x)).square().mean().backward()
        kept.append(x.grad)

    def make() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 3), nn.Linear(4, 3), nn.Linear(4, 3))

    both(step, make)
    assert all(map(torch.equal, kept[:STEPS], kept[STEPS:]))  # type: ignore[arg-type]


def test_called_module() -> None:
    owners: list[nn.Module | None] = []

    class Forward:
        def __call__(self, x: Tensor) -> Tensor:
            owners.append(called_module(self))
            return x

    layer: Any = nn.Linear(1, 1)
    layer.forward = Forward()
    copied = copy.copy(layer)
    copied(layer(torch.ones(1)))
    layer.register_forward_hook(lambda *_: None)
    layer(torch.ones(1))
    layer.forward(torch.ones(1))
    assert owners == [layer, copied, layer, None]


@pytest.mark.filterwarnings("ignore:two streams have no effect")
def test_shallow_copies_run_their_own_weights() -> None:
    def clone(module: nn.Module) -> nn.Module:
        """Copy it as meta-learning does: attributes are shared, weights are computed from the original's."""
        copied: Any = type(module).__new__(type(module))
        copied.__dict__ = module.__dict__.copy()
        copied._parameters = {name: one * 1.5 for name, one in module.named_parameters(recurse=False)}
        copied._modules = {name: clone(one) for name, one in module.named_children()}
        return copied  # type: ignore[no-any-return]

    step = stepping(lambda model, x, _: (model(x).square().mean() + clone(model)(x).square().mean()).backward())

    assert both(step).in_order == {
        "its parameters get gradients from several places, which would add up in another order": LAYERS
    }


# Layers that stay in order.


@pytest.mark.filterwarnings("ignore:two streams have no effect")
@pytest.mark.parametrize("kind", ["complex", "replaced convolution"])
def test_layers_with_other_kernels(kind: str) -> None:
    def make() -> nn.Module:
        torch.manual_seed(0)
        if kind == "complex":
            return nn.Sequential(nn.Linear(4, 4, dtype=torch.complex64), nn.Linear(4, 2, dtype=torch.complex64))
        model: Any = nn.Sequential(nn.Conv1d(3, 3, 1))
        run = model[0]._conv_forward
        model[0]._conv_forward = lambda x, weight, bias: run(x, weight - weight.mean(), bias)
        return model  # type: ignore[no-any-return]

    @stepping
    def step(model: Any, x: Tensor, index: int) -> None:
        model(x.to(torch.complex64) if kind == "complex" else x).abs().square().mean().backward()

    assert beside(both(step, make)) == 0


@stepping
def double_backward(model: Any, x: Tensor, index: int) -> None:
    loss = model(x).square().mean()
    gradients = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
    (loss + sum(gradient.square().sum() for gradient in gradients)).backward()


def with_graph(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, index: int) -> None:
    model(x).square().mean().backward(create_graph=True)
    optimizer.step()
    for parameter in model.parameters():
        parameter.grad = None


def for_chosen_inputs(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, index: int) -> None:
    chosen = list(model.parameters())[:3]
    model(x).square().mean().backward(inputs=chosen)
    (of_x,) = torch.autograd.grad(model(x.requires_grad_()).square().mean(), x)
    optimizer.step()
    optimizer.zero_grad()
    with torch.no_grad():
        model[5].weight.add_(of_x.mean())  # type: ignore[index]


class SharedCasts(nn.Module):
    """Layers whose weights autocast casts once for several uses: two calls, or code beside the layer."""

    def __init__(self, use: str, *, sequences: bool, bias: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.use, self.sequences = use, sequences
        self.first = nn.Linear(4, WIDTH)
        self.layer = nn.Linear(WIDTH, WIDTH, bias=bias)
        self.last = nn.Linear(WIDTH, 2)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x if self.sequences else x[:, 0])
        hidden = torch.tanh(self.layer(torch.tanh(hidden)))
        if self.use == "two calls":
            hidden = torch.tanh(self.layer(hidden))
        elif self.use == "beside the layer":
            hidden = nn.functional.linear(hidden, self.layer.weight)
        elif self.use == "in full precision":
            hidden = hidden + self.layer.weight.square().sum()
        return self.last(hidden)  # type: ignore[no-any-return]


@pytest.mark.parametrize("use", ["two calls", "beside the layer", "in full precision", "one call"])
@pytest.mark.parametrize("sequences", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_casts_that_several_uses_share(use: str, sequences: bool, bias: bool) -> None:
    report = both(autocast, lambda: SharedCasts(use, sequences=sequences, bias=bias))
    waits = 2 if use != "one call" else 3
    assert beside(report) == waits * (STEPS - 1)
    assert sum(report.in_order.values()) == 3 - waits


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True", "ignore:two streams have no effect")
@pytest.mark.parametrize("step", [double_backward, with_graph, for_chosen_inputs])
def test_passes_with_another_order_are_plain(step: Step) -> None:
    assert beside(both(step)) == 0


@pytest.mark.filterwarnings("ignore:two streams have no effect")
def test_gradients_of_gradients_from_a_later_step() -> None:
    def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, index: int) -> None:
        (double_backward if index == 3 else plain_step)(model, optimizer, x, index)

    report = both(step)
    assert beside(report) == LAYERS * 2  # in the steps between the first and that one
    assert "differentiated themselves" in str(report.to_dict())


@pytest.mark.filterwarnings("ignore:two streams have no effect")
def test_gradients_of_gradients_of_sequences_under_autocast() -> None:
    def make() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 6, bias=False), nn.Tanh(), nn.Linear(6, 2))

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, index: int) -> None:
        with torch.autocast("cpu", torch.bfloat16, enabled=index % 2 > 0):
            double_backward(model, optimizer, x, index)

    both(step, make)


def test_sequences_that_are_written_into_and_lie_otherwise() -> None:
    def make() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 6), nn.SiLU(inplace=True), nn.Linear(6, 6), nn.SiLU(inplace=True))

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, index: int) -> None:
        lying = x if index % 2 else x.transpose(0, 1)
        plain_step(model, optimizer, lying.unsqueeze(0) if index > 2 else lying, index)

    assert beside(both(step, make)) == 2 * (STEPS - 1)


class Body(nn.Module):
    """Two layers around a part that is the test's."""

    def __init__(self, middle: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.inner, self.last = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.middle = middle

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.middle(self.inner, self.first(x)).relu())


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_layer_under_checkpointing(reentrant: bool) -> None:
    report = both(make=lambda: Body(lambda layer, x: checkpoint(layer, x, use_reentrant=reentrant)))
    assert beside(report) == 2 * (STEPS - 1)
    ((reason, count),) = report.in_order.items()
    assert "activation checkpointing" in reason
    assert (report.layers, count) == (2, 1)


def test_a_layer_that_is_called_twice() -> None:
    report = both(make=lambda: Body(lambda layer, x: layer(layer(x).tanh())))
    assert (report.layers, list(report.in_order.values())) == (2, [1])
    assert "several places" in str(report.to_dict())


def test_a_layer_that_is_called_twice_from_a_later_step() -> None:
    calls = []

    def middle(layer: nn.Module, x: Tensor) -> Tensor:
        calls.append(1)
        y: Tensor = layer(x)
        return layer(y.tanh()) if len(calls) % STEPS == 0 or len(calls) % STEPS > 3 else y

    assert both(make=lambda: Body(middle)).in_order == {}


def weights_in_the_loss(from_step: int) -> Step:
    @stepping
    def step(model: Any, x: Tensor, index: int) -> None:
        loss = model(x).square().mean()
        if index >= from_step:
            loss = loss + model[3].weight.square().sum()
        loss.backward()

    return step


def test_a_weight_in_the_loss() -> None:
    report = both(weights_in_the_loss(0))
    assert report.layers == LAYERS - 1
    assert beside(report) == (LAYERS - 1) * (STEPS - 1)


def test_a_weight_in_the_loss_from_a_later_step_is_named() -> None:
    with pytest.warns(DifferenceWarning, match="'3' stays in order from now on"):
        report = both(weights_in_the_loss(3))
    assert report.layers == LAYERS - 1


def test_tied_weights() -> None:
    def make() -> nn.Module:
        model = network()
        model.add_module("6", nn.Linear(2, WIDTH, bias=False))
        model.add_module("7", nn.Linear(WIDTH, 2))
        model[7].weight = model[5].weight  # type: ignore[index]
        return model

    report = both(make=make)
    assert report.in_order == {"its parameters are tied to another module's": 2}
    assert report.layers == 3


def test_hooks_on_parameters_run_on_the_calling_thread_in_order() -> None:
    def hooked(kept: list[tuple[str, str, float]]) -> Callable[[], nn.Module]:
        def make() -> nn.Module:
            model = network()
            for name in ("5", "0"):
                weight = model.get_submodule(name).weight

                def note(gradient: Any, name: str = name) -> None:
                    total = gradient.grad if isinstance(gradient, nn.Parameter) else gradient
                    kept.append((name, threading.current_thread().name, float(total.sum())))

                weight.register_hook(note) if name == "5" else weight.register_post_accumulate_grad_hook(note)
            return model

        return make

    plain: list[tuple[str, str, float]] = []
    ours: list[tuple[str, str, float]] = []
    Trained(plain_step, hooked(plain), None)
    report = Trained(plain_step, hooked(ours), {"threads": (N, N)}).report
    assert plain == ours
    assert [name for name, *_ in ours] == ["5", "0"] * STEPS
    assert report.in_order == {"its parameters have hooks, which run after their gradient": 2}
    assert beside(report) == STEPS - 1


def test_backward_hooks_find_the_gradients_of_their_module() -> None:
    seen: list[bool] = []

    def make() -> nn.Module:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
        inner = model[1]
        inner.register_full_backward_hook(lambda *_: seen.append(inner[0].weight.grad is not None))
        return model

    report = both(make=make)
    assert all(seen)
    assert report.layers == 1
    assert "backward hooks" in str(report.to_dict())


def test_compiled_models_are_left_alone_and_it_is_said() -> None:
    torch._dynamo.reset()
    with pytest.warns(NoEffectWarning, match="3 in order because it is compiled"):
        report = both(make=lambda: torch.compile(network(), backend="eager"))  # type: ignore[return-value, arg-type]
    assert beside(report) == 0


def test_a_function_that_compiles_an_attached_model() -> None:
    """The layers are in the model when torch traces it: it sees their own forward."""
    torch._dynamo.reset()
    model, plain = network(), network()
    two_streams = TwoStreamBackward(model, threads=(N, N))
    compiled = torch.compile(lambda x: model(x).square().mean(), backend="eager")
    for x in inputs()[:2]:
        compiled(x).backward()
        plain(x).square().mean().backward()
    two_streams.remove()
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)  # type: ignore[arg-type]


@pytest.mark.filterwarnings("ignore:two streams have no effect")
@pytest.mark.parametrize("two_streams_first", [True, False])
@pytest.mark.parametrize("mode", ["backward", "forward"])
def test_optimizer_fusion_in_the_same_loop(mode: str, two_streams_first: bool) -> None:
    """Strategies refuse backward fusion; in a bare loop its hooks keep layers in order."""

    def trained(*, both: bool) -> tuple[nn.Module, int]:
        model = network()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        before = TwoStreamBackward(model, threads=(N, N)) if both and two_streams_first else None
        fusion = fuse_optimizer(model, optimizer, mode)
        two_streams = TwoStreamBackward(model, threads=(N, N)) if both and before is None else before
        for x in inputs():
            plain_step(model, optimizer, x, 0)
        fusion.remove()
        assert fusion.report().fused_updates > 0
        if two_streams is None:
            return model, 0
        two_streams.remove()
        return model, beside(two_streams.report())

    plain, _ = trained(both=False)
    ours, count = trained(both=True)
    assert count == (LAYERS * (STEPS - 1) if mode == "forward" else 0)
    for one, other in zip(plain.parameters(), ours.parameters(), strict=True):
        assert torch.equal(one, other)


@stepping
def lends_parameters(model: Any, x: Tensor, index: int) -> None:
    """The gradients belong to what the layers were lent in the forward pass."""
    lent = {name: nn.Parameter(value.detach() * 2) for name, value in model.named_parameters()}
    torch.func.functional_call(model, lent, (x,)).square().mean().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is None
        parameter.grad = lent[name].grad


def test_parameters_that_layers_are_lent() -> None:
    assert beside(both(lends_parameters)) == LAYERS * (STEPS - 1)


@pytest.mark.parametrize("name", ["weight", "bias"])
def test_pruned_parameters(name: str) -> None:
    def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, index: int) -> None:
        plain_step(model, optimizer, x, index)
        if index == 2:
            prune.l1_unstructured(model[3], name, 0.5)  # type: ignore[index]

    assert beside(both(step)) == LAYERS * 2 + (LAYERS - 1) * (STEPS - 3)


def test_nothing_to_train_is_said() -> None:
    with pytest.warns(NoEffectWarning, match="nothing is trained"):
        TwoStreamBackward(nn.ReLU()).remove()
    with pytest.warns(NoEffectWarning, match="no torch.nn.Linear"):
        TwoStreamBackward(nn.LayerNorm(3)).remove()


def test_where_all_layers_stay_in_order_it_is_said() -> None:
    def make() -> nn.Module:
        model = network()
        for parameter in model.parameters():
            parameter.register_hook(lambda gradient: gradient * 0.5)
        return model

    with pytest.warns(NoEffectWarning, match="3 in order because its parameters have hooks"):
        both(make=make)


# Copies.


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_of_an_attached_model_trains_plainly(copied: Callable[[nn.Module], nn.Module]) -> None:
    model = network()
    two_streams = TwoStreamBackward(model, threads=(N, N))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for x in inputs()[:2]:
        plain_step(model, optimizer, x, 0)
    twin = copied(model)
    counted = beside(two_streams.report())
    twin(inputs()[2]).square().mean().backward()
    assert beside(two_streams.report()) == counted
    two_streams.remove()
    model(inputs()[2]).square().mean().backward()
    for one, other in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)  # type: ignore[arg-type]
    again = TwoStreamBackward(twin, threads=(N, N))
    assert again.report().layers == LAYERS
    again.remove()


def test_a_wrapped_model_is_refused() -> None:
    wrapped = object.__new__(nn.parallel.DistributedDataParallel)
    with pytest.raises(ValueError, match="two streams are for one device"):
        TwoStreamBackward(wrapped)
