"""``solver="auto"``: the cost model behind it, how it is fitted, and how a user overrides it."""

import math

import pytest
import torch

from retime.mechanisms.scan import CostModel, calibrate, choose_solver, set_cost_model
from retime.mechanisms.scan import calibrate as calibrate_module
from retime.mechanisms.scan.calibrate import fit_coefficients
from retime.mechanisms.scan.solvers import AUTOGRAD, CPU, WAYS, Shape
from support.scan import make_case


def chosen(mode: str, steps: int, batch: int, hidden: int, dtype: torch.dtype = torch.float32) -> str:
    x, state = torch.empty(steps, batch, 8, dtype=dtype), torch.empty(1, batch, hidden, dtype=dtype)
    solver = choose_solver("auto", mode, x, state)
    return AUTOGRAD if solver is None else repr(solver)


def test_long_narrow_sequences_are_scanned_side_by_side() -> None:
    assert chosen("RNN_TANH", 1000, 1, 20) == "chunk"
    assert chosen("GRU", 10_000, 1, 8) in ("chunk", "blelloch")


def test_wide_layers_go_step_by_step() -> None:
    assert chosen("GRU", 1000, 16, 64) == "sequential"
    assert chosen("RNN_RELU", 1000, 1, 256) == "sequential"


def test_torch_keeps_what_it_does_faster() -> None:
    assert chosen("GRU", 100, 256, 256) == AUTOGRAD
    assert chosen("RNN_TANH", 1, 1, 8) == AUTOGRAD
    assert chosen("LSTM", 1000, 16, 20) == AUTOGRAD  # one oneDNN kernel for all steps


def test_lstm_in_float64_has_no_fused_kernel() -> None:
    assert chosen("LSTM", 1000, 1, 8, torch.float64) != AUTOGRAD


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
