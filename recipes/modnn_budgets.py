"""`modnn_budget_sweep`: real training inside budgets from 100 % of the ideal peak down to the floor.

Processor memory is the device and a disk the host. Every budget has a process of its own in which the kernel refuses
data bytes beyond it (RLIMIT_DATA); all processes of a network and one without a budget take turns, a block of steps
each.
"""

import tempfile
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from retime.recipes import charts
from retime.recipes import modnn_claims as claims
from retime.recipes.claims import Comparison, amount
from retime.recipes.measure import Spread, interleave, speedup, spread
from retime.recipes.modnn_processes import Worker, WorkerError, closing
from retime.recipes.recipe import Measured, Recipe, Tick
from retime.recipes.results import Point, Result, Row
from retime.recipes.schema import MemorySettings

MIB = 2**20
WORKER = "retime.recipes.modnn_budget_worker"
UNLIMITED, GIVING_BACK, FLOOR = "unlimited", "unlimited, freed memory given back", "floor"
STEP, PREDICTED, MEASURED, MOVED, DIFFERENCE = (
    "step",
    "predicted peak",
    "measured peak",
    "moved a step",
    "weights differ",
)
BUDGET = "budget"


class Budgets(Recipe[MemorySettings]):
    """A point a network; a variant a budget."""

    axes = ("cases",)
    quantity = STEP

    def points(self, settings: MemorySettings) -> list[dict[str, Any]]:
        for budget in settings.budgets:
            if budget != FLOOR and not (isinstance(budget, int | float) and budget > 0):
                raise ValueError(f"budgets has {budget!r}: give percents of the ideal peak, or {FLOOR!r}")
        return [{"network": name} for name in settings.cases]

    def detail(self, settings: MemorySettings, at: dict[str, Any]) -> dict[str, Any]:
        return {"network": settings.cases[at["network"]]}

    def blocks(self, settings: MemorySettings) -> int | None:
        return (len(settings.budgets) + 2) * (settings.rounds + settings.warmup_rounds)

    def references(self, point: Point) -> dict[str, str]:
        return {"speed over unlimited": UNLIMITED}

    def measure(self, settings: MemorySettings, at: dict[str, Any], tick: Tick) -> Measured:
        case = {"data": settings.data, "optimizer": settings.optimizer, **settings.cases[at["network"]]}
        host = f"disk:{tempfile.gettempdir()}" if settings.host == "disk:" else settings.host
        request = {**case, "seed": settings.seed, "host": host, "headroom_bytes": int(settings.headroom_mb * MIB)}
        planner = Worker(WORKER, {**request, "do": "plan"})
        planner.close()
        ideal, floor = (planner.ready[key] for key in ("ideal_bytes", "floor_bytes"))
        facts: dict[str, Any] = {
            "batch size": case["batch_size"],
            "parameters": planner.ready["parameters"],
            "ideal peak MiB": round(ideal / MIB, 2),
            "floor MiB": round(floor / MIB, 2),
            "ideal over floor": round(ideal / floor, 2),
            "refused": {},
            "plans": {},
            "out of memory": {},
        }
        rows: list[Row] = []
        workers: dict[str, Worker] = {}
        with closing(workers), tempfile.TemporaryDirectory(prefix="retime-weights-") as folder:
            for name, budget in _budgets(settings, ideal):
                train = {"do": "train", "budget_bytes": budget, "give_back": name != UNLIMITED}
                try:
                    workers[name] = Worker(WORKER, {**request, **train})
                except WorkerError as error:
                    _note_failure(facts, name, str(error))
                    continue
                if budget is not None:
                    rows.append(Row(name, BUDGET, "MiB", [workers[name].ready["budget_bytes"] / MIB]))
            blocks = {name: partial(self._block, worker, settings, name, facts) for name, worker in workers.items()}
            times = interleave(blocks, settings.rounds, settings.warmup_rounds, tick)
            for name, kept in times.items():
                if all(kept):  # it lived through all of them
                    rows += [Row(name, STEP, "ms", kept), *_end(workers[name], name, Path(folder), facts)]
        return Measured(rows, facts)

    def _block(self, worker: Worker, settings: MemorySettings, name: str, facts: dict[str, Any]) -> float:
        if name in facts["out of memory"]:
            return 0.0
        try:
            answer = worker.ask({"do": "block", "steps": settings.steps})
        except WorkerError as error:
            _note_failure(facts, name, str(error), training=True)
            return 0.0
        return spread(answer["ms"]).median

    def compare(self, result: Result) -> list[Comparison]:
        lines = []
        for share, target in (("50 %", claims.SLOWDOWN_50), ("25 %", claims.SLOWDOWN_25)):
            for point in result.points:
                slower = slowdown(point, share)
                refused = "" if slower else _why_missing(point, share)
                lines.append(Comparison(target, slower, f"{point.at['network']}{refused}"))
        for point in result.points:
            if "VGG" in point.at["network"]:
                trained = [point.values(name, BUDGET)[0] for name in budgets_of(point)]
                ratio = point.facts["ideal peak MiB"] / min(trained) if trained else 0.0
                remark = f"{point.at['network']}, batch {point.facts['batch size']}, trained"
                lines.append(Comparison(claims.SMALLEST_BUDGET, spread([ratio]), remark))
        for point in result.points:
            names = budgets_of(point)
            if names:
                error, where = max((abs(prediction_error(point, name)), name) for name in names)
                lines.append(Comparison(claims.PREDICTION_ERROR, spread([error]), f"{point.at['network']}, at {where}"))
            failed = point.facts["out of memory"]
            lines.append(Comparison(claims.OUT_OF_MEMORY, spread([len(failed)]), _listed(point, failed)))
            for target, split in ((claims.OFFLOAD_DIFFERENCE, False), (claims.SPLIT_DIFFERENCE, True)):
                kind = [n for n in names if (point.facts["plans"][n]["sub_batch"] < point.facts["batch size"]) is split]
                if kind:
                    worst = max(point.values(name, DIFFERENCE)[0] for name in kind)
                    lines.append(Comparison(target, spread([worst]), f"{point.at['network']}, {', '.join(kind)}"))
        return lines

    def notes(self, result: Result) -> list[str]:
        lines = [
            "Peaks are the process's peak resident size above the same process before it built the model, while it "
            "trains; so is the budget to which RLIMIT_DATA holds the process, enforced by the kernel from the first "
            "step on. Planning comes before: it runs parts of the batch on copies of the model, and is held to "
            "nothing. The ideal peak is predicted: tensors and what operations need for themselves. 'unlimited' is "
            "plain torch with the C library's own way to keep freed memory; budgets make it give freed memory back, "
            "which costs time.",
            "Weights differ: norm of the difference of all weights over their norm.",
            "The floor's budget is a little more than the floor, as two calibrations differ by a little: the floor "
            "that refusals name is asked for until there is none.",
        ]
        for point in result.points:
            for name, plan in point.facts["plans"].items():
                lines.append(
                    f"- {point.at['network']}, {name}: {plan['plan']}; predicted {plan['predicted_slowdown']:.2f} x "
                    f"the unlimited time; peak {amount(prediction_error(point, name), '%')} from the predicted one; "
                    f"planned in {plan['planning_s']:.1f} s"
                )
            for name, why in point.facts["refused"].items():
                lines.append(f"- {point.at['network']}, {name}: refused before the first step: {why}")
        return lines

    def draw(self, result: Result, path: Path) -> None:
        drawing, panels = charts.panels(result.title, 2, width=12.0)
        for index, point in enumerate(result.points):
            network, names = point.at["network"], budgets_of(point)
            if not names:
                continue
            shares = [100 * point.values(name, BUDGET)[0] / point.facts["ideal peak MiB"] for name in names]
            slower = [slowdown(point, name) for name in names]
            known = [(place, value) for place, value in zip(shares, slower, strict=True) if value is not None]
            label = (
                f"{point.at['network']} ({point.facts['batch size']}), ideal {point.facts['ideal peak MiB']:.0f} MiB"
            )
            places, values = [place for place, _ in known], [value for _, value in known]
            charts.points_with_spread(panels[0], places, values, label, index, line=True)
            ratios = [point.values(n, MEASURED)[0] / point.values(n, BUDGET)[0] for n in names]
            panels[1].plot(shares, ratios, "o-", color=charts.COLOURS[index], label=f"{network}, measured")
            ratios = [point.values(n, PREDICTED)[0] / point.values(n, BUDGET)[0] for n in names]
            panels[1].plot(
                shares, ratios, "x--", color=charts.COLOURS[index], label=f"{point.at['network']}, predicted"
            )
        for axes in panels:
            axes.set_xscale("log")
            axes.invert_xaxis()
            axes.set_xlabel("budget (% of the ideal peak)")
            axes.set_xticks([100, 50, 25, 10, 5], ["100", "50", "25", "10", "5"])
        charts.even_line(panels[0], "unlimited")
        charts.even_line(panels[1], "budget")
        panels[0].set_ylabel("step time over unlimited")
        panels[1].set_ylabel("peak over budget")
        panels[0].legend(fontsize=8)
        panels[1].legend(fontsize=8)
        charts.save(drawing, path)


