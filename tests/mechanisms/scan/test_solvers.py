"""What the solvers do: dependent products counted, names, determinism, nothing read back to the host."""

import copy
import itertools
import math
import pickle

import pytest
import torch

from retime.mechanisms.scan import check_solver, parse_solver
from retime.mechanisms.scan import solvers as chunk
from retime.mechanisms.scan.cells import BlockJacobians
from support.scan import SOLVERS, CountOps


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


def test_sequential_makes_one_product_a_step() -> None:
    assert count_products("sequential", 400) == 400


def test_chunk_makes_two_products_a_step_of_a_chunk_and_one_a_chunk() -> None:
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


def test_objects_must_solve() -> None:
    with pytest.raises(TypeError, match="solve"):
        check_solver(3)  # type: ignore[arg-type]
