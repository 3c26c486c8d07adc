"""Figures 1 and 2 of the optimizer-fusion paper, counted from its three orders: depth, and bytes read and written."""

from collections import Counter
from collections.abc import Callable, Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

import torch

from retime.recipes.core import charts
from retime.recipes.core.build import build
from retime.recipes.core.recipe import Measured, Recipe, Tick
from retime.recipes.core.results import Point, Result, Row
from retime.recipes.fusion.settings import FusionSettings
from retime.schedules import Kind, Schedule, Task, backward_fusion, baseline, forward_fusion, simulate

BASELINE, FORWARD, BACKWARD = "baseline", "forward-fusion", "backward-fusion"
ORDERS: dict[str, Callable[..., Schedule]] = {BASELINE: baseline, FORWARD: forward_fusion, BACKWARD: backward_fusion}
ASIDE = {"U": "updates"}
DEPTH, OF_PAPER = "depth", "depth over the paper's"
PAPERS_DEPTH: dict[str, Callable[[int], int]] = {BASELINE: lambda n: 3 * n, BACKWARD: lambda n: 2 * n + 1}
READ, WRITTEN, MERGED = "read", "written", "reads merged a layer"
_NODES = {"F": 1, "O": 0, "W": 1, "U": 1}
"""Both gradients of a layer are one node, as an eager framework runs them."""
_BYTES, _MB = 4, 1e6
_DRAWN_LAYERS = 3


class Depths(Recipe[FusionSettings]):
    """Figure 1: a point a number of layers."""

    over = (("layers", "sizes"),)
    quantity = DEPTH

    def measure(self, settings: FusionSettings, at: dict[str, Any], tick: Tick) -> Measured:
        rows = []
        for name, paper in PAPERS_DEPTH.items():
            nodes = simulate(ORDERS[name](at["layers"]), _NODES, ASIDE).makespan_ms
            rows += [Row(name, DEPTH, "nodes", [nodes]), Row(name, OF_PAPER, "times", [nodes / paper(at["layers"])])]
        return Measured(rows)

    def references(self, point: Point) -> dict[str, str]:
        return {"less deep than the baseline": BASELINE}

    def notes(self, result: Result) -> list[str]:
        return [
            "Counted from the orders of `retime.schedules`, with updates on a lane of their own: nodes on the longest "
            "chain, both gradients of a layer as one. Forward-fusion merges steps, so the paper gives it no depth."
        ]

    def draw(self, result: Result, path: Path) -> None:
        drawing, (depths, *timelines) = charts.panels(result.title, 4, width=10.7, height=7.0, rows=2)
        places = [point.at["layers"] for point in result.points]
        for index, (name, formula) in enumerate(zip(PAPERS_DEPTH, ("3n", "2n + 1"), strict=True)):
            values = [point.values(name, DEPTH)[0] for point in result.points]
            depths.plot(places, values, "o", color=charts.COLOURS[index], label=name)
            paper = [PAPERS_DEPTH[name](place) for place in places]
            depths.plot(places, paper, ":", color=charts.COLOURS[index], label=f"the paper: {formula}")
        charts.whole_ticks(depths, "layers n")
        depths.set_ylabel("nodes on the longest chain")
        depths.legend(fontsize=8)
        for axes, (name, order) in zip(timelines, ORDERS.items(), strict=True):
            _draw_order(axes, name, order(_DRAWN_LAYERS))
        handles = [charts.colour_key(kind.words, charts.COLOURS[_KINDS.index(kind)]) for kind in _KINDS]
        drawing.legend(handles=handles, fontsize=8, loc="outside lower center", ncols=len(_KINDS))
        charts.save(drawing, path)


