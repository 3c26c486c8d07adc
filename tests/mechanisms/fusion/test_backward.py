"""Backward fusion: uses are counted, gradients are freed and guarded, nothing is left behind."""

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.checkpoint import checkpoint

from retime import NoEffectWarning, fuse_optimizer
from retime.foundations.lazy_updates.optimizers import is_the_same_here
from retime.mechanisms.fusion import BackwardFusion
from retime.mechanisms.fusion.backward import GradientGuard
from support.failing import FailsBackward
from support.fusion import MakeOptimizer, adamw, assert_same, batches, both, fused, network, train


def test_updates_run_inside_backward_and_gradients_are_gone() -> None:
    model, optimizer, fusion = fused(bucket_bytes=1)
    first, second = batches(2)
    model(first).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    before = [p.detach().clone() for p in model.parameters()]
    model(second).sum().backward()
    assert not any(torch.equal(b, p) for b, p in zip(before, model.parameters(), strict=True))
    assert all(isinstance(p.grad, GradientGuard) for p in model.parameters())
    after = [p.detach().clone() for p in model.parameters()]
    optimizer.step()
    assert all(torch.equal(a, p) for a, p in zip(after, model.parameters(), strict=True))
    fusion.remove()
    assert all(p.grad is None for p in model.parameters())


