"""Updates behind weight gradients on the sub-stream: the plain loop's bits, what holds them back, what is refused."""

import copy
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_
from torch.optim import SGD, Adam, AdamW, Optimizer

from retime import declare_per_parameter
from retime.foundations.messages import NoEffectWarning
from retime.mechanisms.two_streams import TwoStreamBackward, TwoStreamReport
from retime.mechanisms.two_streams.layers import LinearKernels
from support import fusion
from support.failing import FailsBackward
from support.time_limits import limit_s
from support.two_stream_steps import plain_step, stepping, twice

STEPS = 6
SPLIT = 7
"""Parameters of the layers that are split."""
Make = Callable[[nn.Module], Optimizer]
Step = Callable[[nn.Module, Optimizer, Tensor, int, TwoStreamBackward | None], None]


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Conv1d(3, 4, 3, padding=1, bias=False), nn.BatchNorm1d(4), nn.ReLU(), nn.Flatten()),
        *(nn.Linear(16, 12), nn.Tanh(), nn.Linear(12, 12), nn.Tanh(), nn.Linear(12, 2)),
    )


def inputs(steps: int = STEPS) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(6, 3, 4, generator=generator) for _ in range(steps)]


def adamw(model: nn.Module) -> Optimizer:
    return AdamW(model.parameters(), lr=0.01)


def trained(
    step: Step, make_optimizer: Make, make: Callable[[], nn.Module], *, ours: bool, **options: Any
) -> tuple[nn.Module, Optimizer, TwoStreamReport | None]:
    model = make()
    optimizer = make_optimizer(model)
    two_streams = TwoStreamBackward(model, optimizer=optimizer, threads=(1, 1), **options) if ours else None
    try:
        for index, x in enumerate(inputs()):
            step(model, optimizer, x, index, two_streams)
    finally:
        report = None if two_streams is None else two_streams.report()
        if two_streams is not None:
            two_streams.remove()
    return model, optimizer, report


def assert_same(one: Any, other: Any) -> None:
    fusion.assert_same(*(fusion.Run(model, optimizer, None) for model, optimizer, _ in (one, other)))


def both(
    step: Step = plain_step, make_optimizer: Make = adamw, make: Callable[[], nn.Module] = network, **options: Any
) -> TwoStreamReport:
    """Run a loop plain and with updates on the sub-stream, compare bits and state, and return the report."""
    ours = trained(step, make_optimizer, make, ours=True, **options)
    assert_same(trained(step, make_optimizer, make, ours=False), ours)
    return ours[2]


OPTIMIZERS: dict[str, Make] = {
    "SGD with momentum": lambda model: SGD(model.parameters(), 0.1, momentum=0.9, weight_decay=0.1),
    "SGD, foreach": lambda model: SGD(model.parameters(), 0.1, momentum=0.9, foreach=True, maximize=True),
    "Adam": lambda model: Adam(model.parameters(), lr=0.01, foreach=False),
    "AdamW, foreach": lambda model: AdamW(model.parameters(), lr=0.01, foreach=True),
    "AdamW, fused": lambda model: AdamW(model.parameters(), lr=0.01, fused=True),
    "two groups": lambda model: AdamW(
        [{"params": [p for p in model.parameters() if p.dim() > 1]},
         {"params": [p for p in model.parameters() if p.dim() < 2], "lr": 0.1, "weight_decay": 0.0}],
        lr=0.01, fused=True,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("options", [{}, {"max_memory": 1}], ids=["free", "bounded"])
def test_bits_of_the_plain_optimizer(name: str, options: dict[str, Any]) -> None:
    report = both(make_optimizer=OPTIMIZERS[name], **options)
    assert report.updates == SPLIT * (STEPS - 1)
    assert report.fusion.fused_updates >= report.updates
    assert f"{report.updates} updates right after their weight gradients" in report.what_was_done()
    assert report.fusion.headline in report.what_was_done()


def test_deep_layers_on_two_threads() -> None:
    def make() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Flatten(), nn.Linear(12, 96), *(nn.Linear(96, 96) for _ in range(24)))

    def several(model: nn.Module, optimizer: Optimizer, x: Tensor, *rest: Any) -> None:
        for _ in range(5):
            plain_step(model, optimizer, x, *rest)

    assert both(several, make=make).updates == 50 * (5 * STEPS - 1)


def scheduled(model: nn.Module, optimizer: Optimizer, x: Tensor, *rest: Any) -> None:
    plain_step(model, optimizer, x, *rest)
    for group in optimizer.param_groups:
        group["lr"] *= 0.7


def accumulated(model: nn.Module, optimizer: Optimizer, x: Tensor, index: int, two: TwoStreamBackward | None) -> None:
    """Windows of different lengths, so that all passes but the last are marked."""
    parts = x.chunk(1 + index % 3)
    for part in parts[:-1]:
        if two is None or two.fusion is None:
            model(part).square().mean().backward()
        else:
            with two.fusion.accumulate():
                model(part).square().mean().backward()
    plain_step(model, optimizer, parts[-1], index, two)


def in_two_passes(model: nn.Module, optimizer: Optimizer, x: Tensor, *rest: Any) -> None:
    """Always two passes, which the first step counts; both graphs keep the weights."""
    losses = [model(part).square().mean() for part in x.chunk(2)]
    for loss in losses:
        loss.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)