class Transactions(Recipe[FusionSettings]):
    """Figure 2: a point a network and optimizer; `optimizers` give the tensors of history a parameter has."""

    over = (("model", "models"), ("optimizer", "optimizers"))
    quantity = READ

    def measure(self, settings: FusionSettings, at: dict[str, Any], tick: Tick) -> Measured:
        with torch.device("meta"):
            model = build(settings.models[at["model"]])
        numbers = [sum(p.numel() for p in module.parameters(recurse=False)) for module in model.modules()]
        sizes = {layer: _BYTES * count for layer, count in enumerate(filter(None, numbers), 1)}
        history = settings.optimizers[at["optimizer"]]
        rows = []
        for name, order in ORDERS.items():
            # a step in the middle of several: what the third one adds
            before, after = (traffic(order(len(sizes), steps=steps), sizes, history) for steps in (2, 3))
            read, written = (1 / _MB * (after[kind] - before[kind]) for kind in (READ, WRITTEN))
            inner = range(2, len(sizes))
            merged = sum(after[MERGED, layer] - before[MERGED, layer] for layer in inner) / len(inner)
            rows += [Row(name, READ, "MB", [round(read, 3)]), Row(name, WRITTEN, "MB", [round(written, 3)])]
            rows.append(Row(name, MERGED, "reads", [merged]))
        return Measured(rows, {"layers with parameters": len(sizes), "parameters MB": sum(sizes.values()) / _MB})

    def references(self, point: Point) -> dict[str, str]:
        return {"fewer bytes read than the baseline": BASELINE}

    def notes(self, result: Result) -> list[str]:
        return [
            "Counted: parameters, gradients and the optimizer's history of one step; activations are the same for all. "
            "A read is merged if the node in front of it touched the tensor too, which is the figure's frame; between "
            "nodes that are further apart memory is taken as flushed. The outermost layers stand beside others, so "
            "merged reads are counted of those between.",
            *(
                f"- {point.at['model']}, {point.at['optimizer']}: of {_both(point, BASELINE):.0f} MB a step "
                f"forward-fusion saves {_saved(point, FORWARD):.1f} %, backward-fusion {_saved(point, BACKWARD):.1f} %"
                for point in result.points
            ),
        ]

    def draw(self, result: Result, path: Path) -> None:
        names = list(dict.fromkeys(point.at["optimizer"] for point in result.points))
        drawing, panels = charts.panels(result.title, len(names), width=10.7, height=5.6)
        for axes, name in zip(panels, names, strict=True):
            bars = {}
            for point in (point for point in result.points if point.at["optimizer"] == name):
                whole = _both(point, BASELINE)
                for order in ORDERS:
                    label = f"{point.at['model']}, {order}" + (f" ({whole:.0f} MB)" if order == BASELINE else "")
                    bars[label] = {part: 100 * point.values(order, part)[0] / whole for part in (READ, WRITTEN)}
            charts.stacked_bars(axes, bars, "% of the bytes of the baseline's step")
            axes.set_title(name, fontsize=10)
        charts.save(drawing, path)


def traffic(order: Schedule, sizes: dict[int, int], history: int) -> Counter[Any]:
    """Count a schedule's bytes READ and WRITTEN, and (MERGED, layer): reads of what the node before has just touched.

    The schedule has one lane, `sizes` are bytes of parameters by layer, and a parameter has `history` tensors more.
    """
    counts: Counter[Any] = Counter()
    close: set[tuple[str, int]] = set()
    for _, tasks in groupby(order, key=_node):
        touched: set[tuple[str, int]] = set()
        for task in tasks:
            for is_read, tensor in _accesses(task, history):
                nbytes = sizes.get(task.layer, 0)
                if not is_read:
                    counts[WRITTEN] += nbytes
                elif (tensor, task.layer) in close:
                    counts[MERGED, task.layer] += 1
                else:
                    counts[READ] += nbytes
                touched.add((tensor, task.layer))
        close = touched
    return counts


def _accesses(task: Task, history: int) -> Iterator[tuple[bool, str]]:
    """Accesses in Figure 2's order: whether each is a read, and of what."""
    if task.kind in (Kind.F, Kind.O):
        yield True, "parameters"
    elif task.kind is Kind.W:  # added to what is there
        yield from ((True, "gradients"), (False, "gradients"))
    elif task.kind is Kind.U:  # gradients are reset
        for tensor in ("parameters", "gradients", *(f"history {number}" for number in range(history))):
            yield from ((True, tensor), (False, tensor))


def _node(task: Task) -> tuple[str, int, int]:
    """Both gradients of a layer are one node."""
    return ("B" if task.kind in (Kind.O, Kind.W) else task.kind.value, task.layer, task.step)


_KINDS = (Kind.F, Kind.O, Kind.W, Kind.U)


def _draw_order(axes: Any, name: str, order: Schedule) -> None:
    """An order's boxes: both gradients of a layer take as long as another node."""
    spans = simulate(order, {"F": 1, "O": 0.5, "W": 0.5, "W1": 1, "U": 1}, ASIDE).spans
    lanes = {lane: lane for lane in reversed(list(dict.fromkeys(span.lane for span in spans)))}
    words = {kind.words: index for index, kind in enumerate(_KINDS)}
    charts.lanes(axes, ((words[s.category], s.lane, s.start_ms, s.end_ms) for s in spans), lanes, apart="")
    whole = max(span.end_ms for span in spans)
    for span in spans:
        if span.duration_ms * 50 < whole * len(span.name):
            continue  # too narrow for its name
        place = (span.start_ms + span.duration_ms / 2, [*lanes].index(span.lane))
        axes.annotate(span.name, place, ha="center", va="center", color="white", fontsize=7)
    axes.set_title(f"{name}, n = {_DRAWN_LAYERS}", fontsize=10)
    axes.set_xlabel("nodes in time")


def _both(point: Point, name: str) -> float:
    return point.values(name, READ)[0] + point.values(name, WRITTEN)[0]


def _saved(point: Point, name: str) -> float:
    return 100 * (1 - _both(point, name) / _both(point, BASELINE))
