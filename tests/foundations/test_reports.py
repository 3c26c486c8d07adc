"""Every report has one shape. The classes are found in the tree, so that none is forgotten."""

import ast
import dataclasses
import importlib
import json
import types
import typing
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from retime.callbacks import StepTimeline
from retime.callbacks.support.phases import MeasuredSteps
from retime.foundations.messages import COLUMNS, Report
from retime.integrations.accelerate.memory_budget import BudgetReports
from retime.mechanisms.fusion import FusionReport
from retime.mechanisms.memory_budget import BudgetReport, PlannedShape
from retime.mechanisms.two_streams import Setting, TwoStreamReport
from retime.schedules.budget import OffloadPlan
from support.paths import tree_of

ROOT = Path(__file__).parents[2]
FOLDERS = ("foundations", "mechanisms", "modules", "strategies", "callbacks", "integrations")
PARTS = ["  plain:    ", "  measured: ", "  try next: "]
REASON = "it has a name of eighty characters, as modules in deep networks do, and reads what is not its own; rename {}"


def trees() -> Iterator[tuple[str, ast.Module]]:
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            yield f"retime.{'.'.join(parts)}".removesuffix(".__init__"), tree_of(path)


def named_by_annotations() -> set[str]:
    """The classes that some ``report()`` says it returns."""
    returned = {
        name.id
        for _, tree in trees()
        for of_class in tree.body
        for node in getattr(of_class, "body", ())
        if isinstance(node, ast.FunctionDef) and node.name == "report" and node.returns is not None
        for name in ast.walk(node.returns)
        if isinstance(name, ast.Name)
    }
    return returned - {"Any", "_Report"}  # of what stands above all strategies, or all objects of one door


def report_classes() -> dict[str, type]:
    wanted = named_by_annotations()
    return {
        node.name: getattr(importlib.import_module(module), node.name)
        for module, tree in trees()
        for node in tree.body
        if isinstance(node, ast.ClassDef) and (node.name in wanted or node.name.endswith(("Report", "Reports")))
        if node.name != "Report"
    }


CLASSES = report_classes()


def example(kind: Any, many: int) -> Any:
    """A value of an annotated type: as empty as can be with 0, and larger than in any training with more."""
    if kind is Any:
        return 1
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is typing.Literal:
        return arguments[0]
    if origin in (typing.Union, types.UnionType):
        return example(arguments[0], many) if many else None
    if isinstance(origin, type) and issubclass(origin, Mapping):
        pairs = [(example(arguments[0], 1 + i), example(arguments[1], many)) for i in range(many)]
        return dict(pairs)
    if origin in (list, tuple):
        return origin(example(arguments[0], 1 + i) for i in range(many))
    if kind in (int, float, bool):
        return kind(123_456_789 * many)
    if kind is str:
        return REASON.format(many) if many else ""
    if kind is Setting:
        return Setting(True, many, many, many)
    if kind is PlannedShape:
        return shape(many)
    assert dataclasses.is_dataclass(kind), kind
    hints = typing.get_type_hints(kind)
    return kind(**{field.name: example(hints[field.name], many) for field in dataclasses.fields(kind)})


def shape(many: int) -> PlannedShape:
    from retime.foundations.parts import Certificate
    from retime.mechanisms.memory_budget.search import PlanChoice

    plan = OffloadPlan(many) if many % 2 else OffloadPlan(many, frozenset({0}), saved=3)
    refused = Certificate(None, REASON.format(many), samples=many)
    return PlannedShape(many, PlanChoice(plan, 0, many, 1.5, 1.0, many, many), refused, note="as it was counted")


def reports(kind: type) -> Iterator[Report]:
    for many in (0, 1, 30):
        if kind is BudgetReports:
            yield BudgetReports(example(BudgetReport, many) for _ in range(min(many, 3)))
        elif kind is MeasuredSteps:
            times = {f"mean_{i}_ms": i / 3 for i in range(many)} | {f"{i}_bytes": 1 << i for i in range(many)}
            yield MeasuredSteps(StepTimeline(png=False), {"steps": many, "files": ["a.png"] * many, **times})
        else:
            yield example(kind, many)


def test_every_report_is_one() -> None:
    assert set(CLASSES) >= named_by_annotations()
    assert [name for name, kind in CLASSES.items() if not issubclass(kind, Report)] == []
    assert len(CLASSES) > 10


@pytest.mark.parametrize("name", CLASSES)
def test_a_report_has_the_shape(name: str) -> None:
    for report in reports(CLASSES[name]):
        text = str(report)
        lines = text.splitlines()
        assert len(lines) <= 15, text
        assert max(map(len, lines)) <= COLUMNS, text
        assert text.startswith(report.headline[:40])
        labels = [line[:12] for line in lines if not line.startswith(" " * 12) and line.startswith("  ")]
        assert [label for label in labels if label in PARTS] == PARTS, text
        assert not [line for line in lines if line != line.rstrip()], text
        told = report.to_dict()
        assert json.loads(json.dumps(told, allow_nan=False)) == told  # plain types: tuples would come back as lists
        assert told["report"] == name
        assert told["what_was_done"][0] == report.headline
        assert all(isinstance(told[f"what_{part}"], list) for part in ("stayed_plain", "was_measured", "to_try"))


def test_what_is_left_out_is_counted_and_kept() -> None:
    report = example(FusionReport, 30)
    assert "more lines: report().to_dict() has all" in str(report)
    assert len(report.to_dict()["what_stayed_plain"]) == 61
    assert report.to_dict()["plain_steps"] == report.plain_steps


def test_what_to_change_is_said_once() -> None:
    why = "a GradScaler has to see all gradients before the first update; use precision='bf16-mixed'"
    assert str(FusionReport("backward", 4, plain_steps={why: 3, "it rained": 1})).splitlines() == [
        "backward fusion: 0 updates of 4 parameters fused into 0 buckets over 0 steps",
        "  plain:    3 steps because a GradScaler has to see all gradients before the first update",
        "            1 steps because it rained",
        "  measured: nothing",
        "  try next: use precision='bf16-mixed'",
    ]


def test_two_streams_that_were_taken_off_point_to_fused_updates() -> None:
    tried = {Setting(False, 2, 2): 10.0, Setting(True, 2, 1, 1): 11.0}
    off = TwoStreamReport(3, {}, Setting(False, 2, 2), tried, 0, 0, 0)
    assert "fuse_updates=True" in off.what_to_try()[0]
    assert dataclasses.replace(off, setting=Setting(True, 2, 1, 1)).what_to_try() == []
    assert dataclasses.replace(off, fusion=FusionReport("backward")).what_to_try() == []
    alone = dataclasses.replace(off, tried_ms={})
    assert "one thread" in alone.what_stayed_plain()[0]
    assert alone.what_to_try() == []


def test_a_batch_that_is_not_split_says_what_would_let_it() -> None:
    report = BudgetReport(100, shapes=[shape(4)])
    assert report.what_stayed_plain() == [f"batch of 4 is not split: {REASON.format(4)}"]
    assert report.what_to_try() == ["rename 4"]
