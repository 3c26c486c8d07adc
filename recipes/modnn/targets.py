"""`modnn_targets`: what this project wants of training inside a byte budget, each row with its own measurement.

A case is of a kind, and a function a kind measures it (:data:`KINDS`).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields, replace
from itertools import cycle
from pathlib import Path
from statistics import fmean
from typing import Any

from retime.foundations.measure import spread
from retime.foundations.workers import WorkerError, answer_once
from retime.recipes.core import charts
from retime.recipes.core.claims import Comparison, Target, amount
from retime.recipes.core.recipe import Measured, Recipe, Tick
from retime.recipes.core.results import Point, Result, Row, titled
from retime.recipes.modnn import side_by_side as runs
from retime.recipes.modnn.budget_worker import Server
from retime.recipes.modnn.networks import plan_dry
from retime.recipes.modnn.settings import MemorySettings, claim, target
from retime.recipes.modnn.side_by_side import BUDGET, FLOOR, GIVING_BACK, MEASURED, MIB, MOVED, PREDICTED, STEP

OURS, VDNN = "moDNN, the budget of vDNN ({})", "vDNN ({})"
PLANNING, FIRST, AGAIN = "profile and plan", "extra memory, first time", "extra memory, again"
TRAINED = "trained"
# The floor counts what a step needs, the kernel's limit also what the C library's heap leaves unused; and the floor of
# one process can lie a little above that of another.
_ABOVE_FLOOR = (1.0, 1.05, 1.1, 1.25, 1.5)

Case = dict[str, Any]
"""A case of the experiment file; `network` is the block of the network that the point is about, if it is about one."""


def training(settings: MemorySettings, case: Case, tick: Tick) -> Measured:
    """Side by side without a budget and inside each of `budgets`."""
    return Measured(*runs.side_by_side(settings, case["network"], case["budgets"], tick))


def smallest(settings: MemorySettings, case: Case, tick: Tick) -> Measured:
    """The smallest budget in which a network trains, and its ideal peak; no rows if none near the floor does."""
    with runs.network_for(settings, case["network"]) as network:
        plan = network.plan()
        tick("planned")
        facts: dict[str, Any] = {"ideal peak MiB": plan["ideal_bytes"] / MIB, **{kind: {} for kind in runs.FAILURES}}
        for share in _ABOVE_FLOOR:
            try:
                step_ms, ready, end = network.trained(int(share * plan["floor_bytes"]))
            except WorkerError as error:
                facts[runs.failure(error)][f"{share:g} x the floor"] = str(error)
                continue
            rows = [
                Row(FLOOR, BUDGET, "MiB", [ready["budget_bytes"] / MIB]),
                Row(FLOOR, STEP, "ms", step_ms),
                Row(FLOOR, PREDICTED, "MiB", [end["predicted_bytes"] / MIB]),
                Row(FLOOR, MEASURED, "MiB", [end["measured_bytes"] / MIB]),
            ]
            return Measured(rows, {**facts, "plan": end["plan"]})
    return Measured([], facts)


def random_budgets(settings: MemorySettings, case: Case, tick: Tick) -> Measured:
    """Networks, batch sizes and budgets drawn from the seed; budgets log-uniformly from the floor to the ideal peak."""
    draw = random.Random(settings.seed)
    limited = replace(settings, limit=case["limit"])
    plans: dict[tuple[str, int], dict[str, Any]] = {}
    rows: list[Row] = []
    outcomes: dict[str, str] = {}
    for number in range(1, case["draws"] + 1):
        name, share, place = draw.choice(case["networks"]), draw.choice(case["batches"]), draw.random()
        block = settings.networks[name]
        batch_size = max(2, round(share * block["batch_size"]))
        with runs.network_for(limited, {**block, "batch_size": batch_size}) as network:
            if (name, batch_size) not in plans:
                plans[name, batch_size] = network.plan()
            ideal, floor = (plans[name, batch_size][key] for key in ("ideal_bytes", "floor_bytes"))
            budget = int(floor * (max(ideal, floor) / floor) ** place)
            label = f"{number}: {name}, batch {batch_size}, {100 * budget / ideal:.0f} % of the ideal peak"
            rows.append(Row(label, BUDGET, "MiB", [budget / MIB]))
            try:
                _, _, end = network.trained(budget)
            except WorkerError as error:
                outcomes[label] = f"{runs.failure(error)}: {error}"
            else:
                outcomes[label] = TRAINED
                rows.append(Row(label, PREDICTED, "MiB", [end["predicted_bytes"] / MIB]))
                rows.append(Row(label, MEASURED, "MiB", [end["measured_bytes"] / MIB]))
        tick(label)
    limit = case["limit"] if settings.hardware.device == "cpu" else None
    return Measured(rows, {"limit from": limit, "steps": settings.steps, "outcomes": outcomes})


def refusal(settings: MemorySettings, case: Case, tick: Tick) -> Measured:
    """A budget of `share` of the floor: what the refusal says, whether that is so, and what was trained before it."""
    with runs.network_for(settings, case["network"]) as network:
        request = {**network.request, "do": "refuse", "share": case["share"]}
        return Measured([], answer_once(Server, request, settings.timeout_s))


def traffic(settings: MemorySettings, case: Case, tick: Tick) -> Measured:
    """Bytes moved a step by vDNN's `rules`, and by a plan for the budget that each of them turned out to need."""
    rows: list[Row] = []
    facts: dict[str, Any] = {**{kind: {} for kind in runs.FAILURES}, "plans": {}}
    with runs.network_for(settings, case["network"]) as network:
        for rule in case["rules"]:
            name, ours = VDNN.format(rule), OURS.format(rule)
            budget: int | None = None
            for label in (name, ours):
                try:
                    step_ms, _, end = network.trained(budget, **({"rule": rule} if label == name else {}))
                except WorkerError as error:
                    facts[runs.failure(error)][label] = str(error)
                    break
                tick(label)
                budget = end["measured_bytes"]
                facts["plans"][label] = end.get("plan", f"whole batch, {rule}")
                rows += [
                    Row(label, STEP, "ms", step_ms),
                    Row(label, MOVED, "MiB", [end["moved_bytes"] / MIB]),
                    Row(label, MEASURED, "MiB", [end["measured_bytes"] / MIB]),
                ]
    return Measured(rows, facts)


