"""Arguments of scans that do not fit together: refused by name, before a kernel that trusts them is called."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import retime
from retime.mechanisms.scan import (
    CostModel,
    CsrPattern,
    JacobianScan,
    ProductPlan,
    calibrate,
    check_solver,
    jacobian_of,
    layer,
    parse_solver,
    prune_class_blind,
    scan_bidirectional,
    scan_layer,
    scan_plan,
    set_cost_model,
)
from retime.mechanisms.scan import layer as function

T, B, X, H = 5, 3, 4, 6
GATES = {"RNN_TANH": 1, "RNN_RELU": 1, "GRU": 3, "LSTM": 4}
Arguments = dict[str, Any]


def arguments(mode: str, packed: bool) -> Arguments:
    rows = GATES[mode] * H
    h0 = torch.zeros(B, H)
    arguments: Arguments = {
        "mode": mode,
        "x": torch.zeros(T, B, X),
        "hx": (h0, h0) if mode == "LSTM" else h0,
        "w_ih": torch.zeros(rows, X, requires_grad=True),
        "w_hh": torch.zeros(rows, H),
        "b_ih": torch.zeros(rows),
        "b_hh": torch.zeros(rows),
    }
    if packed:
        arguments |= {"x": torch.zeros(9, X), "batch_sizes": torch.tensor([3, 2, 2, 1, 1])}
    return arguments


def spoiled(given: Tensor) -> Iterator[Any]:
    """The same tensor, each time wrong in one thing."""
    yield given.detach().narrow(0, 0, given.shape[0] - 1)
    yield torch.cat([given.detach()] * 3)
    yield given.detach()[..., :-1] if given.dim() > 1 else given.detach().unsqueeze(0)
    yield torch.cat([given.detach()] * 2, dim=-1)
    yield given.detach().unsqueeze(0)
    yield given.detach()[:0]
    yield given.detach().double() if given.is_floating_point() else given.detach().int()
    yield given.detach().to("meta")
    yield "tensor"


def wrong() -> Iterator[tuple[str, Arguments]]:
    """Every argument spoiled in every way."""
    for mode in GATES:
        for packed in (False, True):
            right = arguments(mode, packed)
            for name, given in right.items():
                if name == "mode":
                    continue
                for other in spoiled(given[0] if isinstance(given, tuple) else given):
                    if name == "x" and isinstance(other, Tensor) and other.shape[1:] == (B, X) and len(other):
                        continue  # another number of time steps; its dtype and device are held against the others'
                    yield name, {**right, name: (given[0], other) if isinstance(given, tuple) else other}
            for sizes in ([1, 1, 2, 2, 3], [3, 2, 2, 1, 0, 1], [10**12], [9, 0], [-1, 10], [3, 3, 3, 3, 3]):
                if packed:
                    yield "batch_sizes", {**right, "batch_sizes": torch.tensor(sizes)}
            yield "hx", {**right, "hx": (torch.zeros(B, H),) * 3}
            yield "b_", {**right, "b_hh": None}
            yield "w_hh", {**right, "w_hh": None}


def no_kernel(*_: Any) -> Any:
    raise AssertionError("the kernel was called, and may end the process")


def test_what_does_not_fit_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (layer, function):
        monkeypatch.setattr(module, "run_native", no_kernel)
    tried = 0
    for name, given in wrong():
        for reverse in (False, True):
            tried += 1
            with pytest.raises((ValueError, TypeError)) as refused:
                scan_layer(**given, reverse=reverse)
            # hx and the weights are held against x and the sizes
            assert name in str(refused.value) or (name in ("x", "batch_sizes") and "for this x" in str(refused.value))
    assert tried > 600


def test_both_directions_are_checked() -> None:
    right = arguments("GRU", packed=False)
    weights = tuple(right[name] for name in ("w_ih", "w_hh", "b_ih", "b_hh"))
    hx = torch.zeros(2, B, H)
    assert scan_bidirectional("GRU", right["x"], hx, weights, weights)[0].shape == (T, B, 2 * H)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"hx is \[3, 6\].*\[2, B, H\]"):
        scan_bidirectional("GRU", right["x"], hx[0], weights, weights)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"w_hh has the shape \[6, 6\].*\[18, 6\]"):
        scan_bidirectional("GRU", right["x"], hx, weights, (weights[0], torch.zeros(H, H), *weights[2:]))  # type: ignore[arg-type]


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "layers": (lambda: retime.ScanGRU(2, 2, num_layers=10**30), "num_layers"),
    "solver": (lambda: parse_solver(7), "name=7"),  # type: ignore[arg-type]
    "chunk": (lambda: parse_solver("chunk:0"), "length"),
    "truncated": (lambda: parse_solver("truncated:0"), "levels"),
    "triton": (lambda: parse_solver("triton:0"), r"length=0\): give a whole number of 1 or more"),
    "object": (lambda: check_solver(3), "solve"),  # type: ignore[arg-type]
    "pruned": (lambda: prune_class_blind(nn.ReLU(), 0.5), "ReLU has no convolution or linear layer"),
    "factors": (
        lambda: ProductPlan(CsrPattern.full(3, 2), CsrPattern.full(3, 2)),
        "cannot multiply 3 x 2 by 3 x 2: list the Jacobians from the last layer",
    ),
    "cell": (lambda: calibrate(cells=["Elman"]), "cells"),  # type: ignore[list-item]
    "model": (lambda: set_cost_model("cpu", None), "model"),  # type: ignore[arg-type]
    "coefficients": (lambda: CostModel({"GRU chunk": (1.0,)}), "coefficients.*6 numbers"),
    "negative": (lambda: CostModel({"GRU sequential": (1.0, -1.0, 1.0, 1.0)}), "coefficients"),
    "matrices": (lambda: scan_plan(10**30), "matrices"),
    "patterns": (lambda: JacobianScan(["eye"]), "patterns"),  # type: ignore[list-item]
    "shape": (lambda: jacobian_of(nn.ReLU(), (3, -1)), "input_shape"),
    "layer": (lambda: jacobian_of("ReLU", (3,)), "layer"),  # type: ignore[arg-type]
    "indptr": (lambda: CsrPattern(2, 2, torch.arange(2), torch.arange(2)), "indptr"),
    "values": (lambda: JacobianScan([CsrPattern.full(2, 2)])(torch.ones(2, 1), [torch.ones(3, 1)]), r"values\[0\]"),
    "gradient": (lambda: JacobianScan([CsrPattern.full(2, 2)])(torch.ones(3, 1), [torch.ones(4, 1)]), "gradient"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_is_refused_at_once(name: str) -> None:
    call, says = REFUSED[name]
    with pytest.raises((TypeError, ValueError), match=says):
        call()
