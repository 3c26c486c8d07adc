"""Deferred weight gradients in a bare loop: the same bits, in the order of algorithm 2; layers cut out of the graph."""

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from retime.foundations.weight_gradients import WeightGradientDeferral
from retime.foundations.weight_gradients.cut import ONE_KERNEL, USED_TWICE
from retime.foundations.weight_gradients.passes import NOT_CALLED, USED_ELSEWHERE
from retime.foundations.weight_gradients.split_backward import CHECKPOINTED, SMALL
from support.deferral_pairs import WIDTH, Around, Own, assert_same, note_gradients, pair, step

Make = Callable[[], nn.Module]


def mlp() -> nn.Module:
    square = [layer for _ in range(3) for layer in (nn.Linear(WIDTH, WIDTH), nn.ReLU(inplace=True))]
    return nn.Sequential(nn.Linear(8, WIDTH), nn.Tanh(), *square, nn.Linear(WIDTH, WIDTH))


def convolutions() -> nn.Module:
    def stage(inputs: int) -> list[nn.Module]:
        return [nn.Conv2d(inputs, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU(inplace=True)]

    return nn.Sequential(*stage(3), *stage(64), *stage(64), nn.GroupNorm(4, 64), nn.Flatten(), nn.Linear(1024, 100))


def shared_layer() -> nn.Module:
    shared = nn.Linear(WIDTH, WIDTH)
    return nn.Sequential(nn.Linear(8, WIDTH), shared, nn.Tanh(), shared, nn.Tanh(), shared)


def encoder() -> nn.Module:
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(WIDTH, 4, 200, dropout=0.1, batch_first=True), 3)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(500, WIDTH)
        self.rnn = nn.LSTM(WIDTH, WIDTH, batch_first=True)
        self.out = nn.Linear(WIDTH, 500)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.out(self.rnn(self.embedding(tokens))[0])


class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        return gradient @ weight.t(), x.t() @ gradient


def gated(x: Tensor, weight: Tensor) -> Tensor:
    """Reads its input twice, and its weight behind another kernel."""
    return x * (x @ weight).sigmoid()


def in_place(x: Tensor, weight: Tensor) -> Tensor:
    return x.add_(1.0) @ weight


def around(use: Callable[[Tensor, Tensor], Any]) -> nn.Module:
    return nn.Sequential(nn.Linear(8, WIDTH), Own(use), nn.Linear(WIDTH, WIDTH))


