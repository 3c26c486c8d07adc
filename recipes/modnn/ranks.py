"""Figures 17 and 18 of moDNN for real: ranks inside a budget, by one plan where it holds in all ways of adding up.

A root that updates and broadcasts at the end of a step is the paper's naive way, the host meanwhile is moDNN's; torch's
DDP is a stronger peer than the first.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from retime.foundations.measure import spread
from retime.foundations.workers import Worker, WorkerError, closing
from retime.recipes.core import charts, machine
from retime.recipes.core.claims import Comparison, amount
from retime.recipes.core.measure import interleave
from retime.recipes.core.recipe import Measured, Tick
from retime.recipes.core.results import Point, Result, Row, titled
from retime.recipes.modnn import side_by_side as runs
from retime.recipes.modnn.rank_worker import EACH, NAIVE, NAIVE_ONCE, ON_HOST, ONCE, ONE, PLANNED, WHOLE, Rank
from retime.recipes.modnn.settings import MemorySettings, NetworkRecipe, claim, target
from retime.recipes.modnn.side_by_side import BUDGET, DIFFERENCE, MEASURED, MIB, PREDICTED, STEP
from retime.schedules.budget import OffloadPlan

REDUCED = "reduced a step"
REFUSED = "refused"
WAYS = (WHOLE, NAIVE, ONCE, EACH, NAIVE_ONCE, ON_HOST)


class Ranks(NetworkRecipe):
    """A point a network and a budget of each rank, in percent of what its share of the batch needs."""

    axes = ("budgets",)
    quantity = STEP

    def points(self, settings: MemorySettings) -> list[dict[str, Any]]:
        machine.need_gpu_each(settings.hardware.device, settings.devices)
        return [{"network": name, "budget": float(share)} for name in settings.cases for share in settings.budgets]

    def detail(self, settings: MemorySettings, at: dict[str, Any]) -> dict[str, Any]:
        return {**super().detail(settings, at), "plans": "one for all ways"}  # points of earlier code have several

    def turns(self, settings: MemorySettings) -> int | None:
        return len(WAYS) + 1

    def references(self, point: Point) -> dict[str, str]:
        references = {"speed over one process": ONE, "speed over every sub-batch": EACH}
        return references | {f"speed over {way}": way for way in (NAIVE, NAIVE_ONCE) if point.has(way, STEP)}

    def measure(self, settings: MemorySettings, at: dict[str, Any], tick: Tick) -> Measured:
        case = settings.cases[at["network"]]
        with runs.network_for(settings, {**case, "batch_size": case["batch_size"] // settings.devices}) as share:
            of_share = share.plan()
        budget = int(at["budget"] / 100 * of_share["ideal_bytes"])
        workers: dict[str, Worker] = {}
        of: dict[str, list[Worker]] = {}
        facts: dict[str, Any] = {"batch size": case["batch_size"], "ranks": settings.devices, "plans": {}}
        with runs.network_for(settings, case) as network, closing(workers):
            plain = {ONE: network.plan(), WHOLE: of_share, NAIVE: of_share}
            predicted = {way: plan["plain_peak_bytes"] for way, plan in plain.items()}
            given = {way: {"reserved_bytes": plan["plain_reserved_bytes"]} for way, plan in plain.items()}
            for way in (ONE, *WAYS):
                count = 1 if way == ONE else settings.devices
                request = {
                    **{**network.request, **given.get(way, {}), "do": "join", "way": way, "ranks": count},
                    **{"budget_bytes": budget, "plans": str(network.folder / "plans.json")},
                    "rendezvous": str(network.folder / f"{way}.rendezvous"),
                }
                of[way] = [Worker(Rank, None, settings.timeout_s) for _ in range(count)]
                workers |= {f"{way} {rank}": worker for rank, worker in enumerate(of[way])}
                try:
                    ready = _together(of[way], [{**request, "rank": rank} for rank in range(count)])
                except WorkerError as error:
                    if runs.failure(error) != REFUSED:
                        raise
                    return Measured([], {**facts, REFUSED: str(error)})
                facts["cores"], facts["plans"][way] = ready[0]["cores"], ready[0]["plan"]
                if way in PLANNED:
                    predicted[way] = max(answer["predicted_bytes"] for answer in ready)
                if way == ONCE:
                    given[EACH] = ready[0]
            blocks = {way: partial(_block_ms, ranks, settings.steps) for way, ranks in of.items()}
            times = interleave(blocks, settings.rounds, settings.warmup_rounds, tick)
            rows = [Row(way, STEP, "ms", kept) for way, kept in times.items()]
            rows += [Row(way, BUDGET, "MiB", [budget / MIB]) for way in (*PLANNED, EACH)]
            rows += [Row(way, PREDICTED, "MiB", [nbytes / MIB]) for way, nbytes in predicted.items()]
            rows += _ends(of, network.folder)
        return Measured(rows, facts)

    def compare(self, result: Result) -> list[Comparison]:
        lines = []
        for point in (point for point in result.points if REFUSED not in point.facts):
            where = f"{point.at['network']} with {point.facts['ranks']} ranks on {point.facts['cores']} cores"
            budget = f"{where}, {point.at['budget']:g} %"
            if point.has(NAIVE, STEP):
                speedup = point.speedup(ONE, NAIVE, STEP)
                lines.append(Comparison(claim("figure-17-ideal"), speedup, f"{budget}, {NAIVE}: not four devices"))
                for theirs in (NAIVE, NAIVE_ONCE, ONCE):
                    fair = theirs == NAIVE or len({point.facts["plans"][way] for way in PLANNED}) == 1
                    over = point.speedup(theirs, ON_HOST, STEP) if fair else None
                    remark = f"{budget}, over {theirs}{'' if fair else '; undecided: plans differ'}"
                    lines.append(Comparison(target("host-meanwhile"), over, remark))
            lines += [_once_over_each(point, budget), *_peaks(point, budget)]
            away = max(point.values(way, DIFFERENCE)[0] for way in WAYS if point.has(way, DIFFERENCE))
            lines.append(Comparison(target("ranks-difference"), spread([away]), budget))
        remark = "budgets here are shares of what a rank's batch needs, not GB of four devices"
        unlike = (claim("figure-17-modnn"), claim("figure-18-6-gb-naive"))
        return [*lines, *(Comparison(published, None, remark) for published in unlike)]

    def notes(self, result: Result) -> list[str]:
        lines = [
            "Ranks are processes of one core each on this machine, or of a GPU each. Where gradients are reduced, DDP "
            "does so over gloo (NCCL on GPUs) while the last backward pass runs. Naive is the paper's way: all "
            "gradients go to a root in one piece when the backward pass has ended, the root updates, and its weights "
            "come back. On the host the ranks add up in memory that they share, while the last backward pass runs.",
            "On a processor all ways, the one process too, take tensors from the same pool, which keeps freed memory "
            "up to what the plan or the whole step needs. Measured is a rank's peak resident size (on a GPU what its "
            "allocator gave out) above the same process before it built the model, after a rehearsal with another "
            "model. Budgets and predictions count DDP's buckets and what reductions allocate; those of whole batches "
            "do not, and none counts what the root receives or what the ranks share. No kernel limit holds a rank.",
        ]
        for point in result.points:
            if REFUSED in point.facts:
                lines.append(f"- {point.at['network']}, {point.at['budget']:g} %: {point.facts[REFUSED]}")
                continue
            plans = {way: plan for way, plan in point.facts["plans"].items() if way in (*PLANNED, EACH)}
            text = "; ".join(f"{way}: {plan}" for way, plan in plans.items())
            if len({*plans.values()}) == 1:
                text = f"all ways inside the budget have one plan, which one rank made: {plans[ONCE]}"
            lines.append(f"- {point.at['network']}, {point.at['budget']:g} %: {text}")
            if point.facts["cores"] < point.facts["ranks"]:
                lines.append("- the ranks shared cores, so nothing is said about speed")
        return lines

    def draw(self, result: Result, path: Path) -> None:
        trained = [point for point in result.points if REFUSED not in point.facts]
        if not trained:
            reasons = [f"{_name(point)}: {point.facts[REFUSED]}" for point in result.points]
            charts.save(charts.only_text(result.title, reasons or ["nothing was measured"]), path)
            return
        drawing, (speeds, peaks) = charts.panels(titled(result), 2, width=12.0)
        ways = [way for way in WAYS if all(point.has(way, STEP) for point in trained)]
        charts.beside(speeds, [(way, [point.speedup(ONE, way, STEP) for point in trained]) for way in ways], 0.13)
        speeds.set_ylabel("speed over one process (x)")
        charts.even_line(speeds, ONE)
        for quantity, filled in ((MEASURED, True), (PREDICTED, False)):
            values = [spread([_of_budget(point, quantity)]) for point in trained]
            colour = WAYS.index(ONCE)
            charts.points_with_spread(peaks, range(len(values)), values, quantity, colour, filled=filled)
        peaks.set_ylabel(f"peak over the budget, {ONCE}")
        charts.even_line(peaks, "budget")
        for axes in (speeds, peaks):
            axes.set_xticks(range(len(trained)), [_name(point) for point in trained])
            axes.set_xlabel("network, budget of a rank (% of its share's ideal peak)")
            axes.set_xlim(-0.5, len(trained) - 0.5)
            axes.set_ylim(0, axes.get_ylim()[1] * 1.45)
            axes.legend(fontsize=8, loc="upper left", ncols=2)
        charts.save(drawing, path)


def _name(point: Point) -> str:
    return f"{point.at['network']}\n{point.at['budget']:g} %"


def _once_over_each(point: Point, where: str) -> Comparison:
    """Both ways are the same if the plan has a rank's share in one part."""
    share, wanted = point.facts["batch size"] // point.facts["ranks"], target("once-over-each")
    sub_batch = OffloadPlan.parse(point.facts["plans"][ONCE]).sub_batch
    if sub_batch >= share:
        remark = f"{where}: nothing to compare, a rank's {share} samples are one sub-batch, so both ways reduce once"
        return Comparison(wanted, None, remark)
    return Comparison(wanted, point.speedup(EACH, ONCE, STEP), where)


