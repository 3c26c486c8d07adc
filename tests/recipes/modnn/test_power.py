"""Figures 15 and 16: without a meter nothing is made up, with one its joules are what is reported."""

from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from retime.recipes.core.results import Point, Result, Row, load
from retime.recipes.core.schema import Hardware
from retime.recipes.modnn import power as modnn_power
from retime.recipes.modnn.power import ENERGY, MEAN, MOST, NO_METER, EnergyMeter, Power
from retime.recipes.modnn.settings import MemorySettings, claim
from retime.recipes.modnn.side_by_side import STEP, UNLIMITED


def test_without_a_meter_the_reason_is_all_there_is(run: Callable[..., Path]) -> None:
    path = run("experiment=modnn_fig15", "powercap=none")
    (point,) = load(path).points
    assert point.rows == []
    (line,) = Power().compare(load(path))
    assert line.measured is None
    assert "none has no intel-rapl package" in line.note
    assert "not measured, because this machine has no meter" in path.with_name("result.md").read_text()
    assert path.with_name("result.png").stat().st_size > 0


def test_joules_of_each_measured_block_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """A meter that is read twice a block, at its ends: 6 joules and 2 seconds each, over 2 steps."""
    joules, seconds = count(0, 6), count(0, 2)
    meter = EnergyMeter(lambda: next(joules), "made up", every_s=1e6, clock=lambda: next(seconds))
    monkeypatch.setattr(modnn_power, "find_meter", lambda device, powercap: meter)
    monkeypatch.setattr(modnn_power, "block_ms", lambda worker, steps, name, facts: 1.0)

    def side_by_side(given: Any, case: Any, budgets: Any, tick: Any, block: Any) -> Any:
        for _ in range(given.rounds + given.warmup_rounds):
            for name in (UNLIMITED, "50 %", "floor"):
                block(None, given.steps, name, {})
        return [Row(UNLIMITED, STEP, "ms", [1.0]), Row("50 %", STEP, "ms", [1.0])], {"ideal peak MiB": 10.0}

    monkeypatch.setattr(modnn_power, "side_by_side", side_by_side)
    settings = MemorySettings(hardware=Hardware("cpu", "cpu", None), cases={"net": {}}, rounds=3, steps=2)
    measured = Power().measure(settings, {"network": "net"}, lambda text: None)
    rows = {(row.variant, row.quantity): row.values for row in measured.rows}
    assert rows["50 %", ENERGY] == [3.0] * 3, "the warm-up round is left out"
    assert rows[UNLIMITED, MEAN] == [3.0] * 3
    assert NO_METER not in measured.facts
    assert not any(name == "floor" for name, _ in rows), "it did not live through all rounds"


def test_power_over_unlimited() -> None:
    rows = [
        *(Row(name, STEP, "ms", [1.0, 1.0]) for name in (UNLIMITED, "50 %")),
        *(Row(UNLIMITED, quantity, "", [10.0, 20.0]) for quantity in (ENERGY, MEAN, MOST)),
        *(Row("50 %", quantity, "", [11.0, 22.0]) for quantity in (ENERGY, MEAN, MOST)),
    ]
    point = Point({"network": "net"}, {}, rows, {"meter": "made up", "ideal peak MiB": 10.0})
    (line,) = Power().compare(Result("modnn_fig15", "", "modnn", "Figures 15 and 16", "", [point]))
    assert line.against == claim("figure-15")
    assert line.measured.rounds == pytest.approx([10.0, 10.0])