def test_gradient_memory_stays_within_a_bucket_and_a_layer() -> None:
    layer = (16 * 16 + 16) * 4
    ours = train("backward", model=network(depth=12), bucket_bytes=layer, steps=3)
    first_step = 12 * layer  # all gradients live while uses are counted
    assert ours.report.peak_gradient_bytes == first_step
    model, optimizer, fusion = fused(model=network(depth=12), bucket_bytes=layer)
    for i, x in enumerate(batches(3)):
        if i == 1:
            fusion.report().peak_gradient_bytes = 0
        model(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert 0 < fusion.report().peak_gradient_bytes <= fusion.report().largest_bucket_bytes + layer
    fusion.remove()


@pytest.mark.parametrize("passes", [1, 2])
def test_known_backward_passes_need_no_counting(passes: int) -> None:
    layer = (16 * 16 + 16) * 4

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        if passes == 2:
            model(x * 2).square().mean().backward()
        return model(x).square().mean()  # type: ignore[no-any-return]

    report = both("backward", make=lambda: network(12), loss=loss, bucket_bytes=layer, backward_passes=passes)
    assert report.late_updates == 0
    if passes == 1:
        assert report.peak_gradient_bytes <= 2 * layer


def test_several_kernels_a_bucket_not_one_a_parameter(monkeypatch: pytest.MonkeyPatch) -> None:
    is_the_same_here()  # runs small optimizers, once a process
    calls: list[int] = []
    real = torch._fused_adamw_
    monkeypatch.setattr(torch, "_fused_adamw_", lambda p, *a, **k: (calls.append(len(p)), real(p, *a, **k)))
    everything = sum(p.numel() * 4 for p in network().parameters())
    train("backward", lambda p: torch.optim.AdamW(p, fused=True), steps=2, bucket_bytes=everything // 2)
    assert sum(calls) == 16
    assert len(calls) == 3  # the first step's one, then two buckets


@pytest.mark.parametrize("micro_batches", [2, 3])
def test_several_backward_passes_a_step_are_learnt(micro_batches: int) -> None:
    def step(model: nn.Module, optimizer: Optimizer, x: Tensor, i: int) -> None:
        for part in x.split(1)[: micro_batches if i < 4 else 1]:  # the last window is short
            model(part).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    assert both("backward", step=step, steps=5).fused_updates == 8 * 3


def test_more_backward_passes_than_before_raise_until_marked() -> None:
    model, optimizer, fusion = fused(bucket_bytes=1)
    x, y, z = batches(3)
    model(x).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    model(y).sum().backward()
    with pytest.raises(RuntimeError, match="accumulate"):
        model(z).sum().backward()
    fusion.abandon_step()
    optimizer.zero_grad()
    with fusion.accumulate():
        model(y).sum().backward()
    assert all(type(p.grad) is Tensor for p in model.parameters())
    model(z).sum().backward()
    assert all(isinstance(p.grad, GradientGuard) for p in model.parameters())
    optimizer.step()
    fusion.remove()


def test_the_next_backward_names_abandon_step() -> None:
    first, last = nn.Linear(3, 3), nn.Linear(3, 1)
    optimizer = torch.optim.SGD([*first.parameters(), *last.parameters()], 0.1)
    fusion = fuse_optimizer(nn.Sequential(first, last), optimizer, mode="backward", backward_passes=1)

    def step(fails: bool = False) -> None:
        optimizer.zero_grad()
        hidden = first(torch.ones(2, 3))
        last(FailsBackward.apply(hidden) if fails else hidden).sum().backward()
        optimizer.step()

    step()
    with pytest.raises(ArithmeticError):
        step(fails=True)
    with pytest.raises(RuntimeError, match=r"after an exception inside a backward\(\), call `fusion.abandon_step\(\)`"):
        step()
    fusion.abandon_step()
    step()
    assert fusion.report().steps == 2


def _checkpointed(reentrant: bool) -> Any:
    def loss(model: nn.Module, x: Tensor) -> Tensor:
        blocks = list(model)  # type: ignore[call-overload]
        x = x.clone().requires_grad_()
        for block in [blocks[0], blocks[1], blocks[0], *blocks[2:]]:  # the first block is used twice
            x = checkpoint(block, x, use_reentrant=reentrant)
        return blocks[0](x).square().mean()  # and a third time, outside

    return loss


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("mode", ["backward", "forward"])
def test_checkpointing_with_shared_layers(mode: str, reentrant: bool) -> None:
    assert both(mode, loss=_checkpointed(reentrant), bucket_bytes=1).fused_updates >= 40


class Tied(nn.Module):
    """One matrix as embedding and as output projection, and a layer that is never used."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(16, 16)
        self.last = nn.Linear(16, 16, bias=False)
        self.last.weight = self.first.weight
        self.unused = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.first(x))) + x @ self.first.weight  # type: ignore[no-any-return]


@pytest.mark.parametrize("mode", ["backward", "forward"])
def test_tied_and_unused_parameters(mode: str) -> None:
    ours = train(mode, model=Tied())
    assert_same(train(None, model=Tied()), ours)
    assert len(ours.state["state"]) == 2  # the unused layer has no state, as in the plain loop


class LateReader(nn.Module):
    """Backward needs the old weight after its gradient is complete (section B.2)."""

    def __init__(self, alias: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weight = nn.Parameter(torch.randn(16, 16) / 4)
        self.alias = alias

    def forward(self, x: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        old = self.weight.data if self.alias else self.weight.detach()
        return torch.tanh(torch.tanh(x) @ old) @ self.weight


@pytest.mark.parametrize("alias", [True, False], ids=["data", "detach"])
def test_old_value_that_is_still_needed_is_kept(alias: bool) -> None:
    with pytest.warns(NoEffectWarning, match="share memory with another tensor"):
        both("backward", make=lambda: LateReader(alias), bucket_bytes=1)


def restore(model: Any, optimizer: Optimizer) -> None:
    model[0][0].weight.data = model[0][0].weight.data.clone()  # as adversarial training does


CHANGES: list[tuple[str, Callable[[Any, Optimizer], object]]] = [
    ("learning rate or another hyper-parameter was changed", lambda _, sgd: sgd.param_groups[0].update(lr=1)),
    ("learning rate or another hyper-parameter was changed", lambda _, sgd: sgd.param_groups[0]["lr"].mul_(0.5)),
    ("changed in place between", lambda model, _: model[0][0].weight.mul_(0.9)),
    ("changed in place between", restore),
    ("cleared or replaced between", lambda model, _: model[0].zero_grad()),
]


@pytest.mark.parametrize(("text", "change"), CHANGES)
def test_changes_between_backward_and_step_are_refused(text: str, change: Callable[[Any, Optimizer], object]) -> None:
    model, optimizer, fusion = fused(bucket_bytes=1, backward_passes=1)
    optimizer.param_groups[0]["lr"] = torch.tensor(0.01)
    model(batches(1)[0]).sum().backward()
    with torch.no_grad():
        change(model, optimizer)
    with pytest.raises(RuntimeError, match=text):
        optimizer.step()
    fusion.remove()


def test_gradients_of_another_type_than_their_parameters() -> None:
    def make() -> nn.Module:
        model = network().bfloat16()
        for parameter in model.parameters():
            parameter.grad_dtype = torch.float32
        return model

    def step(model: nn.Module, optimizer: Optimizer, x: Tensor, i: int) -> None:
        model(x.bfloat16()).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=i % 2 == 0)

    both("backward", lambda p: torch.optim.SGD(p, lr=0.1, foreach=False), make=make, step=step, steps=4)


def test_a_hook_that_reads_a_gradient_behind_its_update() -> None:
    model, _, fusion = fused(bucket_bytes=1, backward_passes=1)
    weight = model[0][0].weight  # type: ignore[index]
    node = weight.view_as(weight).grad_fn.next_functions[0][0]  # type: ignore[operator, union-attr]
    node.register_hook(lambda *_: weight.grad.mul_(0.5))  # type: ignore[union-attr, operator]
    with pytest.raises(RuntimeError, match="consumed by backward fusion"):
        model(batches(1)[0]).sum().backward()
    fusion.remove()


def test_autocast_around_backward_does_not_touch_the_update() -> None:
    def step(model: nn.Module, optimizer: Optimizer, x: Tensor, i: int) -> None:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    both("backward", lambda p: torch.optim.Adafactor(p, lr=0.01), step=step, steps=4)  # its update multiplies matrices


def test_fusing_again_below_a_scheduler() -> None:
    model, optimizer, fusion = fused()
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    fusion.remove()
    fuse_optimizer(model, optimizer).remove()


def test_reading_a_used_gradient_raises_and_says_what_to_do() -> None:
    model, optimizer, fusion = fused(bucket_bytes=1)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(()))
    for i, x in enumerate(batches(2)):
        model(x).sum().backward()
        if i == 1:
            for read in (
                lambda: nn.utils.clip_grad_norm_(model.parameters(), 1.0),
                lambda: torch.stack([p.grad.norm() for p in model.parameters()]),  # type: ignore[union-attr]
                lambda: scaler.unscale_(optimizer),
            ):
                with pytest.raises(RuntimeError, match=r"consumed by backward fusion.*mode='forward'"):
                    read()
        optimizer.step()
        if i == 0:
            optimizer.zero_grad()
    with pytest.raises(RuntimeError, match="never cleared"):
        model(x).sum().backward()
    fusion.remove()


# ``zero_grad(set_to_none=False)``: zeros are gradients, which move what nothing used.


class Branches(nn.Module):
    """The second branch is used in every third step only, the third never."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.third = (nn.Linear(16, 16) for _ in range(3))
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        y: Tensor = self.first(x).relu()
        return self.second(y) if self.calls % 3 == 1 else y


OPTIMIZERS: dict[str, MakeOptimizer] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.1, foreach=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1, foreach=True),
    "fused": lambda p: torch.optim.Adam(p, lr=0.01, fused=True),
    "single": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, foreach=False),
}


