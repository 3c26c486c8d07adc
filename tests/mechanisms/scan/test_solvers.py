"""What solvers do: products counted, determinism, nothing read back; how ``solver="auto"`` chooses."""

import copy
import itertools
import math
import pickle

import pytest
import torch

from retime.mechanisms.scan import CostModel, calibrate, check_solver, choose_solver, parse_solver, set_cost_model
from retime.mechanisms.scan import calibrate as calibrate_module
from retime.mechanisms.scan import solvers as chunk
from retime.mechanisms.scan.calibrate import fit_coefficients
from retime.mechanisms.scan.cells import BlockJacobians
from retime.mechanisms.scan.solvers import AUTOGRAD, CPU, WAYS, Shape
from support.scan import SOLVERS, CountOps, make_case


def make_scan(steps: int, batch: int = 2, hidden: int = 3, blocks: int = 1) -> tuple[BlockJacobians, torch.Tensor]:
    torch.manual_seed(steps)
    scale = torch.rand(steps, batch, blocks, hidden, dtype=torch.float64)
    matrix = torch.randn(blocks * hidden, hidden, dtype=torch.float64) * 0.5
    return BlockJacobians(scale, matrix), torch.randn(steps, batch, hidden, dtype=torch.float64)


def count_products(solver: str, steps: int) -> int:
    jacobians, gradient = make_scan(steps)
    with torch.no_grad(), CountOps() as ops:
        parse_solver(solver).solve(jacobians, gradient)
    return ops.products


def test_sequential_makes_one_product_a_step_and_chunk_two_a_step_of_a_chunk_and_one_a_chunk() -> None:
    assert count_products("sequential", 400) == 400
    assert count_products("chunk:20", 400) == 20 + 20 + 400 // 20
    assert count_products("chunk:20", 403) == 20 + 20 + 400 // 20 + 3


@pytest.mark.parametrize("blocks", [1, 4])
def test_chunk_goes_through_long_sequences_in_windows(blocks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    jacobians, gradient = make_scan(403, blocks=blocks)
    products = 2 * 3 * 4 * gradient.element_size()  # B matrices of H (H + 1) numbers, a chunk
    with torch.no_grad():
        whole = parse_solver("chunk:20").solve(jacobians, gradient)
        monkeypatch.setattr(chunk, "CACHE_BYTES", 6 * products)
        with CountOps() as ops:
            windows = parse_solver("chunk:20").solve(jacobians, gradient)
    assert ops.products == 4 * (20 + 20) + 400 // 20 + 3
    for one, other in zip(windows, whole, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-14)


def test_windows_have_some_chunks_however_large_their_products(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunk, "CACHE_BYTES", 1)
    assert count_products("chunk:20", 400) == 400 // 20 // chunk.LEAST_AT_ONCE * 40 + 400 // 20


@pytest.mark.parametrize("steps", [1, 2, 3, 10, 97, 1000, 4096, 30_000])
def test_chunks_are_as_long_as_makes_fewest_products(steps: int) -> None:
    def products(length: int) -> int:
        return 2 * length + steps // length + steps % length

    assert products(parse_solver("chunk").length_for(steps)) <= 1.25 * min(map(products, range(1, steps + 1)))


@pytest.mark.parametrize("steps", [2**k for k in range(3, 10)])
def test_blelloch_makes_three_products_a_level(steps: int) -> None:
    levels = math.ceil(math.log2(steps))
    assert count_products("blelloch", steps) <= 3 * levels + 4


def test_levels_of_blelloch_grow_by_one_where_steps_double() -> None:
    counts = [count_products("blelloch", 2**k + 1) for k in range(4, 10)]
    assert {later - sooner for sooner, later in itertools.pairwise(counts)} == {3}


def test_truncated_halves_its_linear_part_a_level() -> None:
    counts = [count_products(f"truncated:{levels}", 257) for levels in (1, 2, 3)]
    assert counts[0] - counts[1] == 64 - 3
    assert counts[1] - counts[2] == 32 - 3


@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("blocks", [1, 4])
def test_all_solve_the_recurrence(solver: str, blocks: int) -> None:
    for steps in (1, 2, 3, 31, 64, 65):
        jacobians, gradient = make_scan(steps, blocks=blocks)
        expected, carry = [], torch.zeros_like(gradient[0])
        for t in reversed(range(steps)):
            expected.insert(0, gradient[t] + carry)
            carry = jacobians.step_mv(t, expected[0])
        with torch.no_grad():
            v, last = parse_solver(solver).solve(jacobians, gradient)
        torch.testing.assert_close(v, torch.stack(expected), rtol=1e-11, atol=1e-13)
        torch.testing.assert_close(last, carry, rtol=1e-11, atol=1e-13)


def test_step_mm_and_dense_agree_with_step_mv() -> None:
    jacobians, gradient = make_scan(5, blocks=4)
    rows = torch.stack([gradient[0], gradient[1]], dim=-2)
    by_row = torch.stack([jacobians.step_mv(3, gradient[0]), jacobians.step_mv(3, gradient[1])], dim=-2)
    torch.testing.assert_close(jacobians.step_mm(3, rows), by_row)
    torch.testing.assert_close(rows @ jacobians.dense()[3], by_row)


@pytest.mark.parametrize("solver", SOLVERS)
def test_same_bits_every_time(solver: str) -> None:
    jacobians, gradient = make_scan(100)
    with torch.no_grad():
        first, second = (parse_solver(solver).solve(jacobians, gradient) for _ in range(2))
    assert torch.equal(first[0], second[0])
    assert torch.equal(first[1], second[1])


@pytest.mark.parametrize("solver", SOLVERS)
def test_nothing_is_read_back(solver: str) -> None:
    jacobians, gradient = make_scan(50)
    with torch.no_grad(), CountOps() as ops:
        parse_solver(solver).solve(jacobians, gradient)
    reads = {"_local_scalar_dense", "item", "nonzero", "equal", "is_nonzero"}
    assert not reads & set(ops.counts)


@pytest.mark.parametrize("solver", [*SOLVERS, "triton", "triton:8"])
def test_names_pickle_and_copy(solver: str) -> None:
    parsed = parse_solver(solver)
    for other in (pickle.loads(pickle.dumps(parsed)), copy.deepcopy(parsed), parse_solver(repr(parsed))):
        assert repr(other) == repr(parsed)


@pytest.mark.parametrize("name", ["scan", "truncated", "truncated:0", "chunk:0", "sequential:3", "blelloch:2", ""])
def test_unknown_names_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match=r"use one of|1 or more|1 time step"):
        check_solver(name)


