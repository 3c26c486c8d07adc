"""`retime advise` on models that it was not tuned on, and training by what it advises, in a real Trainer fit."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from contextlib import closing
from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf

from retime.commands.advise_worker import DDP_BUCKET_MB, Method, ddp
from retime.foundations.measure import Spread, spread
from retime.foundations.messages import DifferenceWarning, NoEffectWarning
from retime.foundations.workers import Worker
from retime.recipes.advice.settings import AdviceSettings
from retime.recipes.core import charts
from retime.recipes.core.build import CPU, build_batches, build_model
from retime.recipes.core.claims import Comparison, Target
from retime.recipes.core.recipe import CaseRecipe, Measured, Tick
from retime.recipes.core.results import Point, Result, Row, titled
from retime.recipes.core.trainer_loop import Run, train
from retime.recipes.cpu_memory.allocators import environment_of
from retime.recipes.emulated import loopback, run_ranks

STEP, PLAIN, ADVISED, DDP, ON_RANKS = "step", "strongest plain step", "advised", "ddp", "advised on two ranks"
PEERS = {ADVISED: (PLAIN, "advised"), ON_RANKS: (DDP, "advised_on_ranks")}
"""Of fits as advised: those they are held against, and where an answer has the method's name."""
CLOSE = 0.05
NEVER_SLOWER = Target("training as advised over the strongest plain step, or ddp", "x", 0.99)
GAIN_HOLDS = Target("gain by training over the one that was named, off by", "x", CLOSE, at_most=True)
SECONDS = Target("retime advise", "s", 300.0, at_most=True)
_WARM_STEPS = 70
"""More than any search of ours takes."""


class Followed(CaseRecipe[AdviceSettings]):
    """A point a model: what was advised, how long that took, and steps of fits with and without it."""

    quantity = STEP
    on_cpu = "trains on a CPU"

    def references(self, point: Point) -> dict[str, str]:
        return {"speed over the strongest plain step": PLAIN, "on ranks: speed over ddp": DDP}

    def measure(self, settings: AdviceSettings, at: dict[str, Any], tick: Tick) -> Measured:
        case = settings.cases[at["case"]]
        began = time.perf_counter()
        advice = _advice(case, settings.seconds, tick)
        facts = {"seconds": round(time.perf_counter() - began, 1), "advice": advice}
        ways = {PLAIN: _way(advice["plain"]["strongest"])}
        if (row := _named(advice, ADVISED)) is not None:
            ways[ADVISED] = _way(row)
        if (row := _named(advice, ON_RANKS)) is not None:
            tried = advice["plain"]["ddp_tried_ms"]
            peer = ddp(int(min(tried, key=tried.__getitem__, default=DDP_BUCKET_MB)))
            kept_heap = advice["plain"]["strongest"]["kept_heap"]
            own = {"strategy": peer.strategy, "arguments": peer.arguments, "callback": "", "kept_heap": kept_heap}
            ways |= {DDP: _way(row) | own, ON_RANKS: _way(row)}
        times: dict[str, list[float]] = {name: [] for name in ways}
        for number in range(settings.processes):
            for name in ways if number % 2 else reversed(ways):
                times[name].append(_trained(case, settings, ways[name], advice["plain"]["strongest"]["fused"]))
                tick(f"training, {name}")
        rows = [Row(name, STEP, "ms", [round(ms, 4) for ms in values]) for name, values in times.items()]
        return Measured(rows, facts)

    def compare(self, result: Result) -> list[Comparison]:
        lines = []
        for point in result.points:
            case, advice = point.at["case"], point.facts["advice"]
            lines.append(Comparison(SECONDS, spread([point.facts["seconds"]]), case))
            for name in PEERS:
                over, advised = by_training(point, name), _named(advice, name)
                if over is None or advised is None:
                    continue
                named, undecided = advised["gain"]["median"], not advised.get("is_steady", True)
                note = ", size undecided" if undecided else f": named {named:.3f}, trained {over.median:.3f}"
                note = f"{advised['name']}{', over ddp' if name == ON_RANKS else ''}{note}"
                lines.append(Comparison(NEVER_SLOWER, over, f"{case}: {note}"))
                lines += [] if undecided else [Comparison(GAIN_HOLDS, off_by(over, named), f"{case}: {note}")]
        return lines

    def notes(self, result: Result) -> list[str]:
        lines = [
            "A fit is in a process of its own, and gives its median step. With two ranks a step has two batches: these "
            "fits are to be held against ddp only. Quartiles are over processes."
        ]
        for point in result.points:
            advised = point.facts["advice"]["advised"]
            lines.append(f"- {point.at['case']}: {advised or 'nothing is faster than the strongest plain step'}")
            if (row := _named(point.facts["advice"], ON_RANKS)) is not None:
                lines.append(f"- {point.at['case']}, on two ranks: {row['name']}")
        return lines

    def draw(self, result: Result, path: Path) -> None:
        drawing, axes = charts.figure(titled(result), width=9.0)
        followed = [number for number, point in enumerate(result.points) if by_training(point) is not None]
        for number, point in enumerate(result.points):
            advice, over = point.facts["advice"], by_training(point)
            if over is None:
                axes.text(number, 1.0, "nothing is faster", ha="center", va="bottom", fontsize=8)
            named = next((row["gain"] for row in advice["methods"] if row["name"] == advice["advised"]), None)
            for shift, value, label in (
                (-0.1, named and Spread(named["median"], named["low"], named["high"]), "as advised"),
                (0.1, over, "by training"),
            ):
                if value is not None:
                    words = label if number == followed[0] else None
                    charts.points_with_spread(axes, [number + shift], [value], words, int(shift > 0))
        charts.even_line(axes, "as fast as the strongest plain step")
        axes.set_xlim(-0.5, len(result.points) - 0.5)
        axes.set_xticks(range(len(result.points)), [point.at["case"] for point in result.points])
        axes.set_ylabel("speed over the strongest plain step (x)")
        axes.legend(fontsize=8)
        charts.save(drawing, path)