def _peaks(point: Point, where: str) -> list[Comparison]:
    """Peak of a rank against its budget and against what was predicted for it."""
    peak, budget, predicted = (
        amount(point.values(ONCE, quantity)[0], "MiB") for quantity in (MEASURED, BUDGET, PREDICTED)
    )
    share, error = spread([_of_budget(point, MEASURED)]), spread([abs(runs.prediction_error(point, ONCE))])
    where = f"{where}, {ONCE}: {peak}"
    return [
        Comparison(target("within-budget"), share, f"{where} in {budget}"),
        Comparison(target("prediction-error"), error, f"{where} where {predicted} were predicted"),
    ]


def _of_budget(point: Point, quantity: str) -> float:
    return point.values(ONCE, quantity)[0] / point.values(ONCE, BUDGET)[0]


def _together(ranks: list[Worker], requests: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Ask all before the first answers: each waits for the others."""
    for worker, request in zip(ranks, requests, strict=True):
        worker.tell(request)
    return [worker.answer() for worker in ranks]


def _block_ms(ranks: list[Worker], steps: int) -> float:
    answers = _together(ranks, [{"do": "block", "steps": steps}] * len(ranks))
    return max(spread(answer["ms"]).median for answer in answers)


def _ends(of: dict[str, list[Worker]], folder: Path) -> list[Row]:
    """Rows on what each way held and reduced, and on how far its weights are from those of one process."""
    rows = []
    for way, ranks in of.items():
        place = folder / f"{way}.pt"
        requests = [{"do": "end", "weights": f"{place}{rank or ''}"} for rank in range(len(ranks))]
        answers = _together(ranks, requests)
        rows.append(Row(way, MEASURED, "MiB", [max(answer["measured_bytes"] for answer in answers) / MIB]))
        if way != ONE:
            if way in (WHOLE, ONCE, EACH):
                rows.append(Row(way, REDUCED, "MiB", [answers[0]["reduced_bytes"] / MIB]))
            rows.append(Row(way, DIFFERENCE, "ppm", [runs.away_ppm(place, folder / f"{ONE}.pt")]))
    return rows
