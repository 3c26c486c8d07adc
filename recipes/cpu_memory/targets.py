"""`cpu_memory_targets`: training steps with the pool against the allocators that people preload.

Where a process's memory lies is decided as it starts, so every allocator gets several processes; all of one generation
take turns, a block of steps each. A value is the median over one process's blocks.
"""

from __future__ import annotations

import tempfile
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from retime.foundations.measure import Spread, speedup
from retime.foundations.workers import Worker, closing
from retime.recipes.core import charts
from retime.recipes.core.build import saved_batch
from retime.recipes.core.claims import Comparison, Target, target_of
from retime.recipes.core.measure import interleave
from retime.recipes.core.recipe import CaseRecipe, Measured, Tick
from retime.recipes.core.results import Point, Result, Row, titled
from retime.recipes.cpu_memory.allocators import ALLOCATORS, POOL, environment_of, environments_of
from retime.recipes.cpu_memory.settings import AllocatorSettings
from retime.recipes.cpu_memory.worker import Server
from retime.recipes.fusion.variants import VARIANTS

STEP, RESIDENT, GROWN, LIVE = "step", "resident peak", "grown by", "most alive"
MIB = 2**20


class AllocatorTargets(CaseRecipe[AllocatorSettings]):
    """A point a case; a variant a way to run its step."""

    quantity = STEP
    on_cpu = "asks about a CPU's memory"

    def references(self, point: Point) -> dict[str, str]:
        best = best_of(point)
        return {} if best is None else {f"speed over {best}": best}

    def measure(self, settings: AllocatorSettings, at: dict[str, Any], tick: Tick) -> Measured:
        case, missing = settings.cases[at["case"]], dict[str, str]()
        runs = _runs(settings, case, missing)
        times: dict[str, list[float]] = {label: [] for label in runs}
        ends: dict[str, list[dict[str, Any]]] = {label: [] for label in runs}
        with tempfile.TemporaryDirectory() as folder:
            request = {**case, "do": "build", "batch": saved_batch(case, Path(folder)), "seed": settings.seed}
            for _ in range(settings.processes):  # which take turns, one of each
                workers: dict[str, Worker] = {}
                with closing(workers):
                    for label, (environment, run) in runs.items():
                        workers[label] = Worker(Server, {**request, **run}, settings.timeout_s, environment=environment)
                    step = {"do": "block", "steps": case.get("steps", settings.steps)}
                    blocks = {label: partial(worker.ask, step) for label, worker in workers.items()}
                    kept = interleave(blocks, settings.rounds, settings.warmup_rounds, tick)
                    for label, worker in workers.items():
                        times[label].append(median(kept[label]))
                        ends[label].append(worker.ask({"do": "end"}))
        rows = [Row(label, STEP, "ms", [round(ms, 4) for ms in values]) for label, values in times.items()]
        for quantity, key in ((RESIDENT, "resident_bytes"), (GROWN, "grown_bytes"), (LIVE, "live_bytes")):
            there = {label: answers for label, answers in ends.items() if all(key in answer for answer in answers)}
            for label, answers in there.items():
                rows.append(Row(label, quantity, "MiB", [round(answer[key] / MIB, 2) for answer in answers]))
        reports = {label: end[-1][key] for label, end in ends.items() for key in ("report", "fusion") if key in end[-1]}
        return Measured(rows, {"missing": missing, "batch size": case["batch_size"], "reports": reports})

    def compare(self, result: Result) -> list[Comparison]:
        lines = []
        for point in result.points:
            best = best_of(point)
            for label, ours in point.settings["case"]["ours"].items():
                if best is None:
                    continue
                ratio, least = point.speedup(best, label, STEP), ours.get("wanted", {})
                where = f"{point.at['case']}, over {best}"
                if "median" in least:
                    lines.append(Comparison(Target(label, "x", least["median"]), ratio, where))
                if "quartile" in least:
                    low, what = Spread(ratio.low, ratio.low, ratio.low), f"{label}, lower quartile over processes"
                    lines.append(Comparison(Target(what, "x", least["quartile"]), low, where))
            for label in point.variants(GROWN):
                ratio = speedup(point.values(label, GROWN), point.values(label, LIVE))
                wanted = target_of("modnn", "resident-over-live")
                lines.append(Comparison(wanted, ratio, f"{point.at['case']}, {label}"))
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
            lines += [f"- {point.at['case']}, {label}: {report}" for label, report in point.facts["reports"].items()]
        return lines

    def draw(self, result: Result, path: Path) -> None:
        rows = -(-len(result.points) // 3)
        drawing, panels = charts.panels(titled(result), len(result.points), width=10.5, height=4.6 * rows, rows=rows)
        for axes, point in zip(panels, result.points, strict=True):
            best = best_of(point)
            labels = point.variants(STEP)
            if best is None:
                continue
            speeds = {label: point.speedup(best, label, STEP) for label in labels}
            charts.named(axes, speeds, [int("retime" in label) for label in labels])
            charts.even_line(axes, best)
            axes.set_title(f"{point.at['case']}\n1 = {best}", fontsize=9)
        panels[0].set_ylabel("steps per second against\nthe best allocator (x)")
        charts.save(drawing, path)


def best_of(point: Point) -> str | None:
    """The plain step's fastest allocator that is not ours."""
    peers = [name for name in point.variants(STEP) if "retime" not in name]
    return point.fastest(peers, STEP)


def _runs(
    settings: AllocatorSettings, case: dict[str, Any], missing: dict[str, str]
) -> dict[str, tuple[dict[str, str], dict[str, Any]]]:
    """By label: environment, and variant with whether the pool is installed. Allocators not there go to `missing`."""
    environments = environments_of(settings.allocators, settings.libraries, missing)
    plain = {"pool": False, "variant": "fused"}
    runs: dict[str, tuple[dict[str, str], dict[str, Any]]] = {
        ALLOCATORS[name].label: (environment, plain) for name, environment in environments.items()
    }
    for label, ours in case["ours"].items():
        if ours["variant"] not in VARIANTS:
            raise ValueError(f"{label} has variant={ours['variant']!r}: choose from {', '.join(VARIANTS)}")
        runs[label] = environment_of(POOL, {}), {"pool": ours["pool"], "variant": ours["variant"]}
    return runs