def frozen(model: nn.Module, optimizer: Optimizer, x: Tensor, index: int, two: TwoStreamBackward | None) -> None:
    model[4].weight.requires_grad_(False)  # type: ignore[index]
    model[6].bias.requires_grad_(False)  # type: ignore[index]
    plain_step(model, optimizer, x, index, two)


def evaluated(model: nn.Module, optimizer: Optimizer, x: Tensor, index: int, two: TwoStreamBackward | None) -> None:
    with torch.no_grad():
        model.eval()(x)
    plain_step(model.train(), optimizer, x, index, two)


@stepping
def autocast(model: Any, x: Tensor, index: int) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        model(x).square().mean().backward()


def from_a_later_step(late: Step) -> Step:
    def step(model: nn.Module, optimizer: Optimizer, x: Tensor, index: int, two: TwoStreamBackward | None) -> None:
        (late if index > 2 else plain_step)(model, optimizer, x, index, two)

    return step


@stepping
def called_twice(model: Any, x: Tensor, index: int) -> None:
    """Two calls of each layer in one graph."""
    sum(model(part).square().mean() for part in x.chunk(2)).backward()


def forward_only(model: nn.Module, optimizer: Optimizer, x: Tensor, *rest: Any) -> None:
    """A graph that no backward pass follows."""
    model(x[:2]).sum()
    plain_step(model, optimizer, x, *rest)


BEHIND: dict[str, tuple[Step, int]] = {
    "learning rate changes": (scheduled, SPLIT * (STEPS - 1)),
    "accumulation": (accumulated, SPLIT * (STEPS - 1)),
    "two passes": (in_two_passes, SPLIT * (STEPS - 1)),
    "retained graph": (twice, SPLIT * (STEPS - 1)),
    "frozen parameters": (frozen, (SPLIT - 2 - 1) * (STEPS - 1)),
    "evaluation": (evaluated, SPLIT * (STEPS - 1)),
    "autocast": (autocast, SPLIT * (STEPS - 1)),
    "two calls from a later step": (from_a_later_step(called_twice), SPLIT * 2),
    "a graph without a backward pass": (from_a_later_step(forward_only), SPLIT * 2),
}


@pytest.mark.parametrize("name", BEHIND)
def test_what_loops_do(name: str) -> None:
    step, updates = BEHIND[name]
    assert both(step).updates == updates


@pytest.mark.filterwarnings("ignore:two streams have no effect")
def test_layers_that_are_called_twice_update_as_in_backward_fusion() -> None:
    report = both(called_twice)
    assert report.updates == 0
    assert report.fusion.fused_updates > 0


def test_an_alias_holds_the_update_back() -> None:
    aliases: list[Tensor] = []

    def kept(model: nn.Module, *rest: Any) -> None:
        aliases[:] = [model[6].weight.detach()]  # type: ignore[index]
        plain_step(model, *rest)

    with pytest.warns(NoEffectWarning, match="share memory with another tensor"):
        report = both(kept)
    assert report.updates == (SPLIT - 1) * (STEPS - 1)


# What is refused.


def test_gradients_are_gone_behind_the_backward_pass() -> None:
    def clipped(model: nn.Module, optimizer: Optimizer, x: Tensor, *rest: Any) -> None:
        model(x).square().mean().backward()
        clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()

    with pytest.raises(RuntimeError, match=r"consumed by backward fusion.*use mode='forward'"):
        trained(clipped, adamw, network, ours=True)


@pytest.mark.parametrize("clears", [False, True])
def test_more_passes_than_in_the_steps_before(clears: bool) -> None:
    def step(model: nn.Module, optimizer: Optimizer, x: Tensor, index: int, two: TwoStreamBackward | None) -> None:
        if index == 3:
            model(x).square().mean().backward()
            if clears:
                optimizer.zero_grad()
        plain_step(model, optimizer, x, index, two)

    with pytest.raises(RuntimeError, match="2 gradients in one step, 1 in the steps before"):
        trained(step, adamw, network, ours=True)


