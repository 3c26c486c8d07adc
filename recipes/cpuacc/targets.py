"""`cpuacc_targets`: sums in shared memory against gloo's, alone and inside Trainer.fit.

Ranks are processes of this machine, one core each as far as there are cores. A value of a sum is the slowest rank's.
With `hardware=cuda` they have a GPU each, and NCCL is the peer. Where there are fewer GPUs they share them, which NCCL
does not take: then gloo is the peer, which brings gradients to the host too.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from retime.foundations.measure import spread
from retime.recipes.core import charts
from retime.recipes.core.claims import Comparison, claim_of, target_of
from retime.recipes.core.recipe import CaseRecipe, Measured, Recipe, Tick
from retime.recipes.core.results import Point, Result, Row, best_of, titled
from retime.recipes.cpuacc.settings import AccumulationSettings
from retime.recipes.cpuacc.worker import ALONE, COPY, GLOO, HOST, NCCL, serve
from retime.recipes.emulated import loopback, run_ranks

SUM, STEP = "sum", "step"
WAITS = ("communication exposed", "update")
claim, target = partial(claim_of, "cpuacc"), partial(target_of, "cpuacc")
_SENT = {
    GLOO: "gloo's transport is TCP on loopback: torch has none for it that uses Unix sockets or shared memory",
    NCCL: "NCCL sends from GPU to GPU",
}


class OnRanks(Recipe[AccumulationSettings]):
    """A recipe that ranks on this machine's cores measure: a point a network and number of ranks."""

    over: tuple[tuple[str, str], ...] = (("network", "cases"), ("ranks", "rank_counts"))


class Targets(CaseRecipe[AccumulationSettings]):
    """A point a number of ranks and a size of the tensor, and a point a case of training."""

    axes = ("rank_counts", "sizes_mb")
    quantity = STEP

    def points(self, settings: AccumulationSettings) -> list[dict[str, Any]]:
        sums = [{"ranks": ranks, "MiB": size} for ranks in settings.rank_counts for size in settings.sizes_mb]
        return [*sums, *super().points(settings)]

    def references(self, point: Point) -> dict[str, str]:
        best = best_of(point, "ddp", STEP)
        return {} if best is None else {f"speed over {best}": best}

    def measure(self, settings: AccumulationSettings, at: dict[str, Any], tick: Tick) -> Measured:
        if "case" in at:
            return measure_fits(settings, {"network": at["case"], "ranks": settings.cases[at["case"]]["ranks"]}, tick)
        answers = ask(settings, at, tick, "sums", mib=at["MiB"])
        rows = [Row(way, SUM, "ms", _slowest(answers, way)) for way in answers[0]["ms"]]
        facts = {"same bits": all(one["same"] for one in answers), "how": answers[0]["how"]}
        return Measured(rows, {**facts, "repeats": settings.repeats, **machine(settings, at["ranks"])})

    def compare(self, result: Result) -> list[Comparison]:
        lines: list[Comparison] = []
        for point in result.points:
            lines += _of_fit(point) if "case" in point.at else _of_sum(point)
        return lines

    def notes(self, result: Result) -> list[str]:
        joined = {point.facts.get("ranks joined by", GLOO).partition(",")[0] for point in result.points}
        sent = ". ".join(_SENT[backend] for backend in sorted(joined))
        lines = [
            f"Ranks beyond the cores share them, also the copies. {sent}; in pieces, its sums run at the same time. A "
            "step's exposed communication is what it takes beyond one rank that trains alone."
        ]
        for point in result.points:
            if "case" not in point.at:
                lines.append(f"- {point.at['ranks']} ranks, {point.at['MiB']} MiB: {point.facts['how']}")
                continue
            alone = point.median(ALONE, STEP)
            exposed = ", ".join(
                f"{label} {point.median(label, STEP) - alone:.0f}" for label in point.variants(STEP) if label != ALONE
            )
            same = ", ".join(point.facts["the same final weights"])
            lines.append(f"- {point.at['case']}: exposed communication in ms: {exposed}; same final weights: {same}")
        return lines

    def draw(self, result: Result, path: Path) -> None:
        sums = [point for point in result.points if "case" not in point.at]
        cases = [point for point in result.points if "case" in point.at]
        count = bool(sums) + len(cases)
        drawing, panels = charts.panels(titled(result), count, width=5.0 * count)
        if sums:
            axes = panels.pop(0)
            for index, point in enumerate(sums):
                charts.points_with_spread(axes, [index], [point.speedup(_peer(point), HOST, SUM)], None, 0)
            charts.even_line(axes, "the peer")
            labels = [f"{point.at['ranks']} ranks\n{point.at['MiB']} MiB" for point in sums]
            axes.set_xticks(range(len(sums)), labels, fontsize=8)
            peers = " or ".join(dict.fromkeys(_peer(point).partition(",")[0] for point in sums))
            axes.set_ylabel(f"sums per second in shared memory\nagainst {peers} (x)")
        for axes, point in zip(panels, cases, strict=True):
            charts.named(axes, {label: point.spread(label, STEP) for label in point.variants(STEP)})
            axes.set_ylim(bottom=0)
            axes.set_title(f"{point.at['case']}, {point.facts['ranks']} ranks", fontsize=9)
            axes.set_ylabel("step (ms)")
        charts.save(drawing, path)


