"""Sparse products, the scan over them, and what its steps cost: by hand and against dense arithmetic."""

import pytest
import torch
from torch import Tensor

from retime.mechanisms.scan import (
    CsrPattern,
    JacobianScan,
    ProductPlan,
    VectorPlan,
    count_flops,
    flop_of_product,
    flop_of_vector,
    product_pattern,
    scan_plan,
)
from retime.mechanisms.scan.jacobians import sparse as product_module
from retime.mechanisms.scan.jacobians.sparse import dense_values


def sparse(rows: int, columns: int, density: float, samples: int = 1) -> tuple[CsrPattern, Tensor]:
    kept = torch.rand(rows * columns) < density
    pattern = CsrPattern.full(rows, columns).only(kept)
    return pattern, torch.randn(pattern.entries, samples, dtype=torch.double)


def dense(pattern: CsrPattern, values: Tensor) -> Tensor:
    return dense_values(pattern, values).permute(2, 0, 1)


def same(one: CsrPattern, other: CsrPattern) -> bool:
    """Whether both store exactly the same places of matrices of the same shape."""
    tensors = (one.indptr, other.indptr), (one.indices, other.indices)
    return one.columns == other.columns and all(torch.equal(*pair) for pair in tensors)


@pytest.mark.parametrize("samples", [(1, 1), (3, 1), (1, 3), (3, 3)])
@pytest.mark.parametrize("density", [(0.1, 0.1), (0.3, 1.0), (1.0, 0.3), (1.0, 1.0), (0.0, 0.5), (0.5, 0.05)])
def test_products(density: tuple[float, float], samples: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    monkeypatch.setattr(product_module, "LISTED_AT_A_TIME", 50)  # several chunks even here
    a, left = sparse(13, 17, density[0], samples[0])
    b, right = sparse(17, 11, density[1], samples[1])
    plan = ProductPlan(a, b)
    wanted = dense(a, left) @ dense(b, right)
    product = dense(plan.pattern, plan(left, right))
    torch.testing.assert_close(product.expand_as(wanted), wanted, rtol=1e-13, atol=1e-14)
    assert same(plan.pattern, product_pattern(a, b))
    ones = (dense(a, left) != 0).double()[0] @ (dense(b, right) != 0).double()[0]
    assert plan.pattern.entries == int((ones > 0).sum())
    assert flop_of_product(a, b) == 2 * int(ones.sum())
    assert torch.equal(plan(left, right), plan(left, right))


def test_both_numeric_phases_are_used_and_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    a, left = sparse(20, 20, 0.5, 2)
    b, right = sparse(20, 20, 0.5, 2)
    by_gemm = ProductPlan(a, b)
    monkeypatch.setattr(product_module, "DENSE_GAIN", 0)
    by_entry = ProductPlan(a, b)
    assert by_gemm.is_dense
    assert not by_entry.is_dense
    assert same(by_gemm.pattern, by_entry.pattern)
    torch.testing.assert_close(by_gemm(left, right), by_entry(left, right), rtol=1e-13, atol=1e-14)


@pytest.mark.parametrize("density", [0.0, 0.2, 1.0])
@pytest.mark.parametrize("samples", [1, 4])
def test_matrix_times_vector(density: float, samples: int) -> None:
    torch.manual_seed(0)
    pattern, values = sparse(9, 7, density, samples)
    vectors = torch.randn(7, 4, dtype=torch.double)
    wanted = (dense(pattern, values) @ vectors.t()[:, :, None])[:, :, 0].t()
    torch.testing.assert_close(VectorPlan(pattern)(values, vectors), wanted, rtol=1e-13, atol=1e-14)


def test_factors_must_fit() -> None:
    with pytest.raises(ValueError, match="cannot multiply 3 x 2 by 3 x 2: list the Jacobians from the last layer"):
        ProductPlan(CsrPattern.full(3, 2), CsrPattern.full(3, 2))


@pytest.mark.parametrize("levels", [0, 1, 2, 3, None])
@pytest.mark.parametrize("matrices", [0, 1, 2, 3, 4, 7, 8, 9, 21])
def test_scan_gives_every_gradient(matrices: int, levels: int | None) -> None:
    torch.manual_seed(matrices)
    sizes = torch.randint(1, 6, (matrices + 1,)).tolist()
    chain = [sparse(sizes[k + 1], sizes[k], 0.7, 1 + k % 2) for k in range(matrices)]
    gradient = torch.randn(sizes[0], 2, dtype=torch.double)
    ours = JacobianScan([pattern for pattern, _ in chain], levels)(gradient, [values for _, values in chain])
    assert len(ours) == matrices + 1
    for index, (pattern, values) in enumerate([(None, None), *chain]):
        if pattern is not None and values is not None:
            gradient = (dense(pattern, values) @ gradient.t()[:, :, None])[:, :, 0].t()
        torch.testing.assert_close(ours[index], gradient, rtol=1e-12, atol=1e-13)


def test_the_whole_scan_over_seven_jacobians() -> None:
    """Algorithm 1 as in the paper's Figure 1, M_1 .. M_7 numbered 1 .. 7; what line 9 overwrites is left out."""
    plan = scan_plan(7)
    assert str(plan).splitlines() == [
        "up 0: 8=1*0 9=3*2 10=5*4 11=7*6",
        "up 1: 12=9*8 13=11*10",
        "up 2: 14=13*12",
        "down 4: 15=10*12",
        "down 5: 16=2*8 17=4*12 18=6*15",
    ]
    assert plan.gradients == (0, 8, 16, 12, 17, 15, 18, 14)


def test_without_levels_it_is_back_propagation() -> None:
    plan = scan_plan(3, 0)
    assert str(plan) == "linear 0: 4=1*0\nlinear 1: 5=2*4\nlinear 2: 6=3*5"
    assert all(step.is_vector for step in plan.steps)


@pytest.mark.parametrize("matrices", [1, 7, 8, 20, 100, 1000])
def test_depth_is_logarithmic_and_work_linear(matrices: int) -> None:
    plan = scan_plan(matrices)
    assert len({(step.phase, step.level) for step in plan.steps}) <= 2 * matrices.bit_length()
    assert len(plan.steps) <= 2 * matrices
    assert not [step for step in plan.steps if step.phase == "down" and not step.is_vector], "section 3.2"


def test_flops_by_hand() -> None:
    """A = [[a, b], [0, c]] and B = [[d, 0], [e, f]]: a d + b e, b f, c e, c f are five products."""
    a = CsrPattern(2, 2, torch.tensor([0, 2, 3]), torch.tensor([0, 1, 1]))
    b = CsrPattern(2, 2, torch.tensor([0, 1, 3]), torch.tensor([0, 0, 1]))
    assert flop_of_product(a, b) == 2 * (1 * 1 + 2 * 2)
    assert flop_of_vector(a) == 6
    assert product_pattern(a, b).is_full


def test_flops_of_each_step_and_the_longest_path() -> None:
    """g (2), M_1 4 x 2 full, M_2 the diagonal of 4, M_3 3 x 4 full: scan with one level, by hand."""
    chain = [CsrPattern.full(4, 2), CsrPattern.diagonal(4), CsrPattern.full(3, 4)]
    plan = scan_plan(3, 1)
    assert str(plan) == "up 0: 4=1*0 5=3*2\nlinear 1: 6=5*4\ndown 2: 7=2*4"
    steps = count_flops(plan, chain)
    assert [(each.kind, each.flop, each.dense_size) for each in steps] == [
        ("mv", 2 * 8, 8),
        ("mm", 2 * 12, 3 * 4 * 4),
        ("mv", 2 * 12, 12),
        ("mv", 2 * 4, 16),
    ]
    assert [each.critical for each in steps] == [False, True, True, False]
    with pytest.raises(ValueError, match="for 3 Jacobians, not for 2"):
        count_flops(plan, chain[:2])