def chosen(mode: str, steps: int, batch: int, hidden: int, dtype: torch.dtype = torch.float32) -> str:
    x, state = torch.empty(steps, batch, 8, dtype=dtype), torch.empty(1, batch, hidden, dtype=dtype)
    solver = choose_solver("auto", mode, x, state)
    return AUTOGRAD if solver is None else repr(solver)


def test_layers_get_what_is_fastest_for_them() -> None:
    """Long narrow sequences are scanned side by side, wide layers go step by step, and torch keeps the rest."""
    assert chosen("RNN_TANH", 1000, 1, 20) == "chunk"
    assert chosen("GRU", 10_000, 1, 8) in ("chunk", "blelloch")
    assert chosen("GRU", 1000, 16, 64) == "sequential"
    assert chosen("RNN_RELU", 1000, 1, 256) == "sequential"
    assert chosen("GRU", 100, 256, 256) == AUTOGRAD
    assert chosen("RNN_TANH", 1, 1, 8) == AUTOGRAD
    assert chosen("LSTM", 1000, 16, 20) == AUTOGRAD  # one oneDNN kernel for all steps
    assert chosen("LSTM", 1000, 1, 8, torch.float64) != AUTOGRAD  # which there is none of in float64


def test_unknown_devices_keep_torchs_own() -> None:
    x, state = torch.empty(1000, 1, 8, device="meta"), torch.empty(1, 1, 8, device="meta")
    assert choose_solver("auto", "GRU", x, state) is None


def test_uneven_sequences_are_padded_at_a_price() -> None:
    lengths = [1000] + [1] * 255
    batch_sizes = torch.tensor([sum(length > t for length in lengths) for t in range(1000)])
    state = torch.empty(1, 256, 20)
    x = torch.empty(int(batch_sizes.sum()), 8)
    assert choose_solver("auto", "GRU", x, state, batch_sizes) is None


def test_auto_runs_what_it_chose() -> None:
    assert "ScanFunction" not in make_case("GRU", 2).scan("auto")[0].grad_fn.name()
    assert make_case("GRU", 300, 1, 4).scan("auto")[0].grad_fn.name() == "ScanFunctionBackward"


def test_a_user_can_replace_the_model() -> None:
    only_sequential = CostModel({"RNN sequential": (0.0, 0.0, 0.0, 0.0), "RNN autograd": (1.0, 0.0, 0.0, 0.0, 0.0)})
    before = set_cost_model("cpu", only_sequential)
    try:
        assert before is CPU
        assert chosen("RNN_TANH", 1000, 1, 20) == "sequential"
        assert chosen("GRU", 1000, 1, 20) == AUTOGRAD
    finally:
        set_cost_model("cpu", CPU)


def test_a_small_gain_is_not_worth_the_risk() -> None:
    shape = Shape(100, 1, 8, 8)
    model = CostModel({"RNN sequential": (10.0, 0.0, 0.0, 0.0), "RNN autograd": (12.0, 0.0, 0.0, 0.0, 0.0)})
    assert model.choose("RNN", shape) == AUTOGRAD
    assert math.isinf(model.predict_us("RNN", "chunk", shape))


def test_fit_finds_the_coefficients_that_made_the_times() -> None:
    true = (50.0, 3.0, 0.002, 0.0)
    shapes = [Shape(t, b, h, 8) for t in (10, 100, 1000) for b in (1, 16) for h in (8, 64)]
    work = [shape.work("sequential") for shape in shapes]
    times = [sum(a * b for a, b in zip(true, row, strict=True)) for row in work]
    assert fit_coefficients(work, times) == pytest.approx(true, rel=1e-4, abs=1e-6)


def test_calibrate_measures_every_way(monkeypatch: pytest.MonkeyPatch) -> None:
    module = __import__("sys").modules[calibrate_module.__module__]
    monkeypatch.setattr(module, "SHAPES", (Shape(4, 1, 2, 2), Shape(8, 2, 3, 2)))
    model = calibrate(cells=("RNN", "LSTM"), repeats=1)
    assert set(model.coefficients) == {f"{cell} {way}" for cell in ("RNN", "LSTM") for way in WAYS}
    assert all(value >= 0 for row in model.coefficients.values() for value in row)
    assert all(any(value > 0 for value in row) for row in model.coefficients.values())  # no way takes no time at all
