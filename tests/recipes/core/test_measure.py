"""Interleaving, spreads, pinning: the arithmetic of measuring. Nothing here reads a clock."""

import os
from types import SimpleNamespace

import pytest
import torch

from retime.foundations.measure import speedup, spread
from retime.recipes.core.claims import Claim, Comparison, Target, amount
from retime.recipes.core.measure import PhaseClock, interleave, middle_step, pinned


def test_every_round_runs_every_variant_in_another_order() -> None:
    ran: list[str] = []
    names = ["a", "b", "c"]
    ticks: list[str] = []
    blocks = {name: (lambda name=name: ran.append(name)) for name in names}
    kept = interleave(blocks, rounds=3, warmup_rounds=1, tick=ticks.append)
    assert [len(values) for values in kept.values()] == [3, 3, 3]  # the warm-up round is dropped
    rounds = [ran[first : first + 3] for first in range(0, len(ran), 3)]
    assert rounds == [["c", "a", "b"], ["a", "b", "c"], ["b", "c", "a"], ["c", "a", "b"]]
    assert ticks == ran


def test_a_number_is_a_median_with_quartiles_and_a_speedup_is_formed_inside_each_round() -> None:
    value = spread([1.0, 2.0, 3.0, 4.0, 5.0])
    assert (value.low, value.median, value.high) == (2.0, 3.0, 4.0)
    with pytest.raises(ValueError, match="rounds"):
        spread([])
    # a machine that slows down five-fold midway changes no round's ratio
    assert speedup([2.0, 10.0], [1.0, 5.0]).rounds == [2.0, 2.0]
    assert middle_step([[1.0, 5.0], [2.0, 1.0], [3.0, 3.0]]) == [2.0, 3.0, 6.0], "each phase, and the whole step"


def test_pinning_is_undone() -> None:
    cores, threads = os.sched_getaffinity(0), torch.get_num_threads()
    with pinned(1):
        assert len(os.sched_getaffinity(0)) == 1
        assert torch.get_num_threads() == 1
    assert os.sched_getaffinity(0) == cores
    assert torch.get_num_threads() == threads
    with pytest.raises(ValueError, match=r"hardware\.cores=4096"), pinned(4096):
        pass


def test_phase_clock_gives_a_time_for_each_mark(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = iter([1.0, 1.5, 1.75, 3.0, 3.125, 5.125])
    monkeypatch.setattr("retime.foundations.measure.timing.time", SimpleNamespace(perf_counter=lambda: next(seconds)))
    clock = PhaseClock(torch.device("cpu"))
    for _ in range(2):
        clock.start()
        clock.mark()
        clock.mark()
    assert clock.steps_ms() == [[500.0, 250.0], [125.0, 2000.0]]
    assert clock.steps_ms() == []


def test_claims_and_targets_show_their_verdict() -> None:
    claim = Comparison(Claim("optimizer-fusion", "Figure 3", "ms", 16.70, "optimizer"), spread([10.0]))
    assert claim.cells() == ["optimizer-fusion, Figure 3", "optimizer", "16.70 ms", "10.00 ms", ""]
    assert Comparison(Target("speed", "x", 1.1), spread([1.2])).cells()[-1] == "met"
    assert Comparison(Target("speed", "x", 1.1), spread([1.0])).cells()[-1] == "MISSED"
    assert Comparison(Target("overhead", "%", 1.0, at_most=True), spread([0.5])).cells()[-1] == "met"
    assert Comparison(Target("speed", "x", 1.1)).cells()[3] == "not measured"
    shown = [amount(value, "ms") for value in (0.1234, 1.234, 123.4, 1234.0)]
    assert shown == ["0.123 ms", "1.23 ms", "123.4 ms", "1234 ms"]
    assert amount(1.019, "x") == "1.019 x"
