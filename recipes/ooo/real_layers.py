"""`ooo_pipeline_compute`: pipelines of transformers on ranks that compute, against torch's own schedules."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from retime.foundations.measure import speedup, spread
from retime.recipes.core import charts
from retime.recipes.core.claims import Comparison
from retime.recipes.core.recipe import Measured, Recipe, Tick
from retime.recipes.core.results import Point, Result, titled
from retime.recipes.emulated import loopback, run_ranks
from retime.recipes.ooo.cases import of_case
from retime.recipes.ooo.claims import target
from retime.recipes.ooo.pipeline import STEP, slowest_steps, steps_of
from retime.recipes.ooo.pipeline_worker import ONE, serve
from retime.recipes.ooo.settings import PipelineSettings

OURS, GPIPE = "ooo2", "torch GPipe"


class RealLayers(Recipe[PipelineSettings]):
    """A point a model."""

    over = (("network", "cases"),)
    quantity = STEP
    on_cpu = "runs its ranks on this machine's cores"

    def blocks(self, settings: PipelineSettings) -> int | None:
        cases = [of_case(settings, name) for name in settings.cases]
        return sum((case.rounds + case.warmup_rounds) * len(_variants(case)) for case in cases)

    def references(self, point: Point) -> dict[str, str]:
        peer = best_of_torch(point)
        return {} if peer is None else {f"speed over {peer}": peer}

    def measure(self, settings: PipelineSettings, at: dict[str, Any], tick: Tick) -> Measured:
        case = of_case(settings, at["network"])
        request = {**asdict(case), "do": "computing", "variants": _variants(case)}
        answers = run_ranks(loopback(case.ranks), serve, request, timeout_s=case.timeout_s, progress=tick)

        def share(what: str, name: str) -> list[float | None]:
            return [one[what][name] and round(one[what][name], 3) for one in answers]

        ours = answers[0]["bubble"]
        facts = {
            "ranks": case.ranks,
            "apart": _apart(answers[0]["loss and norm"]),
            "stages": answers[0]["stages"],
            "bubble share by rank": {name: share("bubble", name) for name in ours},
            "simulated bubble share by rank": {name: share("simulated bubble", name) for name in ours},
        }
        return Measured(slowest_steps(answers, request["variants"]), facts)

    def compare(self, result: Result) -> list[Comparison]:
        lines = []
        for point in result.points:
            where = f"{point.at['network']}, {point.facts['ranks']} ranks"
            peer = best_of_torch(point)
            if point.has(OURS, STEP) and peer is not None:
                ratio = speedup(point.values(peer, STEP), point.values(OURS, STEP))
                lines.append(Comparison(target("over-best"), ratio, f"{where}: {peer}"))
            if point.has(OURS, STEP) and point.has(GPIPE, STEP):
                ratio = speedup(point.values(GPIPE, STEP), point.values(OURS, STEP))
                lines.append(Comparison(target("over-gpipe"), ratio, where))
            if point.facts["apart"]:
                name, apart = max(point.facts["apart"].items(), key=lambda entry: entry[1])
                lines.append(Comparison(target("apart"), spread([apart]), f"{where}: {name}"))
        return lines

    def notes(self, result: Result) -> list[str]:
        return [
            "A step is forward and backward of a batch, without an optimizer; each rank computes on a core of its own. "
            "`torch ...`: torch.distributed.pipelining with stages cut by hand, blocks in equal shares, and so many "
            "stages a rank. Others: this project's runtime on the unmodified model. One device: rank 0 alone."
        ]

    def draw(self, result: Result, path: Path) -> None:
        count = len(result.points)
        drawing, panels = charts.panels(titled(result), count, width=max(7.5, 5.5 * count), height=4.8)
        for axes, point in zip(panels, result.points, strict=True):
            took = steps_of(point)
            charts.bars(axes, took, [_colour(name) for name in took], rotation=40)
            axes.set_ylabel("step (ms)")
            axes.set_title(f"{point.at['network']}, {point.facts['ranks']} ranks", fontsize=9)
        keys = [
            charts.colour_key("gradient fast-forwarding", charts.COLOURS[0]),
            charts.colour_key("other orders, the same runtime", charts.COLOURS[5]),
            charts.colour_key("torch's own runtime", charts.COLOURS[1]),
        ]
        drawing.legend(handles=keys, fontsize=8, loc="outside lower center", ncols=3, frameon=False)
        charts.save(drawing, path)


def best_of_torch(point: Point) -> str | None:
    """The fastest of torch's own."""
    peers = [name for name in point.variants(STEP) if name.startswith("torch ")]
    return min(peers, key=lambda name: spread(point.values(name, STEP)).median, default=None)


def _variants(case: PipelineSettings) -> list[str]:
    return [*case.schedules, *(f"torch {peer}" for peer in case.peers), ONE]


def _apart(said: dict[str, tuple[float, float]]) -> dict[str, float]:
    """By variant, how far loss and norm are from one device's, relatively; the larger."""
    whole = said[ONE]
    return {
        name: max(abs(value / wanted - 1) for value, wanted in zip(found, whole, strict=True))
        for name, found in said.items()
        if name != ONE
    }


def _colour(name: str) -> int:
    return 0 if name.startswith("ooo") else 1 if name.startswith("torch ") else 5
