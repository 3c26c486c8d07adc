"""`cpu_memory_targets`: training steps with the pool against the allocators that people preload.

Where a process's memory lies is decided as it starts, so every allocator gets several processes; all of one generation
take turns, a block of steps each. A value is the median over one process's blocks.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch

from retime.foundations.workers import Worker, closing
from retime.recipes.core import charts
from retime.recipes.core.build import build_batches
from retime.recipes.core.claims import Comparison, Target
from retime.recipes.core.measure import Spread, interleave, speedup, spread
from retime.recipes.core.of_points import titled
from retime.recipes.core.recipe import Measured, Recipe, Tick
from retime.recipes.core.results import Point, Result, Row
from retime.recipes.core.schema import AllocatorSettings
from retime.recipes.cpu_memory.allocators import ALLOCATORS, POOL, NoAllocatorError, environment_of
from retime.recipes.cpu_memory.worker import serve
from retime.recipes.fusion.variants import VARIANTS

STEP, RESIDENT, GROWN, LIVE = "step", "resident peak", "grown by", "most alive"
MIB = 2**20
RESIDENT_OVER_LIVE = Target("resident memory with the pool over what was alive", "x", 1.15, at_most=True)


class AllocatorTargets(Recipe[AllocatorSettings]):
    """A point a case; a variant a way to run its step."""

    axes = ("cases",)
    quantity = STEP

    def points(self, settings: AllocatorSettings) -> list[dict[str, Any]]:
        return [{"case": name} for name in settings.cases]

    def detail(self, settings: AllocatorSettings, at: dict[str, Any]) -> dict[str, Any]:
        return {"case": settings.cases[at["case"]]}

    def references(self, point: Point) -> dict[str, str]:
        best = best_of(point)
        return {} if best is None else {f"speed over {best}": best}

    def measure(self, settings: AllocatorSettings, at: dict[str, Any], tick: Tick) -> Measured:
        if settings.hardware.device != "cpu":
            raise ValueError(f"{settings.name} asks about a CPU's memory: choose hardware=cpu")
        case = settings.cases[at["case"]]
        runs, missing = _runs(settings, case)
        found: dict[str, dict[str, list[Any]]] = {label: {STEP: [], "end": []} for label in runs}
        with tempfile.TemporaryDirectory() as folder:
            batch = _saved_batch(case, Path(folder))
            common = {"batch": batch, "model": case["model"], "optimizer": case["optimizer"], "seed": settings.seed}
            for _ in range(settings.processes):
                _generation(settings, case.get("steps", settings.steps), runs, common, found, tick)
        ends = {label: values["end"] for label, values in found.items()}
        rows = [
            *(Row(label, STEP, "ms", [round(ms, 4) for ms in values[STEP]]) for label, values in found.items()),
            *_memory_rows(ends, RESIDENT, "resident_bytes"),
            *_memory_rows(ends, GROWN, "grown_bytes"),
            *_memory_rows(ends, LIVE, "live_bytes"),
        ]
        said = {label: end[-1][key] for label, end in ends.items() for key in ("report", "fusion") if key in end[-1]}
        return Measured(rows, {"missing": missing, "batch size": case["batch_size"], "reports": said})

    def compare(self, result: Result) -> list[Comparison]:
        lines = []
        for point in result.points:
            for label, wanted in _wanted(point):
                lines += list(_speed(point, label, wanted))
            for label in point.variants(GROWN):
                ratio = speedup(point.values(label, GROWN), point.values(label, LIVE))
                lines.append(Comparison(RESIDENT_OVER_LIVE, ratio, f"{point.at['case']}, {label}"))
        return lines

    def notes(self, result: Result) -> list[str]:
        lines = [
            "A value is the median over one process; quartiles are over processes. The best allocator is the one with "
            "the smallest median over its processes; jemalloc and tcmalloc are preloaded, the kept heap is glibc told "
            "to map nothing and to give nothing back, with huge pages it is told to ask the kernel for them as well.",
            "What was alive are the pool's own counts of tensors of 16 KiB and more; grown by is the process's peak "
            "resident size over what it was, libraries warm, before the model was built.",
        ]
        for point in result.points:
            lines += [f"- {point.at['case']}: no {name}: {reason}" for name, reason in point.facts["missing"].items()]
            lines += [f"- {point.at['case']}, {label}: {said}" for label, said in point.facts["reports"].items()]
        return lines

    def draw(self, result: Result, path: Path) -> None:
        rows = -(-len(result.points) // 3)
        drawing, panels = charts.panels(titled(result), len(result.points), width=10.5, height=4.6 * rows, rows=rows)
        for axes, point in zip(panels, result.points, strict=True):
            best = best_of(point)
            labels = point.variants(STEP)
            if best is None:
                continue
            for index, label in enumerate(labels):
                ratio = speedup(point.values(best, STEP), point.values(label, STEP))
                charts.points_with_spread(axes, [index], [ratio], None, 1 if _is_ours(label) else 0)
            charts.even_line(axes, best)
            axes.set_title(f"{point.at['case']}\n1 = {best}", fontsize=9)
            axes.set_xticks(range(len(labels)), labels, rotation=40, ha="right", fontsize=8)
        panels[0].set_ylabel("steps per second against\nthe best allocator (x)")
        charts.save(drawing, path)


def best_of(point: Point) -> str | None:
    """The plain step's fastest allocator that is not ours."""
    peers = [name for name in point.variants(STEP) if not _is_ours(name)]
    return min(peers, key=lambda name: spread(point.values(name, STEP)).median, default=None)