def budgets_of(point: Point) -> list[str]:
    """The budgets within which it trained."""
    return [name for name in point.variants(STEP) if name not in (UNLIMITED, GIVING_BACK)]


def slowdown(point: Point, name: str) -> Spread | None:
    """Step time over the unlimited step's, in each round."""
    if not point.has(name, STEP) or not point.has(UNLIMITED, STEP):
        return None
    return speedup(point.values(name, STEP), point.values(UNLIMITED, STEP))


def prediction_error(point: Point, name: str) -> float:
    """The measured peak away from the predicted one, in percent."""
    return 100 * (point.values(name, MEASURED)[0] / point.values(name, PREDICTED)[0] - 1)


def _budgets(settings: MemorySettings, ideal: int) -> list[tuple[str, int | str | None]]:
    wanted = settings.budgets
    return [
        *((name, None) for name in (UNLIMITED, GIVING_BACK)),
        *((FLOOR, FLOOR) if budget == FLOOR else (f"{budget:g} %", int(budget / 100 * ideal)) for budget in wanted),
    ]


def _note_failure(facts: dict[str, Any], name: str, error: str, *, training: bool = False) -> None:
    refused = not training and error.startswith("BudgetError")
    facts["refused" if refused else "out of memory"][name] = error


def _end(worker: Worker, name: str, folder: Path, facts: dict[str, Any]) -> list[Row]:
    """What a process held and moved, and how far its weights are from those of the unlimited process."""
    place = folder / f"{name}.pt"
    answer = worker.ask({"do": "end", "weights": str(place)})
    rows = [Row(name, MEASURED, "MiB", [answer["measured_bytes"] / MIB])]
    facts["measured by"] = answer["source"]
    if "plan" not in answer:
        return rows
    keys = ("plan", "sub_batch", "offloaded", "predicted_slowdown", "replanned")
    facts["plans"][name] = {**{key: answer[key] for key in keys}, "planning_s": round(worker.ready["planning_s"], 2)}
    reference, weights = (torch.load(each) for each in (folder / f"{UNLIMITED}.pt", place))
    ours, theirs = (torch.cat([each.flatten() for each in some]) for some in (weights, reference))
    away = float((ours - theirs).norm() / theirs.norm())
    return [
        *rows,
        Row(name, PREDICTED, "MiB", [answer["predicted_bytes"] / MIB]),
        Row(name, MOVED, "MiB", [answer["moved_bytes"] / MIB]),
        Row(name, DIFFERENCE, "", [away]),
    ]


def _listed(point: Point, names: Iterable[str]) -> str:
    return ": ".join([str(point.at["network"]), *([", ".join(names)] if names else [])])


def _why_missing(point: Point, name: str) -> str:
    for key in ("refused", "out of memory"):
        if name in point.facts[key]:
            return f": {key}"
    return ": not asked for"
