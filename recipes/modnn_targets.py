"""`modnn_targets`: what this project wants of training inside a byte budget, each row with its own measurement."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from retime.recipes import charts
from retime.recipes import modnn_claims as claims
from retime.recipes.claims import Comparison, Target, amount
from retime.recipes.measure import spread
from retime.recipes.modnn_side_by_side import (
    BUDGET,
    DIFFERENCE,
    FLOOR,
    GIVING_BACK,
    MEASURED,
    MOVED,
    PREDICTED,
    STEP,
    budgets_of,
    prediction_error,
    slowdown,
    why_missing,
)
from retime.recipes.modnn_target_kinds import EXTRA, KINDS, OURS, PLANNING, TRAINED, VDNN
from retime.recipes.modnn_vdnn import ALL, CONVOLUTIONS
from retime.recipes.recipe import Measured, Recipe, Tick
from retime.recipes.results import Point, Result
from retime.recipes.schema import MemorySettings

_GENERAL = tuple(field.name for field in fields(MemorySettings))


class Targets(Recipe[MemorySettings]):
    """A point a case and network; a case without a network of its own draws some."""

    axes = ("cases", "networks")
    quantity = STEP

    def points(self, settings: MemorySettings) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        for name, case in settings.cases.items():
            if case.get("kind") not in KINDS:
                raise ValueError(f"cases.{name}.kind={case.get('kind')!r} is unknown: choose {', '.join(KINDS)}")
            unknown = [network for network in case["networks"] if network not in settings.networks]
            if unknown:
                raise ValueError(f"cases.{name}.networks has {unknown[0]!r}, but networks has no such entry: add one")
            if case["kind"] == "random":
                found.append({"case": name})
            else:
                found += [{"case": name, "network": network} for network in case["networks"]]
        return found

    def detail(self, settings: MemorySettings, at: dict[str, Any]) -> dict[str, Any]:
        case = settings.cases[at["case"]]
        named = [at["network"]] if "network" in at else case["networks"]
        kept = {key: value for key, value in case.items() if key != "networks"}
        return {"case": kept, "networks": {name: settings.networks[name] for name in named}}

    def measure(self, settings: MemorySettings, at: dict[str, Any], tick: Tick) -> Measured:
        case = dict(settings.cases[at["case"]])
        own = {key: case[key] for key in case if key in _GENERAL and key not in ("networks", "budgets")}
        if "network" in at:
            case["network"] = {**settings.networks[at["network"]], **case.get("network", {})}
        measured = KINDS[case["kind"]](replace(settings, **own), case, tick)
        return Measured(measured.rows, {"kind": case["kind"], **measured.facts})

    def compare(self, result: Result) -> list[Comparison]:
        kinds: dict[str, list[Point]] = {kind: [] for kind in KINDS}
        for point in result.points:
            kinds[point.facts["kind"]].append(point)
        return [
            *_prediction(kinds["training"]),
            *(line for point in kinds["random"] for line in _random(point)),
            *_refusals(kinds["refusal"]),
            *_slowdowns(kinds["training"]),
            *_smallest(kinds["smallest"]),
            *_traffic(kinds["traffic"]),
            *_planning(kinds["planning"]),
            *_weights(kinds["training"]),
        ]

    def notes(self, result: Result) -> list[str]:
        lines = [
            "Memory is the process's peak resident size above the same process before it built the model. Under "
            "RLIMIT_DATA the kernel refuses every data byte beyond the budget and headroom_mb, from the first step on; "
            "'limit from planning' means from before the model was built. Each process has done all of it once before, "
            "without a limit: code that oneDNN generates and what Python keeps do not count, and under a limit from "
            "training on that rehearsal's plan is followed. A run that was refused counts as not trained.",
            "vDNN is its rule executed for real on this machine: the batch stays whole, and what all layers save, or "
            "what convolutions read, leaves and comes back one ahead of its use. Ours then gets as its budget what "
            "that run turned out to need.",
            "Profile and plan is a dry run of the step on tensors without memory and the search for a plan. Not in it: "
            "the probe for sub-batches and the calibration, which run parts of the batch.",
        ]
        for point in result.points:
            network = point.at.get("network", "")
            for name, plan in point.facts.get("plans", {}).items():
                text = plan["plan"] if isinstance(plan, dict) else plan
                lines.append(f"- {point.at['case']}, {network}, {name}: {text}")
            for kind in ("refused", "out of memory", "failed"):
                lines += [
                    f"- {point.at['case']}, {network}, {name}: {kind}: {why}"
                    for name, why in point.facts.get(kind, {}).items()
                ]
            for label, outcome in point.facts.get("outcomes", {}).items():
                if outcome != TRAINED:
                    lines.append(f"- {point.at['case']}, {label}: {outcome}")
            if "message" in point.facts:
                lines.append(f"- {network} below its floor: {point.facts['message']}")
        return lines

    def draw(self, result: Result, path: Path) -> None:
        drawing, (peaks, times) = charts.panels(result.title, 2, width=13.0, height=5.0)
        for index, point in enumerate(p for p in result.points if p.facts["kind"] in ("training", "random")):
            names = [name for name in point.variants(PREDICTED) if point.has(name, BUDGET) or name == GIVING_BACK]
            label = f"{point.at['case']}, {point.at.get('network', 'drawn')}"
            colour = charts.COLOURS[index % len(charts.COLOURS)]
            predicted = [point.values(name, PREDICTED)[0] for name in names]
            ratios = [point.values(name, MEASURED)[0] / point.values(name, PREDICTED)[0] for name in names]
            peaks.plot(predicted, ratios, "o" if point.facts["kind"] == "training" else "x", color=colour, label=label)
            shares = [name for name in budgets_of(point) if name != FLOOR]
            slower = [(float(name.rstrip(" %")), value) for name in shares if (value := slowdown(point, name))]
            if slower:
                charts.points_with_spread(
                    times, [place for place, _ in slower], [value for _, value in slower], label, index, line=True
                )
        peaks.axhspan(0.95, 1.05, color=charts.GREY, alpha=0.2, label="within 5 %")
        peaks.set_xscale("log")
        peaks.set_xlabel("predicted peak (MiB)")
        peaks.set_ylabel("measured peak over predicted")
        times.set_xlabel("budget (% of the ideal peak)")
        times.set_ylabel("step time over unlimited")
        charts.even_line(times, "unlimited")
        for axes in (peaks, times):
            axes.legend(fontsize=7)
        charts.save(drawing, path)


def _prediction(points: list[Point]) -> Iterator[Comparison]:
    found = {}
    for point in points:
        names = [name for name in point.variants(PREDICTED) if point.has(name, MEASURED)]
        if names:
            found[f"{point.at['network']} ({point.at['case']})"] = max(abs(prediction_error(point, n)) for n in names)
    if found:
        listed = "; ".join(f"{name} {error:.1f} %" for name, error in found.items())
        yield Comparison(claims.PREDICTION_ERROR, spread([max(found.values())]), listed)


def _random(point: Point) -> Iterator[Comparison]:
    outcomes = point.facts["outcomes"]
    trained = [label for label, outcome in outcomes.items() if outcome == TRAINED]
    died = [label for label, outcome in outcomes.items() if outcome.startswith("out of memory")]
    where = f"limit from {point.facts['limit from']} on"
    target = Target("runs inside a random budget that trained", "runs", len(outcomes))
    yield Comparison(target, spread([len(trained)]), where)
    yield Comparison(claims.OUT_OF_MEMORY, spread([len(died)]), where)
    if trained:
        most = max(point.values(label, MEASURED)[0] / point.values(label, BUDGET)[0] for label in trained)
        yield Comparison(claims.WITHIN_BUDGET, spread([most]), "the worst of those that trained")


def _refusals(points: list[Point]) -> Iterator[Comparison]:
    if not points:
        return
    lacking, good = [], 0
    for point in points:
        missing = [part for part, there in point.facts["said"].items() if not there]
        good += not missing and point.facts["weights unchanged"] and not point.facts["steps before"]
        lacking += [f"{point.at['network']} lacks {part}" for part in missing]
    remark = "; ".join(lacking) or ", ".join(point.at["network"] for point in points)
    yield Comparison(claims.REFUSALS, spread([100 * good / len(points)]), remark)


def _slowdowns(points: list[Point]) -> Iterator[Comparison]:
    for name, target in (("50 %", claims.SLOWDOWN_50), ("25 %", claims.SLOWDOWN_25)):
        for point in points:
            if name in _asked_for(point):
                slower = slowdown(point, name)
                remark = point.at["network"] + ("" if slower else why_missing(point, name))
                yield Comparison(target, slower, remark)


def _asked_for(point: Point) -> list[str]:
    """Budgets of cases that time them: an offload-only case is about weights."""
    case = point.settings["case"]
    return [] if case.get("times") is False else [f"{budget} %" for budget in case["budgets"]]


def _smallest(points: list[Point]) -> Iterator[Comparison]:
    for point in points:
        ratio = point.facts["ideal peak MiB"] / point.values(FLOOR, BUDGET)[0]
        over = point.values(FLOOR, MEASURED)[0] / point.values(FLOOR, BUDGET)[0]
        yield Comparison(
            claims.SMALLEST_BUDGET,
            spread([ratio]),
            f"{point.at['network']}: trained in {amount(point.values(FLOOR, BUDGET)[0], 'MiB')}, of which it used "
            f"{100 * over:.0f} %; {point.facts['plan']}",
        )


def _traffic(points: list[Point]) -> Iterator[Comparison]:
    for point in points:
        for rule in (ALL, CONVOLUTIONS):
            ours, theirs = OURS.format(rule), VDNN.format(rule)
            if point.has(ours, MOVED):
                moved, most = point.values(ours, MOVED)[0], point.values(theirs, MOVED)[0]
                remark = (
                    f"{point.at['network']}, {theirs}: {amount(moved, 'MiB')} against {amount(most, 'MiB')} in "
                    f"{amount(point.values(theirs, MEASURED)[0], 'MiB')}"
                )
                yield Comparison(claims.MOVED_SHARE, spread([100 * moved / most]), remark)


def _planning(points: list[Point]) -> Iterator[Comparison]:
    for point in points:
        (name,) = point.variants(PLANNING)
        where = f"{point.at['network']}, batch {point.facts['batch size']}"
        yield Comparison(claims.PLANNING_TIME, spread(point.values(name, PLANNING)), where)
        share = [100 * value / (1024 * point.facts["peak GiB"]) for value in point.values(name, EXTRA)]
        remark = f"{where}: {amount(spread(point.values(name, EXTRA)).median, 'MiB')} of Python objects"
        yield Comparison(claims.PLANNING_MEMORY, spread(share), remark)


def _weights(points: list[Point]) -> Iterator[Comparison]:
    for target, split in ((claims.OFFLOAD_DIFFERENCE, False), (claims.SPLIT_DIFFERENCE, True)):
        found = {}
        for point in points:
            for name in point.variants(DIFFERENCE):
                if (point.facts["plans"][name]["sub_batch"] < point.facts["batch size"]) is split:
                    found[f"{point.at['network']} at {name}"] = point.values(name, DIFFERENCE)[0]
        if found:
            yield Comparison(target, spread([max(found.values())]), ", ".join(found))