def test_a_weight_in_the_loss() -> None:
    @stepping
    def in_the_loss(model: Any, x: Tensor, index: int) -> None:
        (model(x).square().mean() + model[4].weight.square().sum()).backward()

    assert both(in_the_loss).updates == (SPLIT - 2) * (STEPS - 1)  # from the first step: the layer stays in order
    with pytest.raises(RuntimeError, match="2 gradients in one step, 1 in the steps before"):
        trained(from_a_later_step(in_the_loss), adamw, network, ours=True)


def test_optimizers_that_cannot_be_fused() -> None:
    model = network()
    with pytest.raises(ValueError, match="LBFGS needs all parameters"):
        TwoStreamBackward(model, optimizer=torch.optim.LBFGS(model.parameters()))
    with pytest.raises(ValueError, match="no parameter of the model"):
        TwoStreamBackward(model, optimizer=adamw(network()))
    assert not any("forward" in vars(module) for module in model.modules())


# Failures.


@declare_per_parameter
class FailsBeside(SGD):
    """Fails once, on the second thread."""

    fails = False
    failed = threading.Event()

    def step(self, closure: Any = None) -> None:
        if FailsBeside.fails and threading.current_thread().name == "retime sub-stream":
            FailsBeside.fails = False
            FailsBeside.failed.set()
            raise ArithmeticError("in an update")
        super().step(closure)


def test_an_update_that_fails_on_the_second_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    model = network()
    optimizer = FailsBeside(model.parameters(), 0.1)
    two_streams = TwoStreamBackward(model, optimizer=optimizer, threads=(1, 1))
    compute = LinearKernels.output_gradient

    def waits(*args: Any) -> Tensor:
        """Give the second thread time for its first update."""
        if FailsBeside.fails and two_streams._waiting:
            FailsBeside.failed.wait(limit_s(5))
        return compute(*args)

    monkeypatch.setattr(LinearKernels, "output_gradient", waits)
    for index, x in enumerate(inputs()):
        if index != 3:
            plain_step(model, optimizer, x, index, two_streams)
            continue
        FailsBeside.fails = True
        with pytest.raises(ArithmeticError, match="in an update") as raised:
            plain_step(model, optimizer, x, index, two_streams)
        assert "or its parameters were updated" in raised.value.__notes__[0]
        optimizer.zero_grad()
    report = two_streams.report()
    two_streams.remove()
    assert report.updates == SPLIT * (STEPS - 2)


@declare_per_parameter
class SlowBeside(SGD):
    """An update on the second thread takes long in the step that fails."""

    fails = False
    begun = threading.Event()
    ended = threading.Event()

    def step(self, closure: Any = None) -> None:
        is_slow = SlowBeside.fails and threading.current_thread().name == "retime sub-stream"
        if is_slow:
            SlowBeside.begun.set()
            time.sleep(0.2)
        super().step(closure)
        if is_slow:
            SlowBeside.ended.set()


class FailsBehindAnUpdate(FailsBackward):
    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        assert SlowBeside.begun.wait(limit_s(5))
        return FailsBackward.backward(ctx, gradient)


def test_nothing_runs_on_behind_a_failed_backward_pass() -> None:
    model = network()
    optimizer = SlowBeside(model.parameters(), 0.1)
    two_streams = TwoStreamBackward(model, optimizer=optimizer, threads=(1, 1))
    for index, x in enumerate(inputs()):
        SlowBeside.fails = index == 3
        if not SlowBeside.fails:
            plain_step(model, optimizer, x, index, two_streams)
            continue
        with pytest.raises(ArithmeticError, match="in the middle"):
            model[4:](FailsBehindAnUpdate.apply(model[:4](x))).square().mean().backward()  # type: ignore[index]
        assert SlowBeside.ended.is_set()
        model.zero_grad()
    report = two_streams.report()
    two_streams.remove()
    assert report.updates == SPLIT * (STEPS - 2)
    assert report.in_order.keys() == both().in_order.keys()
    assert not any(parameter._backward_hooks for parameter in model.parameters())


class TriesAPassOfItsOwn(FailsBackward):
    """Runs a backward pass of its own inside of the outer one, which fails, and goes on."""

    own_pass: Callable[[], None]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        with torch.enable_grad(), pytest.raises(ArithmeticError, match="in the middle"):
            TriesAPassOfItsOwn.own_pass()
        return gradient