def _is_ours(label: str) -> bool:
    return "retime" in label


def _runs(settings: AllocatorSettings, case: dict[str, Any]) -> tuple[dict[str, dict[str, Any]], dict[str, str]]:
    """By label: environment, whether the pool is installed, and variant. And the allocators that are not there, why."""
    runs: dict[str, dict[str, Any]] = {}
    missing: dict[str, str] = {}
    for name in settings.allocators:
        try:
            environment = environment_of(name, settings.libraries)
        except NoAllocatorError as error:
            missing[name] = str(error)
        else:
            runs[ALLOCATORS[name].label] = {"environment": environment, "pool": False, "variant": "fused"}
    for label, ours in case["ours"].items():
        if ours["variant"] not in VARIANTS:
            raise ValueError(f"{label} has variant={ours['variant']!r}: choose from {', '.join(VARIANTS)}")
        runs[label] = {"environment": environment_of(POOL, {}), "pool": ours["pool"], "variant": ours["variant"]}
    return runs, missing


def _generation(
    settings: AllocatorSettings,
    steps: int,
    runs: dict[str, dict[str, Any]],
    common: dict[str, Any],
    found: dict[str, dict[str, list[Any]]],
    tick: Tick,
) -> None:
    """One process of each, which take turns."""
    workers: dict[str, Worker] = {}
    with closing(workers):
        for label, run in runs.items():
            request = {"do": "build", **common, "pool": run["pool"], "variant": run["variant"]}
            workers[label] = Worker(serve, request, settings.timeout_s, environment=run["environment"])
        blocks = {label: partial(worker.ask, {"do": "block", "steps": steps}) for label, worker in workers.items()}
        times = interleave(blocks, settings.rounds, settings.warmup_rounds, tick)
        for label, worker in workers.items():
            found[label][STEP].append(median(times[label]))
            found[label]["end"].append(worker.ask({"do": "end"}))


def _saved_batch(case: dict[str, Any], folder: Path) -> str:
    (batch,) = build_batches(case["data"], case["batch_size"], 1)
    place = folder / "batch.pt"
    torch.save(tuple(tensor.clone() for tensor in batch), place)
    return str(place)


def _memory_rows(ends: dict[str, list[dict[str, Any]]], quantity: str, key: str) -> Iterator[Row]:
    for label, answers in ends.items():
        if all(key in answer for answer in answers):
            yield Row(label, quantity, "MiB", [round(answer[key] / MIB, 2) for answer in answers])


def _wanted(point: Point) -> Iterator[tuple[str, dict[str, float]]]:
    for label, ours in point.settings["case"]["ours"].items():
        yield label, ours.get("wanted", {})


def _speed(point: Point, label: str, wanted: dict[str, float]) -> Iterator[Comparison]:
    """The median against its target, and the lower quartile over processes against its own."""
    best = best_of(point)
    if best is None:
        return
    ratio = speedup(point.values(best, STEP), point.values(label, STEP))
    where = f"{point.at['case']}, over {best}"
    if "median" in wanted:
        yield Comparison(Target(label, "x", wanted["median"]), ratio, where)
    if "quartile" in wanted:
        low = Spread(ratio.low, ratio.low, ratio.low)
        yield Comparison(Target(f"{label}, lower quartile over processes", "x", wanted["quartile"]), low, where)
