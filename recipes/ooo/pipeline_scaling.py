"""Figures 11 and 13 of out-of-order backprop on paper: pipelines of transformers by network and by number of GPUs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from retime.mechanisms.pipeline import Costs, PipelineError, Planner
from retime.recipes.core import charts
from retime.recipes.core.claims import Claim, Comparison
from retime.recipes.core.measure import spread
from retime.recipes.core.of_points import titled
from retime.recipes.core.recipe import Measured, Recipe, Tick
from retime.recipes.core.results import Point, Result, Row
from retime.recipes.core.schema import PaperPipelineSettings

STEP, SPEED = "step", "speed over one GPU"
ONE, MODEL_PARALLEL, FINE = "one GPU", "cross-layer model parallel", " at each layer"
GPIPE, PAPERS1, PAPERS2, OURS = "gpipe", "ooo1_flush", "ooo2_flush", "ooo2"
_PAPER = "Oh et al. 2022"
CLAIMS: dict[str, dict[tuple[str, str, str], Claim]] = {
    "Figure 11, simulated": {
        ("FFNN", PAPERS1, GPIPE): Claim(_PAPER, "section 8.4.1", "x", 1.18, "FFNN, OOO-Pipe1 over GPipe"),
        ("FFNN", PAPERS2, GPIPE): Claim(_PAPER, "section 8.4.1", "x", 1.5, "FFNN, OOO-Pipe2 over GPipe"),
        ("BERT-24 NVLink", PAPERS1, GPIPE): Claim(_PAPER, "Figure 11 (a)", "x", 1.15, "BERT-24, OOO-Pipe1 over GPipe"),
        ("BERT-24 NVLink", PAPERS2, GPIPE): Claim(_PAPER, "Figure 11 (a)", "x", 1.59, "BERT-24, OOO-Pipe2 over GPipe"),
        ("BERT-24 NVLink", PAPERS2, ONE): Claim(_PAPER, "Figure 11 (a)", "x", 3.2, "BERT-24, over one GPU"),
        ("BERT-24 PCIe", PAPERS2, GPIPE): Claim(_PAPER, "Figure 11 (b)", "x", 1.58, "PCIe, OOO-Pipe2 over GPipe"),
        ("BERT-24 Ethernet", PAPERS2, GPIPE): Claim(_PAPER, "Figure 11 (b)", "x", 1.48, "10 Gb, OOO-Pipe2 over GPipe"),
        ("BERT-24 Ethernet", PAPERS2, PAPERS2 + FINE): Claim(
            _PAPER, "section 8.4.1", "x", 2.0, "10 Gb, groups over modulo allocation at each transformer"
        ),
    },
    "Figure 13, simulated": {
        ("BERT-12, 8", PAPERS2, GPIPE): Claim(_PAPER, "Figure 13 (a)", "x", 1.73, "8 GPUs, OOO-Pipe2 over GPipe"),
        ("BERT-24, 16", PAPERS2, GPIPE): Claim(_PAPER, "Figure 13 (a)", "x", 1.41, "16 GPUs (1.41 to 1.45)"),
        ("BERT-48, 32", PAPERS2, GPIPE): Claim(_PAPER, "Figure 13 (a)", "x", 1.45, "32 GPUs (1.41 to 1.45)"),
        ("BERT-48, 16", PAPERS2, "interleaved"): Claim(
            _PAPER, "section 8.4.2", "x", 1.136, "BERT-48, over Megatron 2 (1.136 to 1.292)"
        ),
    },
}
"""By figure: case, schedule and peer."""


@dataclass(frozen=True)
class Case:
    """A pipeline on a cluster.

    Args:
        layers: that are alike, such as a BERT's encoders.
        ranks: GPUs.
        micro_batches: of a step.
        ratio: of a message between two GPUs of a node to a layer's forward pass.
        between: the same between nodes.
        per_node: GPUs in a node.
    """

    layers: int
    ranks: int
    micro_batches: int
    ratio: float
    between: float = 0.0
    per_node: int = 1024

    @property
    def hops(self) -> list[list[float]]:
        """By ranks, in units."""
        ranks = range(self.ranks)
        return [
            [self.ratio if a // self.per_node == b // self.per_node else self.between for b in ranks] for a in ranks
        ]

    def units(self, schedule: str, group: int | None = None) -> float:
        """A step's length.

        Raises:
            PipelineError: the schedule cannot have such a pipeline.
        """
        costs = Costs((1.0,) * self.layers, (1,) * self.layers, self.hops)
        plan = Planner(schedule, self.ranks, costs, group="auto" if group is None else group).plan(self.micro_batches)
        if plan.makespan_ms is None:
            raise PipelineError(f"schedules: {schedule!r} is torch's own, which is not simulated: leave it out")
        return plan.makespan_ms


class PipelineScaling(Recipe[PaperPipelineSettings]):
    """A point a case."""

    axes = ("cases",)

    def _open(self, settings: PaperPipelineSettings, folder: Path) -> Result:
        result = super()._open(settings, folder)
        result.simulated = True
        return result

    def points(self, settings: PaperPipelineSettings) -> list[dict[str, Any]]:
        return [{"case": name} for name in settings.cases]

    def measure(self, settings: PaperPipelineSettings, at: dict[str, Any], tick: Tick) -> Measured:
        case = case_of(settings, at["case"])
        whole = 3.0 * case.layers * case.micro_batches
        took = {ONE: whole, MODEL_PARALLEL: model_parallel_units(case)}
        impossible = {}
        for name in settings.schedules:
            schedule, at_each = name.removesuffix(FINE), 1 if name.endswith(FINE) else None
            try:
                took[name] = case.units(schedule, at_each)
            except PipelineError as error:
                impossible[name] = str(error)
            tick(name)
        rows = [Row(name, STEP, "units", [round(units, 4)]) for name, units in took.items()]
        rows += [Row(name, SPEED, "x", [round(whole / units, 4)]) for name, units in took.items()]
        facts = {"layers": case.layers, "GPUs": case.ranks, "micro-batches": case.micro_batches}
        return Measured(rows, facts | {"not possible": impossible})

    def references(self, point: Point) -> dict[str, str]:
        return {"speed over gpipe": GPIPE} if point.has(GPIPE, STEP) else {}

    def compare(self, result: Result) -> list[Comparison]:
        lines = []
        points = {point.at["case"]: point for point in result.points}
        for (case, name, peer), claim in CLAIMS.get(result.where, {}).items():
            point = points.get(case)
            if point is None or not (point.has(name, STEP) and point.has(peer, STEP)):
                continue
            value = point.values(peer, STEP)[0] / point.values(name, STEP)[0]
            note = f"{case}: {name} over {peer}"
            if point.has(OURS, STEP):
                note += f"; {OURS} {point.values(peer, STEP)[0] / point.values(OURS, STEP)[0]:.2f}"
            lines.append(Comparison(claim, spread([value]), note))
        return lines

    def notes(self, result: Result) -> list[str]:
        lines = [
            "Units: F, O and W of a layer take one each; a message takes its share of one (section 8.4.1: 0.05 over "
            "NVLink, 0.16 over PCIe, 1.8 over 10 Gb Ethernet, hence 0.72 over 25 Gb). Embedding and head are left "
            "out, and GPUs without a layer too. The paper does not give its numbers of micro-batches. *_flush is the "
            "paper's form, all forward passes first; the others are the best of several cuts into stages."
        ]
        for point in result.points:
            names = [name for name in point.variants(STEP) if name not in (ONE, MODEL_PARALLEL)]
            peers = [name for name in names if not name.startswith("ooo")]
            if OURS in names and peers:
                best = min(peers, key=lambda name: point.values(name, STEP)[0])
                ratio = point.values(best, STEP)[0] / point.values(OURS, STEP)[0]
                lines.append(f"- {point.at['case']}: {OURS} over the best of the others, {best}: {ratio:.3f}")
        return lines

    def draw(self, result: Result, path: Path) -> None:
        names = list(dict.fromkeys(name for point in result.points for name in point.variants(SPEED)))
        names = [name for name in names if name != ONE]
        drawing, (axes,) = charts.panels(titled(result), 1, width=max(9.0, 1.4 * len(result.points) + 3), height=5.2)
        width = 0.8 / max(1, len(names))
        for index, name in enumerate(names):
            places = [number for number, point in enumerate(result.points) if point.has(name, SPEED)]
            heights = [result.points[number].values(name, SPEED)[0] for number in places]
            axes.bar(
                [number + (index - (len(names) - 1) / 2) * width for number in places],
                heights,
                width=width,
                color=charts.COLOURS[index % len(charts.COLOURS)],
                hatch="" if index < len(charts.COLOURS) else "///",
                label=name,
            )
        axes.set_xticks(range(len(result.points)), [point.at["case"] for point in result.points], fontsize=8)
        axes.set_ylabel("speed over one GPU")
        axes.grid(axis="x", visible=False)
        drawing.legend(fontsize=8, loc="outside lower center", ncols=4, frameon=False)
        charts.save(drawing, path)


def case_of(settings: PaperPipelineSettings, name: str) -> Case:
    """The case of a name.

    Raises:
        ValueError: a key that a case does not have, or one that is missing.
    """
    try:
        return Case(**settings.cases[name])
    except TypeError as error:
        raise ValueError(f"cases.{name}: {error}; a case has {', '.join(Case.__dataclass_fields__)}") from error


def model_parallel_units(case: Case) -> float:
    """A step without micro-batches: one GPU computes at a time."""
    hops = 2 * sum(case.hops[rank][rank + 1] for rank in range(case.ranks - 1))
    return 3.0 * case.layers * case.micro_batches + hops * case.micro_batches
