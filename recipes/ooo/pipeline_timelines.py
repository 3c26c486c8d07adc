"""Figures 5, 6 and 12 of out-of-order backprop: pipelines of layers whose F, O and W take one unit each."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from retime.foundations.measure import spread
from retime.recipes.core.claims import Claim, Comparison
from retime.recipes.core.recipe import Measured, Recipe, Tick
from retime.recipes.core.results import Point, Result, Row
from retime.recipes.ooo.claims import pipelines
from retime.recipes.ooo.settings import PaperPipelineSettings
from retime.recipes.ooo.timelines import draw_timelines, timeline_fact
from retime.schedules import Schedule
from retime.schedules.pipeline import (
    GREEDY,
    Placement,
    StageCosts,
    block,
    cross_layer,
    gpipe,
    interleaved,
    interleaved_zero_bubble,
    modulo,
    one_forward_one_backward,
    ooo_pipe1,
    ooo_pipe2,
    simulate_pipeline,
    v_shape,
    validate_pipeline,
    zb_h1,
    zbv,
)

STEP, IDLE, ALIVE = "step", "idle", "layers alive"
PLAIN, FORWARDED, DEALT = "(a) conventional", "(b) fast-forwarding", "(c) modulo allocation"
AT_ONCE = "(c) without waiting for forward passes"
_SHOWN = (PLAIN, FORWARDED, DEALT)


class PipelineTimelines(Recipe[PaperPipelineSettings]):
    """A point a number of layers; the first is drawn."""

    over = (("layers", "layer_counts"),)
    simulated = True

    def measure(self, settings: PaperPipelineSettings, at: dict[str, Any], tick: Tick) -> Measured:
        rows, facts = [], {}
        for name, (schedule, placement) in variants(at["layers"], settings.ranks, settings.micro_batches).items():
            validate_pipeline(schedule, placement, settings.micro_batches)
            ran = simulate_pipeline(schedule, placement, StageCosts.uniform(placement.stages))
            rows.append(Row(name, STEP, "units", [ran.makespan_ms]))
            rows.append(Row(name, IDLE, "units", [max(ran.idle_ms)]))
            rows.append(Row(name, ALIVE, "layers", [max(ran.peak_activations)]))
            if name in _SHOWN:
                spans = ran.timeline.spans
                facts[timeline_fact(name)] = [(s.name, s.lane, s.start_ms, s.duration_ms, s.category) for s in spans]
        return Measured(rows, facts)

    def references(self, point: Point) -> dict[str, str]:
        return {"speed over (a)": PLAIN}

    def compare(self, result: Result) -> list[Comparison]:
        lines = []
        for point in result.points:
            for (layers, name, over), claim in pipelines(result.where).items():
                if layers == point.at["layers"]:
                    took = point.values(name, STEP)[0]
                    value = point.values(over, STEP)[0] / took if over else took
                    lines.append(Comparison(claim, spread([value]), name))
        return lines

    def notes(self, result: Result) -> list[str]:
        lines = ["F, O and W of a layer take one unit each, messages none; the first layer has no O, as in the paper."]
        compared = self.compare(result)
        off = [line for line in compared if line.measured is not None and not _agrees(line)]
        if compared:
            lines.append(
                "The figure's numbers hold."
                if not off
                else f"{len(off)} of the figure's numbers do not hold, see above."
            )
        else:
            lines.append("The paper gives no numbers for this figure; what it shows is in the table.")
        if result.where == "Figure 12":
            flush = max(result.points, key=lambda point: int(point.at["layers"]))
            ratio = flush.values(PLAIN, STEP)[0] / flush.values(DEALT, STEP)[0]
            lines.append(
                f"1.62 is reached where an output gradient does not wait for its rank's last forward pass; in the "
                f"order that the figure draws, with all forward passes first, it is {ratio:.2f}."
            )
        best = {
            point.at["layers"]: min(point.variants(STEP), key=lambda n: point.values(n, STEP)[0])
            for point in result.points
        }
        lines += [f"- {layers} layers: the shortest step has {name}" for layers, name in best.items()]
        return lines

    def draw(self, result: Result, path: Path) -> None:
        layers = result.points[0].at["layers"]
        draw_timelines(result, path, _SHOWN, f"{result.title}\n{layers} layers, simulated; units of ")


def variants(layers: int, ranks: int, micro_batches: int | None) -> dict[str, tuple[Schedule, Placement]]:
    """The paper's three, and, with micro-batches, what others do."""
    blocks, dealt = block(layers, ranks), modulo(layers, ranks)
    found = {
        PLAIN: (cross_layer(blocks) if micro_batches is None else gpipe(blocks, micro_batches), blocks),
        FORWARDED: (ooo_pipe1(blocks, micro_batches), blocks),
        DEALT: (ooo_pipe2(layers, ranks, micro_batches), dealt),
    }
    if micro_batches is None:
        return found
    found[AT_ONCE] = (ooo_pipe2(layers, ranks, micro_batches, rule=GREEDY), dealt)
    found["1F1B"] = (one_forward_one_backward(blocks, micro_batches), blocks)
    found["ZB-H1"] = (zb_h1(blocks, micro_batches), blocks)
    found["interleaved 1F1B"] = (interleaved(dealt, micro_batches), dealt)
    found["interleaved zero bubble"] = (interleaved_zero_bubble(dealt, micro_batches), dealt)
    down_and_up = v_shape(layers, ranks)
    found["ZBV"] = (zbv(down_and_up, micro_batches), down_and_up)
    return found


def _agrees(line: Comparison) -> bool:
    """Whether a value rounds to the published one."""
    assert line.measured is not None
    assert isinstance(line.against, Claim)
    return abs(line.measured.median - line.against.value) <= 0.01
