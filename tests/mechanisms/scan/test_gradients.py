"""The scan's gradients are autograd's: every cell and solver, directions, packed sequences, float32's errors."""

import warnings

import pytest
import torch
from torch.nn.utils.rnn import PackedSequence, pack_sequence

from retime.foundations.messages import NoEffectWarning
from retime.mechanisms.scan import backward as safe_solve
from support.scan import MODES, SOLVERS, Case, gradients, make_case, worst_error

SIZES = [(1, 1, 1), (1, 3, 4), (2, 1, 5), (3, 2, 4), (8, 3, 2), (17, 1, 6), (33, 4, 3), (64, 2, 5), (65, 2, 7)]


@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("mode", MODES)
def test_equal_to_autograd_in_float64(mode: str, solver: str) -> None:
    for steps, batch, hidden in SIZES:
        case = make_case(mode, steps, batch, hidden)
        native, scan = case.native(), case.scan(solver)
        assert all(torch.equal(a, b) for a, b in zip(scan, native, strict=True))
        assert worst_error(gradients(scan, case.leaves), gradients(native, case.leaves)) < 1e-12, (steps, batch, hidden)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("mode", MODES)
def test_both_directions_in_one_call(mode: str, dtype: torch.dtype) -> None:
    case = make_case(mode, 29, 3, 5, inputs=4, dtype=dtype, bidirectional=True)
    native, scan = case.native(), case.scan("chunk")
    assert all(torch.equal(a, b) for a, b in zip(scan, native, strict=True))
    limit = 1e-12 if dtype == torch.float64 else 1e-5
    assert worst_error(gradients(scan, case.leaves), gradients(native, case.leaves)) < limit


@pytest.mark.parametrize("solver", ["sequential", "chunk", "blelloch"])
@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("mode", MODES)
def test_packed_sequences(mode: str, bidirectional: bool, solver: str) -> None:
    case = make_case(mode, 1, 5, 4, inputs=3, bidirectional=bidirectional)
    packed = pack_sequence([torch.randn(steps, 3, dtype=torch.float64) for steps in (21, 21, 9, 8, 1)])
    data = packed.data.requires_grad_()
    leaves = [data, *case.leaves[1:]]
    output, last = case.net(PackedSequence(data, packed.batch_sizes), case.state if mode == "LSTM" else case.state[0])
    native = [output.data, *(last if mode == "LSTM" else (last,))]
    scan = case.scan_of(data, solver, packed.batch_sizes)
    assert all(torch.equal(a, b) for a, b in zip(scan, native, strict=True))
    assert worst_error(gradients(scan, leaves), gradients(native, leaves)) < 1e-12


def test_reverse_direction_alone() -> None:
    from retime.mechanisms.scan import scan_layer

    case = make_case("GRU", 11, 2, 4)
    flipped = case.scan_of(case.x.flip(0), "chunk")
    output, last = scan_layer("GRU", case.x, case.state[0][0], *case.net.parameters(), reverse=True, solver="chunk")
    assert torch.equal(output, flipped[0].flip(0))
    assert torch.equal(last, flipped[1][0])