class Branches(nn.Module):
    """Skips across blocks, tensors in dictionaries, one layer under checkpointing, one unused."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, WIDTH)
        self.down, self.up = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.checkpointed = nn.Linear(WIDTH, WIDTH)
        self.unused = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> dict[str, Any]:
        x = self.first(x)
        y = self.up(torch.relu(self.down(x))) + x
        z = checkpoint(self.checkpointed, y, use_reentrant=False)
        return {"out": z + x, "parts": [y]}


class ReadFromOutside(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(500, WIDTH)
        self.middle = nn.Linear(WIDTH, WIDTH)

    def forward(self, tokens: Tensor) -> Tensor:
        return nn.functional.linear(self.middle(self.embedding(tokens)), self.embedding.weight)


VECTORS = torch.randn(4, 8, generator=torch.Generator().manual_seed(1))
IMAGES = torch.randn(2, 3, 4, 4, generator=torch.Generator().manual_seed(1))
TOKENS = torch.arange(20).reshape(2, 10)
SEQUENCE = torch.randn(2, 5, WIDTH, generator=torch.Generator().manual_seed(1))
MODELS: dict[str, tuple[Make, Tensor]] = {
    "mlp": (mlp, VECTORS),
    "convolutions": (convolutions, IMAGES),
    "shared_layer": (shared_layer, VECTORS),
    "encoder": (encoder, SEQUENCE),
    "recurrent": (Recurrent, TOKENS),
    "own_function": (lambda: around(Scaled.apply), VECTORS),
    "gated": (lambda: around(gated), VECTORS),
    "in_place": (lambda: around(in_place), VECTORS),
    "branches": (Branches, VECTORS),
    "read_from_outside": (ReadFromOutside, TOKENS),
}


def loss_of(output: Any) -> Tensor:
    if type(output) is dict:
        return output["out"].square().mean() + output["parts"][0].mean()
    return getattr(output, "loss", None) if hasattr(output, "loss") else output.square().mean()


def run(model: nn.Module, data: Any, *, seed: int, surroundings: Any = contextlib.nullcontext) -> Tensor:
    torch.manual_seed(seed)
    with surroundings():
        return loss_of(model(**data) if isinstance(data, dict) else model(data))


def assert_same_training(make: Make, data: Any, surroundings: Any = contextlib.nullcontext) -> WeightGradientDeferral:
    """Train with every k beside a plain copy: gradients must be the same bits, and each hook fires once."""
    torch.manual_seed(0)
    plain = make()
    torch.manual_seed(0)
    model = make()
    deferral = WeightGradientDeferral(model)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.01, momentum=0.9) for m in (plain, model)]
    for seed, k in enumerate((0, 0, 1, 2, 3, 99, 1, 0)):
        deferral.k = k
        fired, handles = note_gradients(model)
        expected = run(plain, data, seed=seed, surroundings=surroundings)
        loss = run(model, data, seed=seed, surroundings=surroundings)
        deferral.watch(loss)
        assert torch.equal(loss, expected)
        expected.backward()
        loss.backward()
        for handle in handles:
            handle.remove()
        assert len(fired) == len(set(fired))
        for (name, ours), theirs in zip(model.named_parameters(), plain.parameters(), strict=True):
            assert (ours.grad is None) == (theirs.grad is None), name
            assert ours.grad is None or torch.equal(ours.grad, theirs.grad), (name, k)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    deferral.remove()
    return deferral


@pytest.mark.parametrize("name", MODELS)
def test_the_same_bits_for_every_k(name: str) -> None:
    make, data = MODELS[name]
    deferral = assert_same_training(make, data)
    assert deferral.split.passes.deferred_gradients + deferral.split.passes.buffered_gradients > 0


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("architecture", ["gpt2", "llama"])
def test_transformers_unmodified(architecture: str, tied: bool) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 600, "bos_token_id": 0, "eos_token_id": 0, "tie_word_embeddings": tied}

    def make() -> nn.Module:
        if architecture == "gpt2":
            config = transformers.GPT2Config(n_layer=3, n_embd=WIDTH, n_head=2, n_positions=16, **sizes)
            return transformers.GPT2LMHeadModel(config)
        config = transformers.LlamaConfig(
            num_hidden_layers=3, hidden_size=WIDTH, intermediate_size=320, num_attention_heads=2, **sizes
        )
        return transformers.LlamaForCausalLM(config)

    tokens = torch.arange(24).reshape(2, 12)
    deferral = assert_same_training(make, {"input_ids": tokens, "labels": tokens, "use_cache": False})
    assert deferral.split.passes.deferred_gradients
    assert len(deferral.blocks) == 5
    assert ("its parameters are tied to another module's" in deferral.split.layers_in_order) == tied


def test_autocast() -> None:
    def bfloat16() -> Any:
        return torch.autocast("cpu", torch.bfloat16)

    deferral = assert_same_training(mlp, VECTORS, bfloat16)
    assert deferral.split.passes.deferred_gradients
    assert assert_same_training(shared_layer, VECTORS, bfloat16).split.passes.deferred_gradients


def test_reasons_are_told() -> None:
    def reasons(name: str) -> tuple[dict[str, int], dict[str, int]]:
        deferral = assert_same_training(*MODELS[name])
        return deferral.split.layers_in_order, deferral.split.buffered_layers

    assert reasons("branches")[0] == {NOT_CALLED: 1}
    assert CHECKPOINTED in reasons("branches")[1]
    assert reasons("read_from_outside")[0] == {USED_ELSEWHERE: 1}
    assert ONE_KERNEL in reasons("own_function")[1]
    assert USED_TWICE in reasons("gated")[1]
    assert SMALL in reasons("convolutions")[1]
    assert "it changes its input in place" in reasons("in_place")[1]
    assert any("kernel computes all gradients" in reason for reason in reasons("recurrent")[0])


class Kernels(TorchDispatchMode):
    """Counts the kernels that do the work of a backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name()
        if any(part in name for part in ("::mm", "::bmm", "backward", "::addmm")):
            self.names.append(name)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", ["mlp", "encoder", "recurrent"])
def test_no_kernel_runs_twice(name: str) -> None:
    make, data = MODELS[name]
    model = make()
    deferral = WeightGradientDeferral(model)
    counts = []
    for k in (0, 99):
        deferral.k = k
        loss = run(model, data, seed=0)
        deferral.watch(loss)
        with Kernels() as kernels:
            loss.backward()
        counts.append(sorted(kernels.names))
    assert counts[0] == counts[1]


