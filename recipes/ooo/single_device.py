"""`ooo_fig7`: two streams on one device inside a Trainer, against the plain step at its best number of threads.

Every allocator has processes of its own. In each, plain fits with every number of threads and a fit with two streams
take turns from the same weights, all of one length: two streams search in their first steps, and the last steps of
every fit are timed. A value is the median over one process's rounds, and a ratio compares values of one process, so of
one allocator. Where the search has taken two streams off, a ratio shows what the comparison itself scatters.
"""

from __future__ import annotations

import statistics
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import torch

from retime.foundations.messages import DifferenceWarning, NoEffectWarning
from retime.recipes.core import charts
from retime.recipes.core.build import CPU, build_batches, build_model
from retime.recipes.core.claims import Comparison, Target
from retime.recipes.core.measure import Spread, interleave, speedup, spread
from retime.recipes.core.of_points import titled
from retime.recipes.core.recipe import CaseRecipe, Measured, Tick
from retime.recipes.core.results import Point, Result, Row
from retime.recipes.core.schema import AllocatorSettings
from retime.recipes.core.trainer_loop import Run, train
from retime.recipes.core.workers import Answer, Worker, closing
from retime.recipes.cpu_memory.allocators import ALLOCATORS, NoAllocatorError, environment_of
from retime.recipes.ooo.claims import FIGURE_7

STEP = "step"
TWO_STREAMS = "two streams"
SEARCH_STEPS = 40
"""Steps of every fit before the timed ones: what a search may take."""

NOT_SLOWER = 0.99


class SingleDevice(CaseRecipe[AllocatorSettings]):
    """A point a network; a variant a number of threads, or two streams, with an allocator."""

    quantity = STEP

    def references(self, point: Point) -> dict[str, str]:
        best = best_plain(point)
        return {} if best is None else {f"speed over {best}": best}

    def measure(self, settings: AllocatorSettings, at: dict[str, Any], tick: Tick) -> Measured:
        if settings.hardware.device != "cpu":
            raise ValueError(f"{settings.name} compares allocators and threads of a CPU: choose hardware=cpu")
        case = settings.cases[at["case"]]
        threads = torch.get_num_threads()
        missing: dict[str, str] = {}
        times: dict[str, list[float]] = {}
        reports: dict[str, str] = {}
        kept: dict[str, list[bool]] = {}
        for name in settings.allocators:
            try:
                environment = environment_of(name, settings.libraries)
            except NoAllocatorError as error:
                missing[name] = str(error)
                continue
            for _ in range(settings.processes):
                request = {"case": case, "steps": case.get("steps", settings.steps), "seed": settings.seed}
                workers = {"": Worker(serve, request, settings.timeout_s, environment=environment)}
                with closing(workers):
                    ask = workers[""].ask
                    fits = {_plain(n): {"threads": n, "two": False} for n in range(1, threads + 1)}
                    fits[TWO_STREAMS] = {"threads": threads, "two": True}
                    found = interleave({k: partial(ask, v) for k, v in fits.items()}, settings.rounds, 0, tick)
                for label, answers in found.items():
                    label = f"{label}, {ALLOCATORS[name].label}"
                    times.setdefault(label, []).append(statistics.median(answer["ms"] for answer in answers))
                    if answers[-1]["report"]:
                        reports[label] = answers[-1]["report"]
                        kept.setdefault(label, []).extend(answer["on"] for answer in answers)
        rows = [Row(label, STEP, "ms", [round(ms, 4) for ms in values]) for label, values in times.items()]
        facts = {"missing": missing, "batch size": case["batch_size"], "reports": reports, "kept": kept}
        return Measured(rows, facts)

    def compare(self, result: Result) -> list[Comparison]:
        lines = []
        for point in result.points:
            wanted = result_case(point).get("wanted", NOT_SLOWER)
            for label, over in gains(point).items():
                on = point.facts["kept"][label]
                note = f"{point.at['case']}, {label.partition(', ')[2]}; on in {sum(on)} of {len(on)} fits"
                note += f"; {verdict(over, wanted)}"
                lines.append(Comparison(Target("two streams over the best plain step", "x", wanted), over, note))
        for claim in FIGURE_7:
            network = claim.what.partition(",")[0]
            like = next((one for one in result.points if one.at["case"].startswith(network)), None)
            best = None if like is None else next(iter(gains(like).values()), None)
            note = "the paper's: a V100, over XLA, kernels issued ahead; here a CPU" if best is not None else ""
            lines.append(Comparison(claim, best, note))
        return lines

    def notes(self, result: Result) -> list[str]:
        lines = [
            "The plain step is the fastest over its numbers of threads, with the same allocator as two streams. "
            "Quartiles are over processes.",
        ]
        for point in result.points:
            lines += [f"- {point.at['case']}: no {name}: {reason}" for name, reason in point.facts["missing"].items()]
            lines += [f"- {point.at['case']}, {label}: {said}" for label, said in point.facts["reports"].items()]
        return lines

    def draw(self, result: Result, path: Path) -> None:
        drawing, axes = charts.figure(titled(result), width=max(8.0, 1.1 * len(result.points)), height=4.8)
        labels = sorted({label for point in result.points for label in gains(point)})
        for index, label in enumerate(labels):
            there = [
                (number, gains(point)[label]) for number, point in enumerate(result.points) if label in gains(point)
            ]
            shifted = [number + 0.16 * (index - (len(labels) - 1) / 2) for number, _ in there]
            charts.points_with_spread(axes, shifted, [over for _, over in there], label.partition(", ")[2], index)
        charts.even_line(axes, "the best plain step")
        axes.set_xticks(range(len(result.points)), [p.at["case"] for p in result.points], rotation=35, ha="right")
        axes.set_ylabel("steps per second against the plain\nstep at its best number of threads (x)")
        axes.legend()
        charts.save(drawing, path)


