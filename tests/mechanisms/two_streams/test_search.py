"""The search of two streams: what it tries, when it ends, and what it leaves, by a clock of its own."""

import threading
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from retime.foundations.messages import DifferenceWarning, NoEffectWarning
from retime.mechanisms.two_streams import Setting, TwoStreamBackward, search

PLAIN, FEWER = Setting(False, 2, 2), Setting(False, 1, 1)
BOTH, BOTH_FEWER = Setting(True, 2, 1, 1), Setting(True, 1, 1, 1)
SEARCH_STEPS = 33
pytestmark = pytest.mark.filterwarnings("ignore:the search of two streams also runs")


@pytest.fixture(autouse=True)
def _two_threads(_as_before_all_tests: None) -> None:
    torch.set_num_threads(2)


class Loop:
    """Trains a small model; a step takes as long as its setting's number says."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, step_s: Callable[[Setting], float]) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
        self.two_streams = TwoStreamBackward(self.model)
        self.used: list[Setting] = []
        self._now_s = 0.0
        self._step_s = step_s
        monkeypatch.setattr(search, "time", SimpleNamespace(perf_counter=lambda: self._now_s))

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.model(torch.ones(3, 4)).square().mean().backward()
            self.used.append(self.two_streams._now)
            self._now_s += self._step_s(self.used[-1])


def sub_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name == "retime sub-stream"]


def test_the_fastest_setting_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = Loop(monkeypatch, lambda setting: {PLAIN: 3.0, FEWER: 2.5, BOTH: 2.0}.get(setting, 2.25))
    assert "still searching" in str(loop.two_streams.report())
    loop.steps(SEARCH_STEPS + 3)
    report = loop.two_streams.report()
    assert report.setting == BOTH
    assert dict(report.tried_ms) == {PLAIN: 3000.0, FEWER: 2500.0, BOTH: 2000.0, BOTH_FEWER: 2250.0}
    assert loop.used[SEARCH_STEPS:] == [BOTH] * 3
    assert report.sub_stream + report.main_stream == 2 * sum(setting.two_streams for setting in loop.used[1:])
    assert torch.get_num_threads() == BOTH.forward_threads
    assert len(sub_threads()) == 1
    loop.two_streams.remove()
    assert torch.get_num_threads() == 2
    assert not sub_threads()


@pytest.mark.parametrize(
    ("times_ms", "best"),
    [
        ({PLAIN: 100.0, FEWER: 100.5, BOTH: 98.0}, BOTH),
        ({PLAIN: 100.0, FEWER: 97.0, BOTH: 96.5}, FEWER),  # faster than the first plain one, not than the best
        ({PLAIN: 100.0, FEWER: 99.5, BOTH: 99.2}, PLAIN),
    ],
)
def test_two_streams_have_to_beat_every_plain_setting(times_ms: dict[Setting, float], best: Setting) -> None:
    made = search.Search(list(times_ms), torch.device("cpu"))
    made.times_ms = {setting: [ms] for setting, ms in times_ms.items()}
    assert made.best() == best


@pytest.mark.parametrize("best", [PLAIN, FEWER])
def test_where_two_streams_do_not_pay_they_are_taken_off(monkeypatch: pytest.MonkeyPatch, best: Setting) -> None:
    loop = Loop(monkeypatch, lambda setting: 1.0 if setting == best else 2.0)
    with pytest.warns(NoEffectWarning, match=f"do not pay here and are taken off: {best} is as fast"):
        loop.steps(40)
    assert loop.two_streams.report().setting == best
    assert not sub_threads()
    assert not any("forward" in vars(module) for module in loop.model.modules())
    assert torch.get_num_threads() == best.forward_threads
    loop.two_streams.remove()
    assert torch.get_num_threads() == 2


def test_a_gain_of_less_than_a_hundredth_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = Loop(monkeypatch, lambda setting: 1.0 if setting == PLAIN else 0.995)
    with pytest.warns(NoEffectWarning, match="plain with 2 threads is as fast"):
        loop.steps(40)
    loop.two_streams.remove()


def test_that_sums_may_round_otherwise_is_said_before(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = Loop(monkeypatch, lambda setting: 1.0)
    with pytest.warns(DifferenceWarning, match=r"threads=\(2, 2\) keeps them"):
        loop.steps(1)
    loop.two_streams.remove()


def test_one_thread_leaves_no_core_for_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.set_num_threads(1)
    loop = Loop(monkeypatch, lambda setting: 1.0)
    with pytest.warns(NoEffectWarning, match="kernels have one thread"):
        loop.model(torch.ones(3, 4)).sum().backward()
    assert not any("forward" in vars(module) for module in loop.model.modules())
    loop.two_streams.remove()
    assert torch.get_num_threads() == 1


def test_deterministic_algorithms_end_the_search_before_it_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.use_deterministic_algorithms(True)
    try:
        loop = Loop(monkeypatch, lambda setting: 1.0)
        loop.steps(3)
    finally:
        torch.use_deterministic_algorithms(False)
    assert loop.two_streams.report().setting == Setting(True, 2, 2, 2)
    loop.two_streams.remove()
