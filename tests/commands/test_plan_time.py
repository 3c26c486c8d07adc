"""`retime plan` that takes long: stages with an estimate, and an end with the best plan known by then."""

from __future__ import annotations

import re
import signal
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from retime.commands import plan as plan_command
from retime.commands.plan import main
from retime.mechanisms.memory_budget import search as time_limit
from retime.mechanisms.memory_budget.planner import PlanningStages
from retime.mechanisms.memory_budget.search import MOST_TRIALS, OutOfTime, PlanTrial, TimeLimit
from retime.schedules.budget import OffloadPlan
from support import memory_budget as support
from support.memory_budget import SPLITS, TINY, Net, use_costs

pytestmark = support.IGNORED
ALARMS = pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="this system has no alarms")


STAGE = re.compile(r"(.*) \(stage (\d+) of at most (\d+)\)")


def assert_stages(told: str, numbers: range) -> None:
    found = [match for line in told.splitlines() if (match := STAGE.search(line))]
    assert [int(match[2]) for match in found][: len(numbers)] == list(numbers), told
    assert {match[3] for match in found} == {"10"}


class Clock:
    """Goes when it is told to."""

    now = 0.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(time_limit, "time", SimpleNamespace(monotonic=made.monotonic))
    return made


@pytest.fixture(autouse=True)
def _costs(monkeypatch: pytest.MonkeyPatch) -> None:
    use_costs(monkeypatch, SPLITS)


def lightning_model() -> Any:
    return Net(), next(iter(support.loader(1)))


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict[str, str], str]:
    status = main(["plan", f"{__name__}:lightning_model", *arguments])
    out, errors = capsys.readouterr()
    return status, {line[:15].strip(): line[16:] for line in out.splitlines()}, errors


def trials(monkeypatch: pytest.MonkeyPatch, *times: Any) -> list[Any]:
    """Trials that take so long by their own account, the last of them for ever; what was tried out."""
    tried: list[Any] = []

    def step_ms(_: Any, choice: Any) -> Any:
        tried.append(choice.plan)
        end = times[min(len(tried), len(times)) - 1]
        return end() if callable(end) else end

    monkeypatch.setattr(PlanTrial, "step_ms", step_ms)
    return tried


def assert_cut_short(found: tuple[int, dict[str, str], str], plan: Any) -> None:
    status, said, told = found
    assert status == 0, told
    assert said["plan"] == str(plan)
    assert "trials were cut short" in said["note"]
    assert "bytes (" in said["floor"], "it was known"
    assert said["Eq. 7"] == "not known: the time is over"


def test_time_is_over_between_trials(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, clock: Clock, tmp_path: Path
) -> None:
    def late() -> float:
        clock.now = 101.0
        return 1.0

    tried = trials(monkeypatch, 50.0, late)
    file = tmp_path / "plan.json"
    found = run(capsys, "--budget", str(TINY), "--seconds", "100", "--save", str(file))
    assert len(tried) == 2
    assert_stages(found[2], range(2, 8))
    assert_cut_short(found, tried[1])  # measured, and faster than the first
    assert str(tried[1]) in file.read_text()


@ALARMS
def test_an_alarm_stops_a_trial(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    tried = trials(monkeypatch, lambda: signal.raise_signal(signal.SIGALRM))
    before = signal.getsignal(signal.SIGALRM)
    found = run(capsys, "--budget", str(TINY), "--seconds", "1000")
    assert len(tried) == 1
    assert_cut_short(found, tried[0])
    assert signal.getsignal(signal.SIGALRM) == before


@ALARMS
def test_an_alarm_stops_only_what_may_be_stopped() -> None:
    limit = TimeLimit(1000)
    with limit.alarmed():
        signal.raise_signal(signal.SIGALRM)
        with pytest.raises(OutOfTime), limit.stoppable():
            pytest.fail("nothing more is begun")


def test_a_plan_stands_when_there_is_no_time_for_the_floor(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, clock: Clock
) -> None:
    def progress(text: str) -> None:
        if text.startswith("the step fits"):
            clock.now = 101.0

    monkeypatch.setattr(plan_command, "_progress", progress)
    status, said, _ = run(capsys, "--budget", "1GiB", "--seconds", "100")
    assert status == 0
    assert said["plan"] == "none: the step fits"
    assert said["floor"] == said["Eq. 7"] == "not known: the time is over"


@pytest.mark.parametrize("budget", ["1GiB", str(TINY)])
def test_no_plan_is_known_yet(capsys: pytest.CaptureFixture[str], budget: str) -> None:
    status, said, told = run(capsys, "--budget", budget, "--seconds", "0")
    assert status == 2
    assert "plan" not in said
    assert "--seconds 0 are over, and no plan is known yet" in told


def test_time_is_over_in_another_thread_too(capsys: pytest.CaptureFixture[str]) -> None:
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(run(capsys, "--budget", str(TINY), "--seconds", "0")))
    thread.start()
    thread.join()
    assert found[0][0] == 2
    assert "no plan is known yet" in found[0][2]


def test_the_floor_of_a_step_that_fits_has_stages_too(capsys: pytest.CaptureFixture[str]) -> None:
    _, _, told = run(capsys, "--budget", "1GiB")
    assert_stages(told, range(2, 4))


@pytest.mark.parametrize(("probed", "timed"), [(True, True), (False, True), (True, False)])
def test_stages_are_counted_and_nothing_is_estimated(probed: bool, timed: bool) -> None:
    lines: list[str] = []
    stages = PlanningStages(lines.append, TimeLimit(), probed=probed, timed=timed)
    for begin in [stages.probe] * probed + [stages.least, stages.costs, stages.search]:
        begin()
    for number in range(MOST_TRIALS if timed else 0):
        stages.trial(OffloadPlan(number + 1))
    found = [STAGE.fullmatch(line) for line in lines]
    assert [int(match[2]) for match in found if match] == [*range(2, len(lines) + 2)]
    assert {match[3] for match in found if match} == {str(len(lines) + 1)}
