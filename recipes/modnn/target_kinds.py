"""How the rows of `modnn_targets` are measured: one function a kind of case."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from retime.foundations.workers import WorkerError, answer_once
from retime.recipes.core.recipe import Measured, Tick
from retime.recipes.core.results import Row
from retime.recipes.modnn.planning import serve as serve_planning
from retime.recipes.modnn.refusal import serve as serve_refusal
from retime.recipes.modnn.settings import MemorySettings
from retime.recipes.modnn.side_by_side import (
    BUDGET,
    FLOOR,
    MEASURED,
    MIB,
    MOVED,
    PREDICTED,
    STEP,
    failure,
    network_for,
    no_failures,
    side_by_side,
)

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
    return Measured(*side_by_side(settings, case["network"], case["budgets"], tick))


def smallest(settings: MemorySettings, case: Case, tick: Tick) -> Measured:
    """The smallest budget in which a network trains, and its ideal peak; no rows if none near the floor does."""
    with network_for(settings, case["network"]) as network:
        known = network.plan()
        tick("planned")
        facts: dict[str, Any] = {"ideal peak MiB": known["ideal_bytes"] / MIB, **no_failures()}
        rows: list[Row] = []
        for share in _ABOVE_FLOOR:
            try:
                step_ms, ready, end = network.trained(int(share * known["floor_bytes"]))
            except WorkerError as error:
                facts[failure(error)][f"{share:g} x the floor"] = str(error)
                continue
            rows = [
                Row(FLOOR, BUDGET, "MiB", [ready["budget_bytes"] / MIB]),
                Row(FLOOR, STEP, "ms", step_ms),
                Row(FLOOR, PREDICTED, "MiB", [end["predicted_bytes"] / MIB]),
                Row(FLOOR, MEASURED, "MiB", [end["measured_bytes"] / MIB]),
            ]
            facts["plan"] = end["plan"]
            break
    return Measured(rows, facts)


def random_budgets(settings: MemorySettings, case: Case, tick: Tick) -> Measured:
    """Networks, batch sizes and budgets drawn from the seed; budgets log-uniformly from the floor to the ideal peak."""
    draw = random.Random(settings.seed)
    limited = replace(settings, limit=case["limit"])
    known: dict[tuple[str, int], dict[str, Any]] = {}
    rows: list[Row] = []
    outcomes: dict[str, str] = {}
    for number in range(1, case["draws"] + 1):
        name, share, place = draw.choice(case["networks"]), draw.choice(case["batches"]), draw.random()
        block = settings.networks[name]
        batch_size = max(2, round(share * block["batch_size"]))
        with network_for(limited, {**block, "batch_size": batch_size}) as network:
            if (name, batch_size) not in known:
                known[name, batch_size] = network.plan()
            ideal, floor = (known[name, batch_size][key] for key in ("ideal_bytes", "floor_bytes"))
            budget = int(floor * (max(ideal, floor) / floor) ** place)
            label = f"{number}: {name}, batch {batch_size}, {100 * budget / ideal:.0f} % of the ideal peak"
            rows.append(Row(label, BUDGET, "MiB", [budget / MIB]))
            try:
                _, _, end = network.trained(budget)
            except WorkerError as error:
                outcomes[label] = f"{failure(error)}: {error}"
            else:
                outcomes[label] = TRAINED
                rows.append(Row(label, PREDICTED, "MiB", [end["predicted_bytes"] / MIB]))
                rows.append(Row(label, MEASURED, "MiB", [end["measured_bytes"] / MIB]))
        tick(label)
    return Measured(rows, {"limit from": case["limit"], "steps": settings.steps, "outcomes": outcomes})


def refusal(settings: MemorySettings, case: Case, tick: Tick) -> Measured:
    """A budget of `share` of the floor: what the refusal says, whether that is so, and what was trained before it."""
    with network_for(settings, case["network"]) as network:
        request = {**network.request, "share": case["share"]}
        return Measured([], answer_once(serve_refusal, request, settings.timeout_s))


def traffic(settings: MemorySettings, case: Case, tick: Tick) -> Measured:
    """Bytes moved a step by vDNN's `rules`, and by a plan for the budget that each of them turned out to need."""
    rows: list[Row] = []
    facts: dict[str, Any] = {**no_failures(), "plans": {}}
    with network_for(settings, case["network"]) as network:
        for rule in case["rules"]:
            name, ours = VDNN.format(rule), OURS.format(rule)
            budget: int | None = None
            for label in (name, ours):
                try:
                    more = {"rule": rule} if label == name else {}
                    step_ms, _, end = network.trained(budget, **more)
                except WorkerError as error:
                    facts[failure(error)][label] = str(error)
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
    rows: dict[str, list[float]] = {PLANNING: [], FIRST: [], AGAIN: []}
    answer: dict[str, Any] = {}
    for number in range(settings.rounds):
        answer = answer_once(serve_planning, request, settings.timeout_s)
        rows[PLANNING].append(answer.pop("seconds"))
        rows[FIRST].append(answer.pop("first_bytes") / MIB)
        rows[AGAIN].append(answer.pop("again_bytes") / MIB)
        tick(f"round {number + 1}")
    facts = {
        **{"batch size": network["batch_size"], "plan": answer["plan"], "budget of the peak": case["share"]},
        **{f"{key} GiB": answer[f"{key}_bytes"] / 2**30 for key in ("peak", "floor")},
    }
    units = {PLANNING: "s", FIRST: "MiB", AGAIN: "MiB"}
    return Measured([Row("this machine", name, units[name], values) for name, values in rows.items()], facts)


KINDS: dict[str, Callable[[MemorySettings, Case, Tick], Measured]] = {
    "training": training,
    "smallest": smallest,
    "random": random_budgets,
    "refusal": refusal,
    "traffic": traffic,
    "planning": planning,
}
