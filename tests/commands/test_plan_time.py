"""The stages of `retime plan`: counted, and nothing estimated."""

from __future__ import annotations

import re
from typing import Any

import pytest

from retime.commands.main import main
from retime.mechanisms.memory_budget.planner import PlanningStages
from retime.mechanisms.memory_budget.search import MOST_TRIALS
from retime.schedules.budget import OffloadPlan
from support import memory_budget as support
from support.memory_budget import SPLITS, Net, use_costs

pytestmark = support.IGNORED
STAGE = re.compile(r"(.*) \(stage (\d+) of at most (\d+)\)")


def assert_stages(told: str, numbers: range) -> None:
    found = [match for line in told.splitlines() if (match := STAGE.search(line))]
    assert [int(match[2]) for match in found][: len(numbers)] == list(numbers), told
    assert {match[3] for match in found} == {"10"}


@pytest.fixture(autouse=True)
def _costs(monkeypatch: pytest.MonkeyPatch) -> None:
    use_costs(monkeypatch, SPLITS)


def lightning_model() -> Any:
    return Net(), next(iter(support.loader(1)))


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict[str, str], str]:
    status = main(["plan", f"{__name__}:lightning_model", *arguments])
    out, errors = capsys.readouterr()
    return status, {line[:15].strip(): line[16:] for line in out.splitlines()}, errors


def test_the_floor_of_a_step_that_fits_has_stages_too(capsys: pytest.CaptureFixture[str]) -> None:
    _, _, told = run(capsys, "--budget", "1GiB")
    assert_stages(told, range(2, 4))


@pytest.mark.parametrize(("probed", "timed"), [(True, True), (False, True), (True, False)])
def test_stages_are_counted_and_nothing_is_estimated(probed: bool, timed: bool) -> None:
    lines: list[str] = []
    stages = PlanningStages(lines.append, probed=probed, timed=timed)
    for text in ["finding out"] * probed + ["what is needed", "what it costs", "which plan"]:
        stages.begin(text)
    for number in range(MOST_TRIALS if timed else 0):
        stages.trial(OffloadPlan(number + 1))
    found = [STAGE.fullmatch(line) for line in lines]
    assert [int(match[2]) for match in found if match] == [*range(2, len(lines) + 2)]
    assert {match[3] for match in found if match} == {str(len(lines) + 1)}
