"""Figure 17 of moDNN for real: ranks inside a budget each, gradients reduced once a batch or after every sub-batch."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from retime.recipes import charts
from retime.recipes import modnn_claims as claims
from retime.recipes.claims import Comparison
from retime.recipes.measure import interleave, speedup, spread
from retime.recipes.modnn_processes import Worker, WorkerError, closing
from retime.recipes.modnn_rank_worker import EACH, ONCE, WHOLE, serve
from retime.recipes.modnn_side_by_side import DIFFERENCE, MIB, STEP, failure, network_for
from retime.recipes.recipe import Measured, Recipe, Tick
from retime.recipes.results import Point, Result, Row
from retime.recipes.schema import MemorySettings

ONE, REDUCED = "one process", "reduced a step"
REFUSED = "refused"
WAYS = (WHOLE, ONCE, EACH)


class Ranks(Recipe[MemorySettings]):
    """A point a network and a budget of each rank, in percent of what its share of the batch needs."""

    axes = ("cases", "budgets")
    quantity = STEP

    def points(self, settings: MemorySettings) -> list[dict[str, Any]]:
        return [{"network": name, "budget": float(share)} for name in settings.cases for share in settings.budgets]

    def detail(self, settings: MemorySettings, at: dict[str, Any]) -> dict[str, Any]:
        return {"network": settings.cases[at["network"]]}

    def blocks(self, settings: MemorySettings) -> int | None:
        return (len(WAYS) + 1) * (settings.rounds + settings.warmup_rounds)

    def references(self, point: Point) -> dict[str, str]:
        return {"speed over one process": ONE, "speed over every sub-batch": EACH}

    def measure(self, settings: MemorySettings, at: dict[str, Any], tick: Tick) -> Measured:
        case = settings.cases[at["network"]]
        with network_for(settings, {**case, "batch_size": case["batch_size"] // settings.devices}) as share:
            budget = int(at["budget"] / 100 * share.plan()["ideal_bytes"])
        workers: dict[str, Worker] = {}
        facts: dict[str, Any] = {"batch size": case["batch_size"], "ranks": settings.devices, "plans": {}}
        with network_for(settings, case) as network, closing(workers):
            workers[ONE] = network.process(None, give_back=False)
            planned: dict[str, Any] = {}
            for way in WAYS:
                request = {
                    **{**network.request, **planned, "do": "join", "way": way, "ranks": settings.devices},
                    **{"budget_bytes": budget, "rendezvous": str(network.folder / f"{way}.rendezvous")},
                }
                ranks = [Worker(serve, None, settings.timeout_s) for _ in range(settings.devices)]
                workers |= {f"{way} {rank}": worker for rank, worker in enumerate(ranks)}
                try:
                    ready = _together(ranks, [{**request, "rank": rank} for rank in range(settings.devices)])
                except WorkerError as error:
                    if failure(error) != REFUSED:
                        raise
                    return Measured([], {**facts, REFUSED: str(error)})
                facts["cores"] = ready[0].pop("cores")
                facts["plans"][way], planned = ready[0]["plan"], ready[0]
            blocks: dict[str, Callable[[], float]] = {
                way: partial(_block_ms, _of(workers, way), settings.steps) for way in (ONE, *WAYS)
            }
            times = interleave(blocks, settings.rounds, settings.warmup_rounds, tick)
            rows = [Row(way, STEP, "ms", kept) for way, kept in times.items()]
            rows += _ends(workers, network.folder)
        return Measured(rows, facts)

    def compare(self, result: Result) -> list[Comparison]:
        lines = []
        for point in _trained(result):
            where = f"{point.at['network']} with {point.facts['ranks']} ranks on {point.facts['cores']} cores"
            for way, claim in ((WHOLE, claims.FOUR_IDEAL), (ONCE, claims.FOUR_MODNN), (EACH, claims.FOUR_6_GB_NAIVE)):
                found = speedup(point.values(ONE, STEP), point.values(way, STEP))
                lines.append(Comparison(claim, found, f"{where}, {way}, {point.at['budget']:g} %: not four devices"))
            over = speedup(point.values(EACH, STEP), point.values(ONCE, STEP))
            lines.append(Comparison(claims.ONCE_OVER_EACH, over, f"{where}, {point.at['budget']:g} %"))
            away = max(point.values(way, DIFFERENCE)[0] for way in WAYS)
            lines.append(Comparison(claims.RANKS_DIFFERENCE, spread([away]), where))
        return lines

    def notes(self, result: Result) -> list[str]:
        lines = [
            "Ranks are processes of one core each that reduce gradients over gloo on this machine; DDP overlaps the "
            "last backward pass with it. The paper's naive way, one device that sums at the end, is not that of DDP: "
            "what is compared is a reduction a batch against one after every sub-batch."
        ]
        for point in result.points:
            if REFUSED in point.facts:
                lines.append(f"- {point.at['network']}, {point.at['budget']:g} %: {point.facts[REFUSED]}")
                continue
            plans = "; ".join(f"{way}: {plan}" for way, plan in point.facts["plans"].items())
            lines.append(f"- {point.at['network']}, {point.at['budget']:g} %: {plans}")
            if point.facts["cores"] < point.facts["ranks"]:
                lines.append("- the ranks shared cores, so nothing is said about speed")
        return lines

    def draw(self, result: Result, path: Path) -> None:
        drawing, axes = charts.figure(result.title)
        for index, way in enumerate(WAYS):
            values = [speedup(point.values(ONE, STEP), point.values(way, STEP)) for point in _trained(result)]
            places = [place + (index - 1) * 0.2 for place in range(len(values))]
            charts.points_with_spread(axes, places, values, way, index)
        names = [f"{point.at['network']}\n{point.at['budget']:g} %" for point in _trained(result)]
        axes.set_xticks(range(len(names)), names)
        axes.set_ylabel("speed over one process")
        axes.set_ylim(bottom=0)
        charts.even_line(axes, ONE)
        axes.legend(fontsize=8)
        charts.save(drawing, path)


def _trained(result: Result) -> list[Point]:
    return [point for point in result.points if REFUSED not in point.facts]


def _of(workers: dict[str, Worker], way: str) -> list[Worker]:
    return [worker for name, worker in workers.items() if name.startswith(way)]


def _together(ranks: list[Worker], requests: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Ask all before the first answers: each waits for the others."""
    for worker, request in zip(ranks, requests, strict=True):
        worker.tell(request)
    return [worker.answer() for worker in ranks]


def _block_ms(ranks: list[Worker], steps: int) -> float:
    answers = _together(ranks, [{"do": "block", "steps": steps}] * len(ranks))
    return max(spread(answer["ms"]).median for answer in answers)


def _ends(workers: dict[str, Worker], folder: Path) -> list[Row]:
    """How many bytes each way reduced, and how far its weights are from those of one process."""
    rows = []
    weights: dict[str, torch.Tensor] = {}
    for way in (ONE, *WAYS):
        ranks, place = _of(workers, way), folder / "weights.pt"
        requests = [{"do": "end", "weights": f"{place}{rank or ''}"} for rank in range(len(ranks))]
        (answer, *_) = _together(ranks, requests)
        weights[way] = torch.cat([each.flatten() for each in torch.load(place)])
        if way != ONE:
            away = float((weights[way] - weights[ONE]).norm() / weights[ONE].norm())
            rows.append(Row(way, REDUCED, "MiB", [answer["reduced_bytes"] / MIB]))
            rows.append(Row(way, DIFFERENCE, "ppm", [1e6 * away]))
    return rows