def planning(settings: MemorySettings, case: Case, tick: Tick) -> Measured:
    """Seconds and memory that a large network's profile and plan take, on tensors without memory."""
    network = dict(case["network"])
    request = {
        **{"optimizer": network.pop("optimizer", settings.optimizer), "seed": settings.seed, "share": case["share"]},
        **{"sub_batches": network.pop("sub_batches", True), "network": network},
    }
    answers = []
    for number in range(settings.rounds):
        answers.append(answer_once(plan_dry, request, settings.timeout_s))
        tick(f"round {number + 1}")
    facts = {
        **{"batch size": network["batch_size"], "plan": answers[-1]["plan"], "budget of the peak": case["share"]},
        **{f"{key} GiB": answers[-1][f"{key}_bytes"] / 2**30 for key in ("peak", "floor")},
    }
    rows = [Row("this machine", PLANNING, "s", [answer["seconds"] for answer in answers])]
    for name, key in ((FIRST, "first_bytes"), (AGAIN, "again_bytes")):
        rows.append(Row("this machine", name, "MiB", [answer[key] / MIB for answer in answers]))
    return Measured(rows, facts)


KINDS: dict[str, Callable[[MemorySettings, Case, Tick], Measured]] = {
    "training": training,
    "smallest": smallest,
    "random": random_budgets,
    "refusal": refusal,
    "traffic": traffic,
    "planning": planning,
}
_GENERAL = tuple(field.name for field in fields(MemorySettings))
_MARKERS = (("o", False), ("D", True), ("s", False), ("^", True))
"""Of a case: the marker, and whether it is filled."""
_SEVERAL = len(charts.COLOURS) - 1
"""Black, for a case that is about several networks at once."""