def place(point: Point) -> str:
    """Place of a point, in words."""
    return f"{point.at['network']}, {point.at['ranks']} ranks"


def measure_fits(settings: AccumulationSettings, at: dict[str, Any], tick: Tick) -> Measured:
    """Steps of a network's fits under each strategy, and where they go: rows, and what is the same.

    A round's step is the slowest rank's; its phases are those of the rank that waits and updates longest.
    """
    answers = ask(settings, at, tick, "fits")
    rows = [Row(label, STEP, "ms", _slowest(answers, label)) for label in answers[0]["ms"]]
    for label in answers[0]["phases"]:
        by_round = zip(*(answer["phases"][label] for answer in answers), strict=True)
        waiting = [max(ranks, key=lambda one: sum(one.get(phase, 0.0) for phase in WAITS)) for ranks in by_round]
        rows += [Row(label, phase, "ms", [round(one[phase], 4) for one in waiting]) for phase in waiting[0]]
    weights = {label: {one["weights"][label] for one in answers} for label in settings.variants}
    first = weights[next(iter(settings.variants))]
    same = [label for label, digests in weights.items() if digests == first and len(first) == 1]
    facts = {"gradient bytes": answers[0]["gradient_bytes"], "ranks": at["ranks"], **machine(settings, at["ranks"])}
    return Measured(rows, {**facts, "the same final weights": same})


def ask(settings: AccumulationSettings, at: dict[str, Any], tick: Tick, do: str, **more: Any) -> list[Any]:
    """The answers of the point's ranks, by rank; what its network and `more` have stands in place of settings."""
    here = {"do": do, "backend": joined_by(settings, at["ranks"]).partition(",")[0]}
    request = {**asdict(settings), **settings.cases.get(at.get("network", ""), {}), **here, **more}
    return run_ranks(loopback(at["ranks"]), serve, request, timeout_s=settings.timeout_s, progress=tick)


def _slowest(answers: Iterable[dict[str, Any]], way: str) -> list[float]:
    return [round(max(values), 4) for values in zip(*(one["ms"][way] for one in answers), strict=True)]


def joined_by(settings: AccumulationSettings, ranks: int) -> str:
    """The backend by which so many ranks send what does not go through shared memory, and where they are."""
    if settings.hardware.device == "cpu":
        return "gloo"
    return "nccl, a GPU each" if torch.cuda.device_count() >= ranks else "gloo, on GPUs that they share"


def machine(settings: AccumulationSettings, ranks: int) -> dict[str, Any]:
    """Facts: the cores that this process may use, and what joins ranks beside shared memory."""
    return {"cores": len(os.sched_getaffinity(0)), "ranks joined by": joined_by(settings, ranks)}


def _peer(point: Point) -> str:
    return best_of(point, (GLOO, NCCL), SUM) or GLOO


def _of_sum(point: Point) -> list[Comparison]:
    where, peer = f"{point.at['ranks']} ranks, {point.at['MiB']} MiB", _peer(point)
    same, wanted = float(point.facts["same bits"]), target("over-gloo")
    if peer.startswith(NCCL):
        wanted = replace(wanted, what=wanted.what.replace("gloo", "NCCL"))
    return [
        Comparison(wanted, point.speedup(peer, HOST, SUM), f"{where}, over {peer}"),
        Comparison(target("of-copy"), point.speedup(COPY, HOST, SUM), where),
        Comparison(target("same"), spread([same]), f"{where}, {point.facts['repeats']} runs"),
    ]


def _of_fit(point: Point) -> list[Comparison]:
    best = {name: best_of(point, name, STEP) for name in ("ddp", "cpu_accumulate_ddp", "ooo_ddp on host")}
    lines = []
    for wanted, before, after in (
        ("in-fit", best["ddp"], best["cpu_accumulate_ddp"]),
        ("out-of-order", best["cpu_accumulate_ddp"], best["ooo_ddp on host"]),
    ):
        if before is not None and after is not None:
            ratio = point.speedup(before, after, STEP)
            lines.append(Comparison(target(wanted), ratio, f"{point.at['case']}: {after} over {before}"))
    return lines
