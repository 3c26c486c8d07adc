"""The scan's gradients are autograd's: every cell and solver, directions, packed sequences, second derivatives."""

import pytest
import torch
from torch.nn.utils.rnn import PackedSequence, pack_sequence

from support.scan import MODES, SOLVERS, gradients, make_case, worst_error

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


def test_without_bias() -> None:
    for mode in MODES:
        case = make_case(mode, 12, 2, 3, bias=False)
        assert worst_error(gradients(case.scan("chunk"), case.leaves), gradients(case.native(), case.leaves)) < 1e-12


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