@pytest.mark.parametrize("mode", MODES)
def test_first_and_second_derivatives(mode: str) -> None:
    case = make_case(mode, 4, 2, 2)

    def run(*_: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(case.scan("chunk:2"))

    leaves = tuple(case.leaves)
    assert torch.autograd.gradcheck(run, leaves, fast_mode=True)
    assert torch.autograd.gradgradcheck(run, leaves, fast_mode=True)


@pytest.mark.parametrize("mode", MODES)
def test_gradient_penalty_equals_autograd(mode: str) -> None:
    case = make_case(mode, 9, 2, 3)

    def penalty(outputs: list[torch.Tensor]) -> list[torch.Tensor]:
        (dx,) = torch.autograd.grad(outputs[0].square().sum(), case.x, create_graph=True)
        return list(torch.autograd.grad(dx.square().sum(), case.leaves))

    assert worst_error(penalty(case.scan("blelloch")), penalty(case.native())) < 1e-12


def test_only_some_gradients_are_asked_for() -> None:
    case = make_case("LSTM", 6)
    case.x.requires_grad_(False)
    output, _, cell = case.scan("chunk")
    weight = case.net.weight_hh_l0
    native = case.native()
    for mine, theirs in ((output, native[0]), (cell, native[2])):
        (a,) = torch.autograd.grad(mine.sum(), weight, retain_graph=True)
        (b,) = torch.autograd.grad(theirs.sum(), weight, retain_graph=True)
        assert worst_error([a], [b]) < 1e-12


REGIMES = {"contracting": 0.5, "orthogonal": 1.0, "near-critical": 1.03}


def set_recurrence(case: Case, gain: float) -> None:
    """Orthogonal recurrent matrices times ``gain``, small inputs."""
    torch.manual_seed(1)
    with torch.no_grad():
        weight = case.net.weight_hh_l0
        hidden = weight.shape[1]
        for k in range(0, weight.shape[0], hidden):
            weight[k : k + hidden] = gain * torch.linalg.qr(torch.randn(hidden, hidden))[0]
        case.net.weight_ih_l0.mul_(0.3)
        case.x.mul_(0.1)


@pytest.mark.parametrize("regime", REGIMES)
@pytest.mark.parametrize("mode", ["RNN_TANH", "RNN_RELU", "GRU"])
def test_no_worse_than_autograd(mode: str, regime: str) -> None:
    case = make_case(mode, 500, 2, 12, dtype=torch.float32)
    set_recurrence(case, REGIMES[regime])
    by_solver = {solver: gradients(case.scan(solver), case.leaves) for solver in ("sequential", "chunk", "blelloch")}
    own = gradients(case.native(), case.leaves)
    exact = case.to(torch.double)
    truth = gradients(exact.native(), exact.leaves)
    limit = 2 * worst_error(own, truth) + 1e-6
    for solver, values in by_solver.items():
        assert worst_error(values, truth) < limit, solver


def exploding_tail() -> tuple[Case, torch.Tensor]:
    """Later Jacobians multiply to more than float32 holds, but no gradient passes through them."""
    case = make_case("RNN_RELU", 1400, 1, 8, dtype=torch.float32)
    with torch.no_grad():
        for tensor in (*case.net.parameters(), *case.state):
            tensor.zero_()
        case.net.weight_hh_l0.copy_(torch.eye(8) * 1.106)  # 1.106 ** 1024 is 6e44
        case.net.bias_ih_l0.fill_(1e-37)  # the output stays below 1e27, and above 0
    sent = torch.zeros(1400, 1, 8)
    sent[:50] = torch.randn(50, 1, 8)
    return case, sent


@pytest.mark.parametrize("solver", ["sequential", "chunk", "blelloch", "truncated:3"])
def test_finite_wherever_autograd_is(solver: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(safe_solve, "_warned", set())
    case, sent = exploding_tail()
    leaves = [case.state[0], case.net.weight_ih_l0]
    own = torch.autograd.grad(case.native()[0], leaves, sent)
    assert all(torch.isfinite(part).all() for part in own)
    output = case.scan(solver)[0]
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        ours = torch.autograd.grad(output, leaves, sent, retain_graph=True)
        torch.autograd.grad(output, leaves, sent)
    assert worst_error(list(ours), list(own)) < 1e-5
    messages = [str(one.message) for one in said if one.category is NoEffectWarning]
    assert len(messages) == (solver == "blelloch")
    assert all("solver='sequential'" in message for message in messages)


def test_gradients_that_overflow_anyway_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(safe_solve, "_warned", set())
    case, _ = exploding_tail()
    output = case.scan("blelloch")[0]
    (found,) = torch.autograd.grad(output[-1].sum(), case.state[0])
    assert not torch.isfinite(found).all()
