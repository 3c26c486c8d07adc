"""Float32: errors against the float64 truth are autograd's own, and overflow never costs a finite gradient."""

import copy
import warnings

import pytest
import torch

from retime.foundations.messages import NoEffectWarning
from retime.mechanisms.scan import backward as safe_solve
from support.scan import Case, gradients, make_case, worst_error

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
    exact = Case(mode, copy.deepcopy(case.net).double(), case.x.detach().double().requires_grad_(), ())
    exact.state = tuple(part.detach().double().requires_grad_() for part in case.state)
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