def test_weight_gradients_come_last_and_in_forward_order() -> None:
    model = mlp()
    deferral = WeightGradientDeferral(model, k=3)
    fired, _ = note_gradients(model)
    for _ in range(2):
        fired.clear()
        loss = run(model, VECTORS, seed=0)
        deferral.watch(loss)
        loss.backward()
    assert [block.name for block in deferral.blocks] == ["0", "2", "4", "6", "8"]
    order = [name for name in fired if name.endswith("weight")]
    assert order == ["8.weight", "6.weight", "0.weight", "2.weight", "4.weight"]


def test_blocks_by_name() -> None:
    model = nn.Sequential(mlp().append(nn.Linear(WIDTH, 8)), mlp().append(nn.Linear(WIDTH, 8)), mlp())
    deferral = WeightGradientDeferral(model, blocks=["0", "1"])
    deferral.watch(run(model, VECTORS, seed=0))
    assert [block.name for block in deferral.blocks][:2] == ["0", "1"]
    wrong = WeightGradientDeferral(model, blocks=["nowhere"])
    loss = run(model, VECTORS, seed=0)
    with pytest.raises(ValueError, match="not a module of the model"):
        wrong.watch(loss)


def test_a_gradient_for_some_tensors_only_leaves_parameters_alone() -> None:
    model = mlp()
    deferral = WeightGradientDeferral(model, k=2)
    deferral.watch(run(model, VECTORS, seed=0))
    inputs = VECTORS.clone().requires_grad_()
    loss = run(model, inputs, seed=0)
    (gradient,) = torch.autograd.grad(loss, inputs, retain_graph=True)
    assert gradient.abs().sum() > 0
    assert all(parameter.grad is None for parameter in model.parameters())
    loss.backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_backward_twice_over_one_graph_adds_up() -> None:
    plain, model, deferral = pair(mlp)
    deferral.watch(run(model, VECTORS, seed=0))
    for m in (plain, model):
        loss = run(m, VECTORS, seed=0)
        loss.backward(retain_graph=True)
        loss.backward()
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad)


def test_no_gradient_is_lost_when_k_falls_between_forward_and_backward() -> None:
    model = mlp()
    deferral = WeightGradientDeferral(model, k=4)
    deferral.watch(run(model, VECTORS, seed=0))
    loss = run(model, VECTORS, seed=0)
    deferral.k = 1
    loss.backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_evaluation_and_failures_leave_nothing() -> None:
    model = mlp()
    deferral = WeightGradientDeferral(model, k=3)
    deferral.watch(run(model, VECTORS, seed=0))
    parameters = list(model.parameters())
    with torch.no_grad():
        run(model, VECTORS, seed=0)
    with pytest.raises(RuntimeError):
        model(torch.zeros(2, 3))
    assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
    deferral.split.forget()
    run(model, VECTORS, seed=0).backward()
    deferral.remove()
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def applied_in_place(layer: nn.Module, x: Tensor) -> Tensor:
    """Changes one output of the layer, whose memory another shares."""
    a, b = layer(x)
    b.mul_(2.0)
    return a + 0 * b.sum()


@pytest.mark.parametrize(
    "use",
    [
        lambda x, w: ((y := x @ w), y[:, 2:]),
        lambda x, w: ((y := x @ w), y.detach()),
        lambda x, w: (x + w.mean(0), x),
        lambda x, w: (x + w.mean(0), x.view(-1, WIDTH)),
    ],
    ids=["overlapping outputs", "detached output", "its input", "view of its input"],
)
def test_memory_that_outputs_share_is_changed_in_place(use: Any) -> None:
    plain, model, deferral = pair(lambda: Around(Own(use), applied_in_place))
    assert_same(model, plain, deferral, steps=3)
    assert deferral.split.passes.deferred_gradients == 2


def test_an_output_that_backward_needs_must_not_be_changed_unseen() -> None:
    def attend(x: Tensor, weight: Tensor) -> Tensor:
        keys = torch.ones(1, 1, WIDTH, WIDTH)
        return nn.functional.scaled_dot_product_attention(x[None, None], weight[None, None], keys)[0, 0]

    plain, model, deferral = pair(lambda: Around(Own(attend), lambda layer, x: layer(x).mul_(2.0)))
    for attempt in (lambda: step(plain), lambda: step(model, deferral), lambda: step(model, deferral)):
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            attempt()