class Targets(Recipe[MemorySettings]):
    """A point a case and network; a case without a network of its own draws some."""

    axes = ("cases", "networks")
    quantity = STEP

    def points(self, settings: MemorySettings) -> list[dict[str, Any]]:
        points: list[dict[str, Any]] = []
        for name, case in settings.cases.items():
            if case.get("kind") not in KINDS:
                raise ValueError(f"cases.{name}.kind={case.get('kind')!r} is unknown: choose {', '.join(KINDS)}")
            unknown = [network for network in case["networks"] if network not in settings.networks]
            if unknown:
                raise ValueError(f"cases.{name}.networks has {unknown[0]!r}, but networks has no such entry: add one")
            if case["kind"] == "random":
                points.append({"case": name})
            elif case["kind"] != "planning" or settings.hardware.device == "cpu":  # a CPU plans, whatever the device
                points += [{"case": name, "network": network} for network in case["networks"]]
        return points

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
        training = kinds["training"]
        # an offload-only case is about weights
        timed = [point for point in training if point.settings["case"].get("times") is not False]
        missing = [run for point in training for run in runs.untrained(point, point.settings["case"]["budgets"])]
        return [
            *_prediction(kinds),
            *(line for point in kinds["random"] for line in _random(point)),
            *_within(kinds),
            *_refusals(kinds["refusal"]),
            *runs.slowdowns(timed),
            *(line for point in timed for line in runs.over_best_peers(point)),
            *_alone(training),
            *_smallest(kinds["smallest"]),
            *_traffic(kinds["traffic"]),
            *_planning(kinds["planning"]),
            *runs.differences(training, missing),
        ]

    def notes(self, result: Result) -> list[str]:
        lines = [
            f"{runs.MEMORY} 'Limit from planning' means from before the model was built, when no plan is followed yet. "
            "A run that was refused counts as not trained.",
            f"{runs.POOL} Slowdowns leave out a round of warm-up.",
            runs.REVERSED,
            "vDNN is its rule executed for real on this machine: the batch stays whole, and what all layers save, or "
            "what convolutions read, leaves and comes back one ahead of its use. Ours then gets as its budget what "
            "that run turned out to need.",
            "Profile and plan is a dry run of the step on tensors without memory and the search for a plan. Not in it: "
            "the probe for sub-batches and the calibration, which run parts of the batch. Extra memory is what the "
            "process grows by at its peak meanwhile: the first time with the code that is loaded for it, which a "
            "process has once, and again for the same network.",
            "A refusal counts if weights are as before, the operation and the layer that its message names exist, it "
            "says what would help, and a step then trains in the floor that it names.",
            "vDNN's resident peak leaves out what an operation allocates and never touches, as batch norm's backward "
            "pass does on a CPU; a limit of data bytes counts it, and so do our floors.",
        ]
        for point in result.points:
            network = point.at.get("network", "")
            lines += runs.plans_and_failures(point, ", ".join(filter(None, [point.at["case"], network])))
            for label, outcome in point.facts.get("outcomes", {}).items():
                if outcome != TRAINED:
                    lines.append(f"- {point.at['case']}, {label}: {outcome}")
            if "message" in point.facts:
                lines.append(f"- {network} below its floor: {point.facts['message']}")
                lines.append(f"- {network} at the floor that this names: {point.facts['at the floor it names']}")
        return lines

    def draw(self, result: Result, path: Path) -> None:
        drawing, (peaks, times) = charts.panels(titled(result), 2, width=14.0, height=5.0)
        drawn = [point for point in result.points if point.facts["kind"] in ("training", "random")]
        networks = sorted({point.at["network"] for point in drawn if "network" in point.at})
        cases = sorted({point.at["case"] for point in drawn})
        for point in drawn:
            marker, filled = _MARKERS[cases.index(point.at["case"]) % len(_MARKERS)]
            index = networks.index(point.at["network"]) if "network" in point.at else _SEVERAL
            names = [name for name in point.variants(PREDICTED) if point.has(name, BUDGET) or name == GIVING_BACK]
            predicted = [point.values(name, PREDICTED)[0] for name in names]
            ratios = [point.values(name, MEASURED)[0] / point.values(name, PREDICTED)[0] for name in names]
            colour = charts.COLOURS[index % len(charts.COLOURS)]
            face, above = (colour, 2) if filled else ("none", 3)
            peaks.plot(predicted, ratios, marker, color=colour, markerfacecolor=face, zorder=above)
            shares = [name for name in runs.budgets_of(point) if name != FLOOR]
            slower = {float(name.rstrip(" %")): value for name in shares if (value := runs.slowdown(point, name))}
            look: dict[str, Any] = {"line": True, "marker": marker, "filled": filled}
            charts.points_with_spread(times, list(slower), list(slower.values()), None, index, **look)
        peaks.axhspan(0.95, 1.05, color=charts.GREY, alpha=0.2, label="within 5 %")
        peaks.set_xscale("log")
        charts.plain_numbers(peaks.xaxis)
        peaks.set_xlabel("predicted peak (MiB)")
        peaks.set_ylabel("measured peak over predicted")
        times.set_xlabel("budget (% of the ideal peak)")
        times.set_ylabel("step time over the fastest unlimited")
        charts.even_line(times, "fastest unlimited")
        # beside the charts: colours are networks, markers are cases
        colours = [charts.colour_key(*pair) for pair in zip(networks, cycle(charts.COLOURS), strict=False)]
        markers = [
            charts.marker_key(name, marker, charts.COLOURS[_SEVERAL], filled=filled)
            for name, (marker, filled) in zip(cases, cycle(_MARKERS), strict=False)
        ]
        others = [entry for axes in (peaks, times) for entry in axes.get_legend_handles_labels()[0]]
        drawing.legend(handles=colours, title="network", fontsize=8, loc="outside right upper")
        drawing.legend(handles=[*markers, *others], title="case", fontsize=8, loc="outside right lower")
        charts.save(drawing, path)


