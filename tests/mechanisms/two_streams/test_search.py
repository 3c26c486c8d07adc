"""The search of two streams: what it tries, when it ends, and what it leaves, by a clock of its own."""

import threading
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from retime.foundations.messages import DifferenceWarning, NoEffectWarning
from retime.mechanisms.two_streams import Setting, TwoStreamBackward, search

PLAIN, FEWER = Setting(False, 2, 2), Setting(False, 1, 1)
BOTH, BOTH_FEWER = Setting(True, 2, 1, 1), Setting(True, 1, 1, 1)
SEARCH_STEPS = 38
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
    assert report.sub_stream + report.main_stream == 2 * sum(
        setting.two_streams for setting in loop.used[1 + search.PROFILE_STEPS :]
    )
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
    searching = search.Search(list(times_ms), torch.device("cpu"))
    searching.times_ms = {setting: [ms] for setting, ms in times_ms.items()}
    assert searching.best() == best


def test_two_streams_have_to_be_faster_in_every_round() -> None:
    tried = search.Search([PLAIN, BOTH, BOTH_FEWER], torch.device("cpu"))
    tried.times_ms = {
        PLAIN: [100.0] * 3 + [60.0] * 3,
        BOTH: [50.0] * 3 + [61.0] * 3,
        BOTH_FEWER: [90.0] * 3 + [59.0] * 3,
    }
    assert tried.best() == BOTH_FEWER
    del tried.times_ms[BOTH_FEWER]
    assert tried.best() == PLAIN


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


@pytest.mark.parametrize("lasting", [True, False])
def test_a_second_look_removes_two_streams_that_only_won_while_the_search_lasted(
    monkeypatch: pytest.MonkeyPatch, lasting: bool
) -> None:
    plain_s = {PLAIN: 3.0, FEWER: 2.5}
    loop = Loop(monkeypatch, plain_s.__getitem__)
    loop._step_s = lambda one: plain_s.get(one, 2.0 if lasting or len(loop.used) <= SEARCH_STEPS else 2.6)
    loop.steps(SEARCH_STEPS + search.STEPS_TO_SECOND_LOOK)
    assert set(loop.used[SEARCH_STEPS:]) == {BOTH}
    removed = pytest.warns(NoEffectWarning, match="do not pay here and are taken off: plain with 1 thread")
    with nullcontext() if lasting else removed:
        loop.steps(30)
    looked = loop.used[SEARCH_STEPS + search.STEPS_TO_SECOND_LOOK :][:16]
    assert looked == ([FEWER] * 4 + [BOTH] * 4) * 2
    assert loop.two_streams.report().setting == (BOTH if lasting else FEWER)
    assert loop.two_streams.report().tried_ms[PLAIN] == 3000.0  # of the search
    assert len(sub_threads()) == lasting
    loop.two_streams.remove()


def test_a_second_look_needs_every_round_to_remove_two_streams() -> None:
    tried = search.Search([PLAIN, BOTH], torch.device("cpu"))
    tried.times_ms = {PLAIN: [100.0] * 3 + [90.0] * 3, BOTH: [99.0] * 3 + [120.0] * 3}
    assert tried.second_look() == BOTH
    tried.times_ms[BOTH] = [101.0] * 3 + [91.0] * 3
    assert tried.second_look() == PLAIN


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


def seconds(output: float, weight: float, both: float | None = None) -> search.LayerTimes:
    """Times of a layer that is called once in each of two backward passes."""
    both_s = output + weight if both is None else both
    return search.LayerTimes([output] * 2 if output else [], [weight] * 2, [both_s] * 2 if output else [])


def test_weight_gradients_are_given_away_that_free_most_of_the_main_stream() -> None:
    layers = {
        "apart is dear": seconds(1.0, 1.0, both=1.2),
        "frees all": seconds(1.0, 1.0),
        "frees half": seconds(1.0, 2.0, both=2.0),
    }
    assert search.layers_to_give(layers, 2, 0.0)[0] == ["frees all", "frees half"]
    names, sub_share = search.layers_to_give(layers, 2, 100.0)
    assert names == ["frees all", "frees half", "apart is dear"]
    assert sub_share == pytest.approx(4.0 / 106.2, rel=0.01)  # of 104.2 s and 3 hand-overs, 102.2 and less remain


def test_the_sub_stream_gets_no_more_than_shortens_the_backward_pass() -> None:
    layers = {str(number): seconds(1.0, 1.0) for number in range(4)}
    assert len(search.layers_to_give(layers, 2, 0.0)[0]) == 4  # 4 output gradients beside 4 weight gradients
    dear = {name: seconds(0.5, 2.0, both=2.4) for name in layers}
    assert len(search.layers_to_give(dear, 2, 0.0)[0]) == 3