def _plain(threads: int) -> str:
    return f"plain, {threads} thread{'s' if threads > 1 else ''}"


def result_case(point: Point) -> dict[str, Any]:
    """The settings of a point's case."""
    case: dict[str, Any] = point.settings["case"]
    return case


def best_plain(point: Point, allocator: str | None = None) -> str | None:
    """The fastest plain variant, of one allocator if it is given."""
    plain = [v for v in point.variants(STEP) if not v.startswith(TWO_STREAMS)]
    plain = [v for v in plain if allocator is None or v.endswith(f", {allocator}")]
    return min(plain, key=lambda name: spread(point.values(name, STEP)).median, default=None)


def gains(point: Point) -> dict[str, Spread]:
    """Two streams over the best plain step of the same allocator, by variant; the fastest allocator first."""
    found: dict[str, Spread] = {}
    ours = [label for label in point.variants(STEP) if label.startswith(TWO_STREAMS)]
    for label in sorted(ours, key=lambda label: spread(point.values(label, STEP)).median):
        best = best_plain(point, label.removeprefix(f"{TWO_STREAMS}, "))
        if best is not None:
            found[label] = speedup(point.values(best, STEP), point.values(label, STEP))
    return found


def verdict(over: Spread, wanted: float) -> str:
    """Holds, does not hold, or undecided where the quartiles lie on both sides."""
    if over.low <= wanted <= over.high and over.low < over.high:
        return "undecided: the quartiles lie on both sides"
    return "holds" if over.median >= wanted else "does not hold"


class Server:
    """In a process of its own: the first request builds, each further one is a fit."""

    def __init__(self) -> None:
        self._request: dict[str, Any] = {}

    def answer(self, request: dict[str, Any]) -> Any:
        """Build (answers nothing), or fit (answers milliseconds of a step and the report)."""
        if "case" in request:
            self._request = request
            return None
        return self._fit(request["threads"], request["two"])

    def _fit(self, threads: int, two: bool) -> dict[str, Any]:
        from retime.strategies import OOOSingleDeviceStrategy

        case = self._request["case"]
        torch.set_num_threads(threads)
        strategy = OOOSingleDeviceStrategy() if two else "auto"
        steps = self._request["steps"] + SEARCH_STEPS
        batches = build_batches(case["data"], case["batch_size"], 1) * steps
        model = build_model(case["model"], CPU, self._request["seed"])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DifferenceWarning)
            warnings.simplefilter("ignore", NoEffectWarning)  # the report says it
            trained = train(Run(lambda: strategy, case.get("flags", {})), model, batches, case["optimizer"])
        report = strategy.report() if isinstance(strategy, OOOSingleDeviceStrategy) else None
        on = report is not None and report.setting is not None and report.setting.two_streams
        ms = statistics.median(trained.step_ms[-self._request["steps"] :])
        return {"ms": ms, "report": "" if report is None else str(report), "on": on}


def serve() -> Answer:
    """For :class:`Worker`."""
    return Server().answer