def _prediction(kinds: dict[str, list[Point]]) -> Iterator[Comparison]:
    """A line a network over its budgets, then one each for the plain step and for budgets of other cases."""
    training = kinds["training"]
    for network in dict.fromkeys(point.at["network"] for point in training):
        own = [point for point in training if point.at["network"] == network]
        errors = {
            f"{name} ({point.at['case']})": runs.prediction_error(point, name)
            for point in own
            for name in runs.budgets_of(point)
        }
        missing = [run for point in own for run in runs.untrained(point, point.settings["case"]["budgets"])]
        yield _worst(errors, network, missing)
    plain = {
        f"{point.at['network']} ({point.at['case']})": runs.prediction_error(point, GIVING_BACK)
        for point in training
        if point.has(GIVING_BACK, MEASURED)
    }
    if plain:
        yield _worst(plain, f"{GIVING_BACK}, no plan")
    for point in kinds["random"]:
        errors = {name: runs.prediction_error(point, name) for name in point.variants(PREDICTED)}
        good = sum(target("prediction-error").met(abs(error)) for error in errors.values())
        worst = sorted(errors.items(), key=lambda run: -abs(run[1]))[:1]
        wanted = amount(target("prediction-error").value, "%")
        yield _worst(dict(worst), f"{point.at['case']}, {good} of {len(errors)} that trained within {wanted}; most")
    for point in kinds["smallest"]:
        errors = {name: runs.prediction_error(point, name) for name in point.variants(PREDICTED)}
        yield _worst(errors, f"{point.at['network']} ({point.at['case']})", [] if errors else [FLOOR])


def _worst(errors: dict[str, float], what: str, missing: Sequence[str] = ()) -> Comparison:
    listed = [f"{name} {amount(error, '%')}" for name, error in errors.items()]
    most = spread([max(abs(error) for error in errors.values())]) if errors else None
    return Comparison(target("prediction-error"), most, f"{what}: {runs.with_missing(listed, missing)}")


def _random(point: Point) -> Iterator[Comparison]:
    outcomes = point.facts["outcomes"]
    trained = [label for label, outcome in outcomes.items() if outcome == TRAINED]
    died = [label for label, outcome in outcomes.items() if outcome.startswith("out of memory")]
    over = [label for label in trained if point.values(label, MEASURED)[0] > point.values(label, BUDGET)[0]]
    limit = point.facts["limit from"]
    where = f"limit from {limit} on" if limit else "no limit of memory on a GPU"
    wanted = Target("runs at a random budget that trained", "runs", len(outcomes))
    yield Comparison(wanted, spread([len(trained)]), where)
    wanted = Target("runs at a random budget that trained with a measured peak inside it", "runs", len(outcomes))
    remark = "; ".join([f"{len(trained)} trained", *([f"over their budgets: {', '.join(over)}"] if over else [])])
    yield Comparison(wanted, spread([len(trained) - len(over)]), remark)
    yield Comparison(target("out-of-memory"), spread([len(died)]) if limit else None, where)


def _within(kinds: dict[str, list[Point]]) -> Iterator[Comparison]:
    for kind in ("training", "random", "smallest"):
        shares = {
            ", ".join([*([str(point.at["network"])] if "network" in point.at else []), name]): (
                point.values(name, MEASURED)[0] / point.values(name, BUDGET)[0]
            )
            for point in kinds[kind]
            for name in point.variants(MEASURED)
            if point.has(name, BUDGET)
        }
        if shares:
            worst = max(shares, key=lambda run: shares[run])
            inside = sum(share <= 1 for share in shares.values())
            remark = f"{kind}, {inside} of {len(shares)} that trained are inside; most: {worst}"
            yield Comparison(target("within-budget"), spread([shares[worst]]), remark)


