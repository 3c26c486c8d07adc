"""Several passes in flight: each waits, is finished layer by layer, or is dropped, apart from the others."""

import gc
import weakref
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from retime.foundations.lazy_updates import aliased
from retime.foundations.weight_gradients import SplitBackward, WeightGradientDeferral
from support.deferral_pairs import note_gradients

WIDTH = 160


def network() -> nn.Module:
    """Layers that can be cut, and small ones whose weight gradients are handed on."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(8, WIDTH), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)
    )


def micro_batch(number: int) -> Tensor:
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(number))


def loss_of(model: nn.Module, number: int) -> Tensor:
    return model(micro_batch(number)).square().mean()


def split() -> tuple[nn.Module, nn.Module, SplitBackward]:
    """A plain model and a split one, of which the first pass is over."""
    plain, model = network(), network()
    split = SplitBackward(model)
    loss = loss_of(model, 99)
    split.watch(loss)
    loss.backward()
    model.zero_grad()
    return plain, model, split


def losses(model: nn.Module, split: SplitBackward, numbers: range) -> list[Tensor]:
    values = []
    for number in numbers:
        with split.passes.begin(number):
            values.append(loss_of(model, number))
    return values


def assert_same(model: nn.Module, plain: nn.Module) -> None:
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(model.parameters(), plain.parameters(), strict=True))


def without_gradient(model: nn.Module) -> set[str]:
    """The layers of which no parameter has a gradient."""
    return {name.split(".")[0] for name, parameter in model.named_parameters() if parameter.grad is None}


def waiting(split: SplitBackward, key: int) -> list[str]:
    """The layers of which a weight gradient of this pass waits."""
    return [layer.name for layer in split.first_pass.order if layer in split.passes.of(key).waiting()]


@pytest.mark.parametrize("backward_order", [(0, 1, 2), (2, 0, 1), (2, 1, 0)])
def test_gradients_add_up_in_the_order_in_which_passes_are_finished(backward_order: tuple[int, ...]) -> None:
    plain, model, parts = split()
    for number in range(3):
        loss_of(plain, number).backward()
    ours = losses(model, parts, range(3))
    for number in backward_order:
        ours[number].backward()
        assert without_gradient(model) == {"0", "1", "2", "4"}
    assert list(parts.passes.in_flight) == [0, 1, 2]
    for number in range(3):
        parts.passes.finish(number)
    assert_same(model, plain)
    assert list(parts.passes.in_flight) == []
    assert (parts.passes.deferred_gradients, parts.passes.buffered_gradients) == (9, 3)


def test_all_weight_gradients_of_a_pass_in_one_call() -> None:
    plain, model, parts = split()
    fired, _ = note_gradients(model)
    for number in range(3):
        loss_of(plain, number).backward()
    calls = []

    def backward(*args: object, **kwargs: object) -> None:
        calls.append(args)
        run(*args, **kwargs)

    ours, run = losses(model, parts, range(3)), torch.autograd.backward
    for loss in ours:
        loss.backward()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.autograd, "backward", backward)
        for number in range(3):
            parts.passes.finish_together(number)
    assert len(calls) == 3 + 3  # the three that were cut at once, and the small one, which is handed on
    assert sorted(fired) == sorted(3 * [name for name, _ in model.named_parameters()])
    assert_same(model, plain)
    assert list(parts.passes.in_flight) == []
    assert (parts.passes.deferred_gradients, parts.passes.buffered_gradients) == (9, 3)
    with pytest.raises(ValueError, match="no pass 7 is in flight"):
        parts.passes.finish_together(7)


def test_backward_passes_between_forward_passes() -> None:
    """One forward, one backward (1F1B), with weight gradients two micro-batches late."""
    plain, model, parts = split()
    expected = [loss_of(plain, number) for number in range(4)]
    ours = losses(model, parts, range(2))
    for number in range(4):
        ours[number].backward()
        if number >= 2:
            parts.passes.finish(number - 2)
        if number < 2:
            ours += losses(model, parts, range(number + 2, number + 3))
    parts.passes.finish(2)
    parts.passes.finish(3)
    for loss in expected:
        loss.backward()
    assert_same(model, plain)


def test_one_layer_of_one_pass_while_another_pass_waits() -> None:
    plain, model, parts = split()
    first, second = losses(model, parts, range(2))
    second.backward()
    first.backward()
    layers = {layer.name: layer for layer in parts.first_pass.order}
    assert waiting(parts, 0) == ["0", "1", "2", "4"]
    parts.passes.finish(0, [layers["2"]])
    assert without_gradient(model) == {"0", "1", "4"}
    loss_of(plain, 0).backward()
    assert torch.equal(model[2].weight.grad, plain[2].weight.grad)  # type: ignore[index]
    parts.passes.finish(0, [layers["1"]])
    assert without_gradient(model) == {"0", "4"}
    assert torch.equal(model[1].weight.grad, plain[1].weight.grad)  # type: ignore[index]
    assert waiting(parts, 0) == ["0", "4"]
    assert waiting(parts, 1) == ["0", "1", "2", "4"]
    parts.passes.finish(0)
    assert_same(model, plain)
    assert list(parts.passes.in_flight) == [1]
    parts.passes.finish(1)
    loss_of(plain, 1).backward()
    assert_same(model, plain)


def test_weight_gradients_run_in_the_order_that_is_asked_for() -> None:
    _, model, parts = split()
    fired, _ = note_gradients(model)
    (loss,) = losses(model, parts, range(1))
    loss.backward()
    assert fired == []
    parts.passes.finish(0, reversed(parts.first_pass.order))
    assert [name for name in fired if name.endswith("weight")] == ["4.weight", "2.weight", "1.weight", "0.weight"]


@pytest.mark.parametrize("backward_before", [False, True])
def test_one_pass_is_dropped_and_the_others_stay(backward_before: bool) -> None:
    plain, model, parts = split()
    for number in (0, 2):
        loss_of(plain, number).backward()
    ours = losses(model, parts, range(3))
    if backward_before:
        ours[1].backward()
    parts.passes.drop(1)
    for number in (2, 0):
        ours[number].backward()
    parts.passes.finish(0)
    parts.passes.finish(2)
    assert_same(model, plain)
    with pytest.raises(ValueError, match=r"no pass 1 is in flight; in flight are: \[\]"):
        parts.passes.finish(1)


def test_a_backward_pass_through_a_dropped_pass_is_refused() -> None:
    _, model, parts = split()
    (loss,) = losses(model, parts, range(1))
    parts.passes.drop(0)
    with pytest.raises(RuntimeError, match="the pass 0, which was dropped"):
        loss.backward()
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_failed_forward_or_backward_pass_without_a_key_leaves_keyed_ones_alone() -> None:
    plain, model, parts = split()
    (loss,) = losses(model, parts, range(1))
    loss.backward()
    with pytest.raises(RuntimeError):
        model(torch.zeros(2, 3))
    parts.forget()
    parts.passes.finish(0)
    loss_of(plain, 0).backward()
    assert_same(model, plain)


def test_two_backward_passes_through_one_pass() -> None:
    plain, model, parts = split()
    with parts.passes.begin("both"):
        output = model(micro_batch(0))
    output.square().mean().backward(retain_graph=True)
    output.sin().mean().backward()
    parts.passes.finish("both")
    output = plain(micro_batch(0))
    output.square().mean().backward(retain_graph=True)
    output.sin().mean().backward()
    assert_same(model, plain)
    assert list(parts.passes.in_flight) == []


def test_a_pass_stays_while_a_backward_pass_can_come() -> None:
    plain, model, parts = split()
    for number in (0, 1):
        loss_of(plain, number).backward()
    with parts.passes.begin("both"):
        first, second = loss_of(model, 0), loss_of(model, 1)
    first.backward()
    parts.passes.finish("both")
    assert list(parts.passes.in_flight) == ["both"]
    second.backward()
    parts.passes.finish("both")
    assert list(parts.passes.in_flight) == []
    assert_same(model, plain)


def test_two_forward_passes_of_one_pass_and_one_backward_pass() -> None:
    plain, model, parts = split()
    fired, _ = note_gradients(model)
    with parts.passes.begin("both"):
        (loss_of(model, 0) + loss_of(model, 1) + loss_of(model, 2)).backward()
    parts.passes.finish("both")
    (loss_of(plain, 0) + loss_of(plain, 1) + loss_of(plain, 2)).backward()
    assert_same(model, plain)
    assert len(fired) == len(list(model.parameters()))


def test_one_backward_pass_through_two_passes_is_refused() -> None:
    _, model, parts = split()
    first, second = losses(model, parts, range(2))
    with pytest.raises(RuntimeError, match=r"goes through the passes 1 and 0.*same key"):
        (first + second).backward()


def test_a_pass_needs_a_key() -> None:
    _, _, parts = split()
    with pytest.raises(ValueError, match="needs a key"), parts.passes.begin(None):
        pass


@pytest.mark.parametrize("end", ["finish", "drop"])
def test_activations_stay_until_their_pass_ends(end: str) -> None:
    _, model, parts = split()
    seen: list[weakref.ref[torch.UntypedStorage]] = []

    def note(module: nn.Module, inputs: tuple[Tensor]) -> None:
        seen.append(weakref.ref(inputs[0].untyped_storage()))

    model[4].register_forward_pre_hook(note)  # type: ignore[index]
    (loss,) = losses(model, parts, range(1))
    loss.backward()
    assert seen[0]() is not None
    getattr(parts.passes, end)(0)
    gc.collect()
    assert seen[0]() is None
    assert loss.grad_fn is not None


def test_remove_leaves_no_pass() -> None:
    _, model, parts = split()
    losses(model, parts, range(2))[0].backward()
    parts.remove()
    assert list(parts.passes.in_flight) == []
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


Step = Callable[[nn.Module], None]


def forward_twice(order: str) -> Step:
    def step(model: nn.Module) -> None:
        a, b = loss_of(model, 0), loss_of(model, 1)
        for loss in {"ab": (a, b), "ba": (b, a), "joint": (a + b,)}[order]:
            loss.backward()

    return step


@pytest.mark.parametrize("order", ["ab", "ba", "joint"])
def test_two_forward_passes_before_their_backward_passes(order: str) -> None:
    """What :class:`WeightGradientDeferral` finishes by itself, with layers that are handed on among the others."""
    plain, model = network(), network()
    deferral = WeightGradientDeferral(model, k=99)
    deferral.watch(loss_of(model, 99))
    for _ in range(2):
        for one in (plain, model):
            one.zero_grad()
            forward_twice(order)(one)
        assert_same(model, plain)
    assert deferral.split.passes.buffered_gradients == (2 if order == "joint" else 4)


def test_forget_between_two_forward_passes_keeps_the_first() -> None:
    """As an owner does that forgets what failed before every forward pass."""
    plain, model = network(), network()
    deferral = WeightGradientDeferral(model, k=99)
    deferral.watch(loss_of(model, 99))
    for one in (plain, model):
        first = loss_of(one, 0)
        deferral.split.forget()
        (first + loss_of(one, 1)).backward()
    assert_same(model, plain)


def test_a_backward_pass_that_failed_leaves_nothing_to_the_next() -> None:
    plain, model = network(), network()
    deferral = WeightGradientDeferral(model, k=99)
    deferral.watch(loss_of(model, 99))

    def fail(gradient: Tensor) -> None:
        raise ArithmeticError

    handle = model[0].register_forward_hook(lambda *given: given[-1].register_hook(fail) and None)  # type: ignore[index]
    with pytest.raises(ArithmeticError):
        loss_of(model, 0).backward()
    handle.remove()
    model.zero_grad()
    for one in (plain, model):
        for number in (1, 2):
            loss_of(one, number).backward()
    assert_same(model, plain)


def test_stand_ins_share_no_memory_once_no_backward_pass_can_come() -> None:
    model = network()
    deferral = WeightGradientDeferral(model, k=99)
    deferral.watch(loss_of(model, 99))
    first, second = loss_of(model, 0), loss_of(model, 1)
    counts = []
    for loss in (first, second):
        loss.backward()
        counts.append(bool(aliased([model[1].weight])))  # type: ignore[index]
    assert counts == [True, False]


def test_stand_ins_share_no_memory_where_nothing_was_cut() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh())  # small: its weight gradient is handed on
    deferral = WeightGradientDeferral(model, k=1)
    for number in range(3):
        loss = model(micro_batch(number).requires_grad_()).square().mean()
        deferral.watch(loss)
        loss.backward()  # the graph lives on in the loss
        assert not aliased([model[0].weight])  # type: ignore[arg-type]
    assert deferral.split.passes.buffered_gradients > 0