def twice(model: nn.Module, x: Tensor) -> Tensor:
    """A step of two backward passes."""
    model(x[:2]).square().mean().backward()
    return model(x[2:]).square().mean()  # type: ignore[no-any-return]


@pytest.mark.parametrize("passes", [1, 2])
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("mode", ["backward", "forward"])
def test_zeros_update_parameters_without_a_gradient(name: str, passes: int, mode: str) -> None:
    loss: Callable[[nn.Module, Tensor], Tensor] = (lambda m, x: m(x).square().mean()) if passes == 1 else twice
    report = both(mode, OPTIMIZERS[name], make=Branches, loss=loss, set_to_none=False)
    assert report.fused_updates > 0 or mode == "forward"


def test_guards_move_with_the_model() -> None:
    model, optimizer, fusion = fused(bucket_bytes=1)
    for x in batches(2):
        optimizer.zero_grad()
        model(x).sum().backward()
        optimizer.step()
    model.to(torch.float64)
    assert all(p.grad is None or p.grad.dtype == torch.float64 for p in model.parameters())
    fusion.remove()


@pytest.mark.filterwarnings("ignore:Using backward\\(\\) with create_graph")  # torch says it once a process
def test_create_graph_is_refused() -> None:
    model, _, fusion = fused()
    with pytest.raises(RuntimeError, match="create_graph"):
        model(batches(1)[0]).square().sum().backward(create_graph=True)
    fusion.remove()