def test_giving_away_costs_more_than_a_small_layer_takes() -> None:
    small = search.HAND_OVER_S / 2
    assert search.layers_to_give({"small": seconds(small, small)}, 2, 1.0) == ([], 0.0)
    assert search.layers_to_give({"first": seconds(0.0, 4 * small)}, 2, 1.0)[0] == ["first"]


def test_a_layer_that_is_called_twice_is_given_away_twice() -> None:
    """Its two calls free less of the main stream than two hand-overs cost."""
    cost = search.HAND_OVER_S
    once = search.LayerTimes([cost] * 2, [1.5 * cost] * 2, [2.5 * cost] * 2)
    twice = search.LayerTimes(*([seconds] * 4 for seconds in (cost, 0.9 * cost, 1.9 * cost)))
    assert search.layers_to_give({"once": once, "twice": twice}, 2, 1.0)[0] == ["once"]


def test_only_chosen_layers_run_beside_the_main_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search, "layers_to_give", lambda times, passes, rest_s: (sorted(times)[:1], 0.5))
    loop = Loop(monkeypatch, lambda setting: 1.0 if setting.two_streams else 2.0)
    kernels = [layer.kernels for layer in loop.two_streams._layers]
    loop.steps(1 + search.PROFILE_STEPS)
    assert all(type(layer.kernels).__name__ == "_TimedKernels" for layer in loop.two_streams._layers)
    loop.steps(SEARCH_STEPS)
    report = loop.two_streams.report()
    assert [layer.kernels for layer in loop.two_streams._layers] == kernels
    assert report.setting.layers == {"0"}
    assert str(report.setting) == "two streams for 1 layer with 1 + 1 threads, 2 forward"
    steps_on_two = sum(setting.two_streams and setting.layers is not None for setting in loop.used)
    assert report.sub_stream + report.main_stream == steps_on_two
    loop.two_streams.remove()


@pytest.mark.parametrize(("share", "threads"), [(0.0, (7, 1)), (0.3, (6, 2)), (0.45, (4, 4)), (1.0, (1, 7))])
def test_cores_are_split_by_the_work_that_a_profile_finds(
    monkeypatch: pytest.MonkeyPatch, share: float, threads: tuple[int, int]
) -> None:
    monkeypatch.setattr(search, "layers_to_give", lambda times, passes, rest_s: (["0"], share))
    plain, fewer, two, two_fewer = search.Profile([]).end(search.settings_for(torch.device("cpu"), 8))
    assert (plain, fewer) == (Setting(False, 8, 8), Setting(False, 4, 4))
    assert two == Setting(True, 8, *threads, layers=frozenset("0"))
    assert two_fewer == Setting(True, 4, *threads, layers=frozenset("0"))


def test_a_profile_changes_no_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    """All steps with one thread a kernel, so that plain ones are the same bits."""
    monkeypatch.setattr(TwoStreamBackward, "_set_threads", lambda self, threads: None)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 1, bias=False), nn.Flatten(), nn.Linear(16, 2))
    x = torch.randn(5, 3, 4, 4)
    model(x).square().mean().backward()
    plain = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    two_streams = TwoStreamBackward(model)
    for _ in range(2 + search.PROFILE_STEPS):
        model(x).square().mean().backward()
        for parameter, gradient in zip(model.parameters(), plain, strict=True):
            assert torch.equal(parameter.grad, gradient)
        model.zero_grad()
    two_streams.remove()


def test_what_is_removed_in_its_profile_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = Loop(monkeypatch, lambda setting: 1.0)
    loop.steps(3)
    loop.two_streams.remove()
    assert not sub_threads()
    assert not any("forward" in vars(module) for module in loop.model.modules())
    assert torch.get_num_threads() == 2


def test_given_layers_are_the_only_ones_without_a_profile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search, "layers_to_give", lambda *times: pytest.fail("a profile"))
    loop = Loop(monkeypatch, lambda setting: 1.0 if setting.two_streams else 2.0)
    loop.two_streams.remove()
    for threads in (None, (1, 1)):
        loop.two_streams = TwoStreamBackward(loop.model, threads=threads, layers=["2"])
        loop.used.clear()
        loop.steps(SEARCH_STEPS)
        report = loop.two_streams.report()
        assert report.setting.layers == {"2"}
        steps_on_two = sum(setting.two_streams for setting in loop.used[1:])
        assert report.sub_stream + report.main_stream == steps_on_two
        loop.two_streams.remove()


@pytest.mark.parametrize(("layers", "message"), [([], "names none"), (["1", "2"], "names '1'")])
def test_layers_of_other_names_are_refused(layers: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=rf"layers {message}: .* have \['0', '2'\]"):
        TwoStreamBackward(nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)), layers=layers)