def by_training(point: Point, name: str = ADVISED) -> Spread | None:
    """Speed of the fits as advised over the plain ones, or on ranks over ddp; None where nothing was advised."""
    return point.speedup(PEERS[name][0], name, STEP) if point.has(name, STEP) else None


def _named(advice: dict[str, Any], name: str) -> dict[str, Any] | None:
    """Row of the method that an answer advises."""
    return next((row for row in advice["methods"] if row["name"] == advice[PEERS[name][1]]), None)


def off_by(over: Spread, named: float) -> Spread:
    """Distance of a gain by training from the one that was named; of its quartiles, the nearest and the farthest."""
    low, high = (end / named - 1 for end in over.reach)
    nearest = 0.0 if low <= 0 <= high else min(abs(low), abs(high))
    return Spread(abs(over.median / named - 1), nearest, max(abs(low), abs(high)))


def _advice(case: dict[str, Any], seconds: float, tick: Tick, *more: str) -> dict[str, Any]:
    """Answer of the command on a case, as a user runs it."""
    with tempfile.TemporaryDirectory() as folder:
        config, answer = Path(folder, "case.yaml"), Path(folder, "advice.json")
        blocks = {key: case[key] for key in ("model", "data", "batch_size", "optimizer")}
        OmegaConf.save(OmegaConf.create(blocks), config)
        command = [sys.executable, "-m", "retime.commands.main", "advise", "--config", str(config)]
        command += ["--json", str(answer), "--seconds", str(seconds), *more]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        lines = []
        with process:
            assert process.stderr is not None
            try:
                for line in process.stderr:
                    lines.append(line)
                    tick(line.strip().removeprefix("retime: "))
            except BaseException:
                process.terminate()
                raise
        if process.returncode:
            raise RuntimeError(f"retime advise ended with status {process.returncode}: {''.join(lines[-3:])}")
        advice: dict[str, Any] = json.loads(answer.read_text(encoding="utf-8"))
        return advice


def _way(row: dict[str, Any]) -> dict[str, Any]:
    """Way in which a fit runs, of a method or of the strongest plain step."""
    return {key: row.get(key) for key in ("strategy", "arguments", "callback", "ranks", "threads", "kept_heap")}


def _trained(case: dict[str, Any], settings: AdviceSettings, way: dict[str, Any], fused: bool) -> float:
    request = {"case": case, "seed": settings.seed, "steps": settings.steps, "way": way, "fused": fused}
    environment = environment_of("kept_heap", {}) if way["kept_heap"] else {}
    if way["ranks"]:
        ranks = loopback(2)
        return float(max(run_ranks(ranks, serve, request, timeout_s=settings.timeout_s, started_with=environment)))
    with closing(Worker(serve, None, settings.timeout_s, environment=environment)) as worker:
        return float(worker.ask(request))


def serve(request: dict[str, Any]) -> float:
    """The median step of a fit, of batches that are not alike."""
    case, way = request["case"], request["way"]
    torch.set_num_threads(way["threads"])
    asked = Method("", way["strategy"] or "auto", way["arguments"], callback=way["callback"] or "").options()
    batches = build_batches(case["data"], case["batch_size"], 8)
    batches = (batches * (_WARM_STEPS + request["steps"]))[: _WARM_STEPS + request["steps"]]
    with warnings.catch_warnings():
        for category in (NoEffectWarning, DifferenceWarning):
            warnings.simplefilter("ignore", category)
        model = build_model(case["model"], CPU, request["seed"])
        run = Run(lambda: asked["strategy"], {"fused": True} if request["fused"] else {})
        more = {"devices": 2 if way["ranks"] else 1, "callbacks": asked["callbacks"]}
        done = train(run, model, batches, case["optimizer"], **more)
    return statistics.median(done.step_ms[-request["steps"] :])