@pytest.mark.parametrize("mode", ["backward", "forward"])
def test_closure_style_step(mode: str) -> None:
    def step(model: nn.Module, optimizer: Optimizer, x: Tensor, i: int) -> None:
        def closure() -> Tensor:
            optimizer.zero_grad()
            loss: Tensor = model(x).square().mean()
            loss.backward()
            return loss

        assert optimizer.step(closure) is not None  # type: ignore[arg-type, func-returns-value]

    assert both(mode, step=step, steps=4).fused_updates > 0


def test_clip_value_folds_into_the_update() -> None:
    def clipped(model: nn.Module, optimizer: Optimizer, x: Tensor, i: int) -> None:
        model(x).square().mean().backward()
        nn.utils.clip_grad_value_(model.parameters(), 1e-3)
        optimizer.step()
        optimizer.zero_grad()

    assert_same(train(None, step=clipped, steps=4), train("backward", steps=4, clip_value=1e-3))


def test_other_peoples_gradient_hooks_see_the_gradient() -> None:
    seen: list[int] = []
    model, optimizer, fusion = fused(bucket_bytes=1)
    next(model.parameters()).register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.numel()))
    for i, x in enumerate(batches(3)):
        warned = pytest.warns(NoEffectWarning, match="hooks of others") if i == 1 else contextlib.nullcontext()
        with warned:
            model(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert seen == [256] * 3
    assert list(fusion.report().unfused.values()) == [1]
    assert fusion.report().late_updates == 8 + 2  # the first step, then the watched parameter
    fusion.remove()


def test_remove_leaves_nothing_behind() -> None:
    model = network()
    optimizer = adamw(model.parameters())
    attributes = set(optimizer.__dict__)
    for mode in ("backward", "forward"):
        fusion = fuse_optimizer(model, optimizer, mode)
        with pytest.raises(ValueError, match="fused already"):
            fuse_optimizer(model, optimizer, mode)
        model(batches(1)[0]).sum().backward()
        optimizer.step()
        fusion.remove()
        fusion.remove()
        assert set(optimizer.__dict__) == attributes
        assert not any(p._post_accumulate_grad_hooks for p in model.parameters())
        assert not any(m._forward_pre_hooks for m in model.modules())
        assert {type(p) for p in model.parameters()} == {nn.Parameter}
        assert optimizer.step.__func__ is type(optimizer).step


def hooked() -> nn.Module:
    model = network()
    model[1].register_full_backward_hook(lambda *_: None)  # type: ignore[index]
    return model


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "mode": (lambda: fused("sideways"), "unknown fusion mode 'sideways'"),
    "clip_value": (lambda: fused("forward", clip_value=1.0), "clip_grad_value_"),
    "side_stream": (lambda: fused("forward", side_stream=True), "side_stream"),
    "backward_passes": (lambda: fused("forward", backward_passes=2), "may have any number"),
    "another model": (lambda: fuse_optimizer(network(), adamw(network().parameters())), "holds no parameter of the"),
    "meta device": (lambda: fused(model=network().to("meta")), "meta device"),
    "backward hook": (lambda: fused(model=hooked()), "backward hook of 1 may read"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_fused_says_what_to_change(name: str) -> None:
    make, text = REFUSED[name]
    with pytest.raises(ValueError, match=text):
        make()


def test_an_alias_made_after_the_update_hides_no_second_gradient() -> None:
    model = nn.Linear(4, 4, bias=False)
    fusion = BackwardFusion(torch.optim.SGD(model.parameters(), 0.1), bucket_bytes=1, backward_passes=1)
    model(torch.ones(2, 4)).sum().backward()
    assert fusion.report().fused_updates == 1
    alias = model.weight.data
    with pytest.raises(RuntimeError, match="consumed by backward fusion"):
        model(torch.ones(2, 4)).sum().backward()
    assert alias.data_ptr() == model.weight.data_ptr()
    fusion.remove()