@pytest.mark.parametrize("in_a_job", [False, True])
def test_a_failed_pass_inside_of_another_takes_nothing_from_it(in_a_job: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    job_fails, inside, compute = False, torch.ones(2, 5, requires_grad=True), LinearKernels.weight_gradients

    def weight_gradients(kernels: LinearKernels, gradient: Tensor, x: Tensor, *rest: Any) -> Any:
        if job_fails and x.shape[1] == 5:
            raise ArithmeticError("in the middle of a job")
        return compute(kernels, gradient, x, *rest)

    monkeypatch.setattr(LinearKernels, "weight_gradients", weight_gradients)

    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.outer, self.inner = network(), nn.Linear(5, 5)

        def forward(self, x: Tensor) -> Tensor:
            own = self.inner(inside if job_fails else FailsBackward.apply(inside)).sum()
            TriesAPassOfItsOwn.own_pass = own.backward
            return self.outer[4:](TriesAPassOfItsOwn.apply(self.outer[:4](x)))  # type: ignore[no-any-return]

    models: list[nn.Module] = []
    for ours in (False, True):
        torch.manual_seed(0)
        model = Both()
        optimizer = SGD(model.outer.parameters(), 0.1)
        fused = optimizer if in_a_job else None
        two_streams = TwoStreamBackward(model, optimizer=fused, threads=(1, 1)) if ours else None
        for index, x in enumerate(inputs()):
            job_fails = ours and in_a_job and index > 0
            plain_step(model, optimizer, x, index, two_streams)
        if two_streams is not None:
            assert two_streams.report().layers
            two_streams.remove()
        models.append(model.outer)
    for one, other in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.equal(one, other)


# Checkpoints, and what is left.


@pytest.mark.parametrize("first_ours", [False, True])
def test_a_checkpoint_goes_on_in_the_other_loop(first_ours: bool) -> None:
    plain = trained(plain_step, adamw, network, ours=False)

    model, optimizer, two_streams = network(), None, None
    data = inputs()
    for ours, part in ((first_ours, data[:3]), (not first_ours, data[3:])):
        saved = None if optimizer is None else copy.deepcopy((model.state_dict(), optimizer.state_dict()))
        model = network()
        optimizer = adamw(model)
        if saved is not None:
            model.load_state_dict(saved[0])
            optimizer.load_state_dict(saved[1])
        two_streams = TwoStreamBackward(model, optimizer=optimizer, threads=(1, 1)) if ours else None
        for index, x in enumerate(part):
            plain_step(model, optimizer, x, index, two_streams)
        if two_streams is not None:
            assert two_streams.report().updates == SPLIT * 2
            two_streams.remove()
    assert_same(plain, (model, optimizer, None))


def test_nothing_is_left() -> None:
    model, optimizer, _ = trained(plain_step, adamw, network, ours=True)
    assert not any(parameter._post_accumulate_grad_hooks for parameter in model.parameters())
    assert not any(parameter._backward_hooks for parameter in model.parameters())
    assert "step" not in vars(optimizer)
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.filterwarnings("ignore:the search of two streams", "ignore:two streams do not pay")
@pytest.mark.parametrize("fails", [False, True])
def test_where_two_streams_are_taken_off_updates_run_as_in_backward_fusion(
    fails: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from retime.mechanisms.two_streams import search

    monkeypatch.setattr(search, "LEAST_GAIN", 1e9)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    monkeypatch.setattr(torch, "set_num_threads", lambda threads: None)
    model = network()
    optimizer = SGD(model.parameters(), 0.01)
    two_streams = TwoStreamBackward(model, optimizer=optimizer)
    for index, x in enumerate(inputs(40)):
        if fails and index % 5 == 4:  # in each block of the search, and behind it
            with pytest.raises(ArithmeticError, match="in the middle"):
                model[4:](FailsBackward.apply(model[:4](x))).square().mean().backward()  # type: ignore[index]
            model.zero_grad()
        plain_step(model, optimizer, x, 0, two_streams)
    report = two_streams.report()
    two_streams.remove()
    assert not report.setting.two_streams
    assert report.fusion.steps == 40
    assert report.fusion.fused_updates > report.updates > 0
    if fails:
        return
    plain = network()
    optimizer = SGD(plain.parameters(), 0.01)
    for x in inputs(40):
        plain_step(plain, optimizer, x, 0, None)
    torch.testing.assert_close(list(model.parameters()), list(plain.parameters()))  # the second thread has two threads
