"""The Triton kernels against float64: on a GPU where there is one, or in Triton's interpreter (TRITON_INTERPRET=1).

`test_triton_launch.py` runs this file in the interpreter wherever triton is installed.
"""

import os
import sys
import warnings

import pytest
import torch
from torch import Tensor

from retime.foundations.messages import NoEffectWarning
from retime.mechanisms.scan import backward as safe_solve
from retime.mechanisms.scan import calibrate, parse_solver, triton_launch
from retime.mechanisms.scan.cells import BlockJacobians
from retime.mechanisms.scan.solvers import Sequential, TritonChunk
from support.scan import CountOps, gradients, make_case, worst_error

INTERPRETED = "TRITON_INTERPRET" in os.environ
DEVICE = torch.device("cuda" if torch.cuda.is_available() and not INTERPRETED else "cpu")


def why_skipped() -> str | None:
    reason = triton_launch.why_not("GRU", 8, torch.float32, DEVICE)
    if reason is not None or not INTERPRETED:
        return reason
    try:
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            TritonChunk().solve(BlockJacobians(torch.ones(1, 1, 1, 1), torch.ones(1, 1)), torch.ones(1, 1, 1))
    except Exception as error:
        if "only 0-dimensional arrays" in str(error):  # Triton 3.6 and earlier with NumPy 2.4 and later: loops fail
            return "this version of Triton's interpreter does not go with this version of NumPy"
        raise
    return None


REASON = why_skipped()
pytestmark = [
    pytest.mark.skipif(REASON is not None, reason=f"in this process: {REASON}"),
    pytest.mark.filterwarnings(
        "ignore:Conversion of an array with ndim > 0:DeprecationWarning"
    ),  # Triton 3.6 and before
]
HIDDEN = (1, 8, 20, 33, 64)
MODES = ("RNN_TANH", "RNN_RELU", "GRU")


def make_scan(blocks: int, hidden: int, steps: int, batch: int, dtype: torch.dtype) -> tuple[BlockJacobians, Tensor]:
    """Blocks outermost in memory, as the GRU makes them."""
    torch.manual_seed(hidden * 100 + steps)
    scale = torch.rand(blocks, steps, batch, hidden, dtype=dtype, device=DEVICE).movedim(0, -2)
    matrix = torch.randn(blocks * hidden, hidden, dtype=dtype, device=DEVICE) * 0.7 / hidden**0.5
    return BlockJacobians(scale, matrix), torch.randn(steps, batch, hidden, dtype=dtype, device=DEVICE)


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("steps", [1, 7, 65])
@pytest.mark.parametrize("hidden", HIDDEN)
@pytest.mark.parametrize("blocks", [1, 4])
def test_float32_against_the_truth(blocks: int, hidden: int, steps: int, batch: int) -> None:
    jacobians, gradient = make_scan(blocks, hidden, steps, batch, torch.float32)
    exact = BlockJacobians(jacobians.scale.double(), jacobians.matrix.double())
    lengths = {"triton", f"triton:{steps}"} | ({"triton:1"} if steps < 10 or hidden * batch <= 8 else set())
    with torch.no_grad():
        truth = Sequential().solve(exact, gradient.double())
        own = Sequential().solve(jacobians, gradient)
        limit = 2 * worst_error(list(own), list(truth)) + 1e-6
        for name in sorted(lengths):
            assert worst_error(list(parse_solver(name).solve(jacobians, gradient)), list(truth)) < limit, name


@pytest.mark.parametrize(("blocks", "hidden"), [(1, 8), (1, 64), (4, 20), (4, 32)])
def test_float64(blocks: int, hidden: int) -> None:
    if reason := triton_launch.why_not("GRU", 20, torch.float64, DEVICE):
        pytest.skip(reason)
    jacobians, gradient = make_scan(blocks, hidden, 11, 2, torch.float64)
    with torch.no_grad():
        solved = parse_solver("triton:3").solve(jacobians, gradient)
        assert worst_error(list(solved), list(Sequential().solve(jacobians, gradient))) < 1e-13


@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("mode", MODES)
def test_layers(mode: str, bidirectional: bool) -> None:
    case = make_case(mode, 17, 3, 20, dtype=torch.float32, bidirectional=bidirectional).to(DEVICE)
    ours = gradients(case.scan("triton:4"), case.leaves)
    own = gradients(case.native(), case.leaves)
    exact = case.to(torch.double)
    truth = gradients(exact.native(), exact.leaves)
    assert worst_error(ours, truth) < 2 * worst_error(own, truth) + 1e-6


@pytest.mark.parametrize("mode", MODES)
def test_packed_sequences_and_half_precision(mode: str) -> None:
    case = make_case(mode, 6, 3, 5, dtype=torch.bfloat16).to(DEVICE)
    batch_sizes = torch.tensor([3, 3, 2, 1, 1, 1])
    packed = case.x.detach().flatten(0, 1)[:11].requires_grad_()
    leaves = [packed, *case.leaves[1:]]
    ours, expected = (
        gradients(case.scan_of(packed, solver, batch_sizes), leaves) for solver in ("triton:2", "chunk:2")
    )
    assert worst_error(ours, expected) < 1e-2  # one rounding to bfloat16


def test_work_does_not_grow_with_time() -> None:
    counts = []
    for steps in (5, 50):
        jacobians, gradient = make_scan(1, 8, steps, 1, torch.float32)
        with torch.no_grad(), CountOps() as ops:
            TritonChunk(4).solve(jacobians, gradient)
        assert ops.products == 0
        counts.append({name: count for name, count in ops.counts.items() if not INTERPRETED or name == "new_empty"})
    assert counts[0] == counts[1]


def test_same_bits_every_time() -> None:
    jacobians, gradient = make_scan(4, 20, 20, 2, torch.float32)
    with torch.no_grad():
        (v, carry), again = (TritonChunk().solve(jacobians, gradient) for _ in range(2))
    assert torch.equal(v, again[0])
    assert torch.equal(carry, again[1])


@pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered:RuntimeWarning")  # of the interpreter
def test_overflow_goes_the_safe_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(safe_solve, "_warned", set())
    jacobians = BlockJacobians(torch.full((20, 1, 1, 2), 1e30, device=DEVICE), torch.eye(2, device=DEVICE))
    with torch.no_grad(), pytest.warns(NoEffectWarning, match="solver=triton has no effect"):
        v, carry = safe_solve.safe_solve(TritonChunk(), jacobians, torch.zeros(20, 1, 2, device=DEVICE))
    assert not v.any()
    assert not carry.any()


def test_double_backward_runs_on_torch() -> None:
    if reason := triton_launch.why_not("GRU", 2, torch.float64, DEVICE):
        pytest.skip(reason)
    case = make_case("GRU", 5, 1, 2).to(DEVICE)

    def output(*leaves: Tensor) -> Tensor:
        return case.scan("triton:2")[0]

    assert torch.autograd.gradgradcheck(output, (case.x, *case.state))


def test_calibrate_measures_triton_too(monkeypatch: pytest.MonkeyPatch) -> None:
    module = sys.modules[calibrate.__module__]
    monkeypatch.setattr(module, "SHAPES", tuple(module.Shape(t, 1, 2, 2) for t in (3, 6)))
    model = calibrate(DEVICE, cells=("RNN", "LSTM"), repeats=1)
    assert "RNN triton" in model.coefficients
    assert "LSTM triton" not in model.coefficients