def _refusals(points: list[Point]) -> Iterator[Comparison]:
    if not points:
        return
    lacking, good = [], 0
    for point in points:
        missing = [f"{point.at['network']} lacks {part}" for part, there in point.facts["said"].items() if not there]
        if not point.facts["weights unchanged"] or point.facts["steps before"]:
            missing.append(f"{point.at['network']} was trained before the refusal")
        good += not missing
        lacking += missing
    remark = "; ".join(lacking) or ", ".join(point.at["network"] for point in points)
    yield Comparison(target("refusals"), spread([100 * good / len(points)]), remark)


def _alone(points: list[Point]) -> Iterator[Comparison]:
    """Figures 13 and 14: sub-batches of one sample, by hand, and offloading alone at its floor, over the plain step."""
    whole = [point for point in points if point.settings["case"].get("network", {}).get("sub_batches") is False]
    cut = runs.IN_SUB_BATCHES.format(1)
    for technique, name, those in (("sub-batches", cut, points), ("offloading", FLOOR, whole)):
        alone = {point.at["network"]: point for point in those if point.has(name, STEP)}
        if not alone:
            continue
        smaller = {net: point.facts["ideal peak MiB"] / point.values(name, MEASURED)[0] for net, point in alone.items()}
        slower = {net: value for net, point in alone.items() if (value := runs.slowdown(point, name))}
        average = [fmean(rounds) for rounds in zip(*(value.rounds for value in slower.values()), strict=True)]
        published = claim(f"figure-14-{technique}")
        added = [100 * (ratio - 1) if published.unit == "%" else ratio for ratio in average]
        memory = ", ".join(f"{net} {amount(value, 'x')}" for net, value in smaller.items())
        times = ", ".join(f"{net} {amount(value.median, 'x')}" for net, value in slower.items())
        less = spread([fmean(smaller.values())])
        yield Comparison(claim(f"figure-13-{technique}"), less, f"{name}: {memory}")
        yield Comparison(published, spread(added), f"{name}: {times}")


def _smallest(points: list[Point]) -> Iterator[Comparison]:
    for point in points:
        network = point.at["network"]
        if not point.has(FLOOR, MEASURED):
            yield Comparison(target("smallest-budget"), None, f"{network}: did not train near its floor")
            continue
        budget, peak = (amount(point.values(FLOOR, quantity)[0], "MiB") for quantity in (BUDGET, MEASURED))
        yield Comparison(
            target("smallest-budget"),
            spread([point.facts["ideal peak MiB"] / runs.needed_mib(point, FLOOR)]),
            f"{network}: trained in {budget}, of which it held {peak}; the larger counts; {point.facts['plan']}",
        )


def _traffic(points: list[Point]) -> Iterator[Comparison]:
    for point in points:
        network = point.at["network"]
        for rule in point.settings["case"]["rules"]:
            ours, theirs = OURS.format(rule), VDNN.format(rule)
            lacking = next((name for name in (theirs, ours) if not point.has(name, MOVED)), None)
            if lacking:
                why = runs.why_missing(point, lacking)
                yield Comparison(target("moved-share"), None, f"{network}, {lacking}{why}")
                continue
            (moved, most), (peak, budget) = (
                [point.values(name, quantity)[0] for name in (ours, theirs)] for quantity in (MOVED, MEASURED)
            )
            yield Comparison(
                target("moved-share"),
                spread([100 * moved / most]),
                f"{network}, {theirs}: {amount(moved, 'MiB')} in {amount(peak, 'MiB')} against "
                f"{amount(most, 'MiB')} in {amount(budget, 'MiB')}",
            )


def _planning(points: list[Point]) -> Iterator[Comparison]:
    for point in points:
        (name,) = point.variants(PLANNING)
        where = f"{point.at['network']}, batch {point.facts['batch size']}"
        yield Comparison(target("planning-time"), point.spread(name, PLANNING), where)
        for quantity, what in ((FIRST, "the first time, with code it loads"), (AGAIN, "the second time")):
            extra = point.values(name, quantity)
            share = [100 * value / (1024 * point.facts["peak GiB"]) for value in extra]
            remark = f"{where}: {amount(spread(extra).median, 'MiB')} {what}"
            yield Comparison(target("planning-memory"), spread(share), remark)