@pytest.mark.parametrize("layer", [lambda: nn.Linear(WIDTH, WIDTH), lambda: nn.LayerNorm(WIDTH)], ids=["cut", "held"])
@pytest.mark.parametrize("part", [0, 1, 2])
def test_parameters_are_frozen_and_thawed_in_mid_run(part: int, layer: Any) -> None:
    plain, model, deferral = pair(lambda: Around(layer(), lambda layer, x: layer(x)))
    for frozen in (False, False, True, True, False, False):
        for one in (plain, model):
            parameters = [*one.layer.parameters()] if part == 2 else [[*one.layer.parameters()][part]]
            for parameter in parameters:
                parameter.requires_grad_(not frozen)
        assert_same(model, plain, deferral)
    assert deferral.split.passes.deferred_gradients + deferral.split.passes.buffered_gradients > 6


def test_a_layer_frozen_between_forward_and_backward_gets_no_gradient() -> None:
    _, model, deferral = pair(lambda: Around(nn.Linear(WIDTH, WIDTH), lambda layer, x: layer(x)))
    step(model, deferral)
    model.zero_grad()
    loss = model(torch.ones(4, 8)).sum()
    model.layer.requires_grad_(False)
    loss.backward()
    assert [p.grad is None for p in model.parameters()] == [False, False, True, True, False, False]


def test_a_branch_without_gradient_stays_without() -> None:
    fired = []

    class Ignores(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.ignored, self.layer = nn.Linear(8, WIDTH), TwoInputs()
            self.first = nn.Linear(8, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(self.first(x), Zeros.apply(self.ignored(x)))

    class TwoInputs(Own):
        def __init__(self) -> None:
            super().__init__(lambda x, weight: x @ weight)

        def forward(self, x: Tensor, other: Tensor) -> Tensor:
            return super().forward(x)

    class Zeros(torch.autograd.Function):
        """Takes a gradient that is not there for zeros, as functions do unless they say otherwise."""

        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            fired.append(gradient)
            return gradient

    plain, model, deferral = pair(Ignores)
    assert_same(model, plain, deferral, steps=3)
    assert not fired
    assert deferral.split.passes.deferred_gradients


def keeps_a_loss(module: Own) -> Callable[[Tensor, Tensor], Tensor]:
    def use(x: Tensor, weight: Tensor) -> Tensor:
        y = x @ weight
        module.__dict__["kept"] = y.sin().mean()
        return y

    return use


def test_a_loss_that_a_layer_keeps_counts() -> None:
    def make() -> nn.Module:
        layer = Own(lambda x, weight: x)
        layer.use = keeps_a_loss(layer)
        return Around(layer, lambda layer, x: layer(x) + layer.kept)

    plain, model, deferral = pair(make)
    assert_same(model, plain, deferral, steps=3)
    assert deferral.split.layers_in_order == {USED_ELSEWHERE: 1}


@pytest.mark.parametrize("layer", [lambda: nn.Linear(WIDTH, WIDTH), lambda: nn.LayerNorm(WIDTH)], ids=["cut", "held"])
def test_a_weight_that_other_code_begins_to_read_is_refused_before_any_gradient(layer: Any) -> None:
    plain, model, deferral = pair(lambda: Around(layer(), lambda layer, x: layer(x)))
    assert_same(model, plain, deferral, steps=2)
    for one in (plain, model):
        one.use = lambda layer, x: layer(x) * layer.weight.mean()
    with pytest.raises(RuntimeError, match=r"'layer' get gradients from outside.*No gradient has been set.*use k=0"):
        step(model, deferral)
    assert all(parameter.grad is None for parameter in model.parameters())
    deferral.split.forget()
    assert_same(model, plain, deferral)


def test_double_backward_is_refused_before_any_gradient() -> None:
    _, model, deferral = pair(lambda: Around(nn.Linear(WIDTH, WIDTH), lambda layer, x: layer(x)))
    step(model, deferral)
    model.zero_grad()
    with pytest.raises(RuntimeError, match=r"use k=0.*No gradient has been set"):
        model(torch.ones(4, 8)).sum().backward(create_graph=True)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_weights_that_move_to_other_memory_after_a_forward_pass_without_backward() -> None:
    plain, model, deferral = pair(lambda: Around(nn.LayerNorm(WIDTH), lambda layer, x: layer(x)))
    assert_same(model, plain, deferral)
    model(torch.ones(4, 8))  # its loss is never used
    for one in (plain, model):
        one.layer.weight.data = torch.full((WIDTH,), 3.0)
    assert_same(model, plain, deferral)
