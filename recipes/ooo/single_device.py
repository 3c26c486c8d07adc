"""`ooo_fig7`, `ooo_fig7_more`, `ooo_fig7_compiled`: two streams in a Trainer against the plain step at its best.

Every fit has a process of its own: plain ones with every number of threads, compiled ones if wanted, and one with two
streams, each with every allocator, all from the same weights. Each first takes some steps alone on the machine: the one
with two streams those in which it searches. Then all take turns, a few steps each, so that a machine that becomes
slower does so for all of them. A value is the median of a turn's steps, ratios are those of one round, and `processes`
says how often all of it is done. The verdict holds two streams against the plain step with its best number of threads
and its best allocator, and both have that one. A search may take two streams off: a ratio is of all fits, and remarks
have each sort by itself.

In cases with ``fuse_updates`` two streams have updates on the sub-stream, and ``fused_optimizer`` is one of the plain
steps.

Processes more have bare loops. In each of `processes`, plain steps, steps on two streams, and steps from which these
were taken off take turns, so that what processes differ by is not among them. Another records one step of either kind,
kernel by kernel, and counts the bytes alive. The plain step is that of the verdict, in cases with ``fuse_updates`` the
best ``fused_optimizer``; two streams have the setting that the search of their last fit kept, or else the fastest that
it tried.

On a GPU (`hardware=cuda`, and the cases that say ``device: cuda``) fits of one process take turns: plain, compiled for
few launches, with the network's passes in torch's own CUDA graphs, and two streams without graphs, with them and by
search. CUDA events time the steps behind those of a search; a ratio is of the fits of one round.

A case takes `processes` times allocators times (a start of about 10 s and 50 to 80 steps of each fit). On two cores
`ooo_fig7` and `ooo_fig7_more` took 36 minutes each before they had turns in one process, `ooo_fig7_compiled` 40.
"""

from __future__ import annotations

import contextlib
import gc
import math
import statistics
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor

from retime.commands.advise_worker import FIRST_STEPS, METHODS, fit_in_turns
from retime.commands.advise_worker import PLAIN as PLAIN_STEP
from retime.commands.errors import one_line
from retime.foundations.measure import MemoryProbe, Spread, spread
from retime.foundations.workers import Worker, WorkerError, closing
from retime.mechanisms.two_streams import TwoStreamReport
from retime.recipes.core import charts
from retime.recipes.core.build import CPU, build_batches, build_model, loss_of
from retime.recipes.core.claims import Claim, Comparison, Target, amount, show
from retime.recipes.core.measure import interleave
from retime.recipes.core.recipe import CaseRecipe, Measured, Tick
from retime.recipes.core.results import Point, Result, Row, percent_more, ratio, titled
from retime.recipes.core.trainer_loop import Batch, Run, Task, quiet_lightning, train
from retime.recipes.core.verdicts import inside
from retime.recipes.cpu_memory.allocators import ALLOCATORS, environments_of
from retime.recipes.ooo import one_step
from retime.recipes.ooo.claims import claim
from retime.recipes.ooo.settings import SingleDeviceSettings
from retime.strategies import OOOSingleDeviceStrategy

STEP, ALIVE, TURNED = "step", "alive at the peak", "step of one process"
PLAIN, COMPILED, GRAPH, TWO_STREAMS = "plain", "compiled", "CUDA graph", "two streams"
SEARCH_STEPS = 40
"""Steps of two streams before the timed ones: what a search may take."""
WARM_UP_STEPS = 8
"""Of the other fits."""
NOT_SLOWER, OVER_GRAPH = 0.99, 1.05
TAKEN_OFF = "two streams taken off, over the plain step of their process"
PEAKS = 3
"""How often bytes are counted."""
COMPILER_CACHE = "TORCHINDUCTOR_CACHE_DIR"


class SingleDevice(CaseRecipe[SingleDeviceSettings]):
    """A point a network; a variant a number of threads, plain or compiled, or two streams, with an allocator."""

    quantity = STEP

    def points(self, settings: SingleDeviceSettings) -> list[dict[str, Any]]:
        device = settings.hardware.device
        points = [at for at in super().points(settings) if settings.cases[at["case"]].get("device", "cpu") == device]
        if not points:
            raise ValueError(f"{settings.name} has no case with device: {device}: choose hardware=cpu")
        return points

    def references(self, point: Point) -> dict[str, str]:
        best = [fastest(point, kind) for kind in (PLAIN, COMPILED, GRAPH)]
        return {f"speed over {label}": label for label in best if label is not None}

    def measure(self, settings: SingleDeviceSettings, at: dict[str, Any], tick: Tick) -> Measured:
        case = settings.cases[at["case"]]
        if settings.hardware.device != "cpu":
            return on_device(settings, case, tick)
        threads = torch.get_num_threads()
        request = {"do": "begin", "case": case, "seed": settings.seed}
        missing, times, last = dict[str, str](), dict[str, list[float]](), dict[str, dict[str, Any]]()
        facts: dict[str, Any] = {"missing": missing, "batch size": case["batch_size"], "kept": {}}
        fuses, fused = bool(case.get("fuse_updates")), "fused_optimizer"
        kinds: dict[str, dict[str, Any]] = {PLAIN: {}} | ({f"{PLAIN}, {fused}": {"method": fused}} if fuses else {})
        numbers = range(1, threads + 1)
        fits = {one_step.label(kind, n): {"threads": n, **more} for kind, more in kinds.items() for n in numbers}
        environments = environments_of(settings.allocators, settings.libraries, missing)
        with tempfile.TemporaryDirectory() as cache:
            if settings.compiled:
                first_s = _compile(settings, request, cache, threads, missing)
                fits |= {label: {"threads": n, "compiled": True} for label, (n, _) in first_s.items()}
                facts["first compiled step (s)"] = {label: seconds for label, (_, seconds) in first_s.items()}
            fits[TWO_STREAMS] = {"threads": threads, "method": f"ooo_single_device{' + updates' if fuses else ''}"}
            everything = {
                f"{label}, {ALLOCATORS[name].label}": (fit, environment)
                for name, environment in environments.items()
                for label, fit in fits.items()
            }
            turn = {"steps": case.get("steps", settings.steps)}
            for _ in range(settings.processes if everything else 0):
                workers: dict[str, Worker] = {}
                with closing(workers):
                    for label, (_, environment) in everything.items():
                        variables = {**environment, COMPILER_CACHE: cache}
                        workers[label] = Worker(Server, None, settings.timeout_s, environment=variables)
                        workers[label].tell(request)
                    for worker in workers.values():
                        worker.answer()
                    for label, (fit, _) in everything.items():
                        workers[label].ask({"do": "fit", **fit})
                        first = SEARCH_STEPS if label.startswith(TWO_STREAMS) else WARM_UP_STEPS
                        workers[label].ask({"steps": first - FIRST_STEPS})
                    blocks = {label: partial(worker.ask, turn) for label, worker in workers.items()}
                    by_label = interleave(blocks, settings.rounds, 0, tick)
                for label, answers in by_label.items():
                    times.setdefault(label, []).extend(statistics.median(answer["ms"]) for answer in answers)
                    if label.startswith(TWO_STREAMS):
                        facts["kept"].setdefault(label, []).append(answers[-1]["on"])
                        last[label] = answers[-1]
        facts["reports"], facts["layers"] = ({of: last[of][key] for of in last} for key in ("report", "layers"))
        rows = [Row(label, STEP, "ms", [round(ms, 4) for ms in values]) for label, values in times.items()]
        if environments:
            tick("one step")
            ours, peer, _ = best_gain(Point(at, {}, rows), f"{PLAIN}, {fused}" if fuses else PLAIN)
            fit, environment = everything[str(peer)]
            two = {"threads": threads, **{key: last[str(ours)][key] for key in ("layers", "forward")}}
            drawn = {PLAIN: {"threads": fit["threads"], "fused": fuses}, TWO_STREAMS: two}
            facts[one_step.SETTINGS] = f"{peer}, and {last[str(ours)]['setting']}"
            rows += _look(settings, request, environment, drawn, facts)
        return Measured(rows, facts)

    def compare(self, result: Result) -> list[Comparison]:
        lines = []
        for point in result.points:
            wanted = point.settings["case"].get("wanted", NOT_SLOWER)
            over_graph = OVER_GRAPH if wanted > 1 else NOT_SLOWER
            against: tuple[tuple[str, Claim | Target], ...] = (
                (PLAIN, Target("two streams over the best plain step", "x", wanted)),
                (COMPILED, claim("over-compiled")),
                (GRAPH, Target("two streams over CUDA graphs alone", "x", over_graph)),
            )
            for kind, row in against:
                ours, best, over = best_gain(point, kind)
                if ours is not None and over is not None:
                    note = f"{_case(point)}, {_how(ours)}, over {best}; {on_and_off(point, ours, over)}"
                    lines.append(Comparison(row, over, note + (f"; {verdict(over, wanted)}" if kind == PLAIN else "")))
            if (gain := kept_on(point)) is not None:
                threads = gain[0].rpartition(", ")[2]
                same = f"{one_step.FUSED if point.settings['case'].get('fuse_updates') else PLAIN}, {threads}"
                off = point.speedup(same, f"{one_step.TAKEN_OFF}, {threads}", TURNED)
                note = f"{_case(point)}, over {same}; {verdict(off, NOT_SLOWER)}"
                lines.append(Comparison(Target(TAKEN_OFF, "x", NOT_SLOWER), off, note))
        for published in (claim(f"figure-7-{network}") for network in ("mobilenet", "densenet", "resnet")):
            network = published.what.partition(",")[0]
            for point in result.points:
                over = best_gain(point, PLAIN)[2]
                if over is not None and point.at["case"].startswith(network):
                    here = "a CPU" if _is_on_cpu(point) else "over the plain step"
                    note = f"the paper's: a V100, over XLA, kernels issued ahead; here {here}, {_case(point)}"
                    lines.append(Comparison(published, over, note))
        for point in filter(_is_looked_at, result.points):
            if more := percent_more(point, TWO_STREAMS, PLAIN, ALIVE):
                kept = "holds" if more.median <= claim("figure-9-peak").value else "does not hold"
                mib = amount(point.median(TWO_STREAMS, ALIVE) - point.median(PLAIN, ALIVE), "MiB")
                lines.append(Comparison(claim("figure-9-peak"), more, f"{point.at['case']}: {mib} more; {kept}"))
        return lines

    def notes(self, result: Result) -> list[str]:
        lines = [ON_CPU if _is_on_cpu(result.points[0]) else ON_DEVICE]
        if any(map(_is_drawn, result.points)):
            lines.append(
                "The picture has one step of each case, of a bare loop too; where no setting of it is named, the plain "
                "step has all threads, and two streams have half of them each. How long a core ran is processor time, "
                "in which threads of kernels that wait for work count as running."
            )
        for point in result.points:
            case = point.at["case"]
            lines += [f"- {case}: no {name}: {reason}" for name, reason in point.facts["missing"].items()]
            first_s = point.facts.get("first compiled step (s)", {})
            lines += [f"- {case}: {label} has a first step of {s:g} s, which compiles" for label, s in first_s.items()]
            plain = "the best plain step of the same allocator" if _is_on_cpu(point) else "the plain step"
            for label, over in gains(point).items():
                sorts = f"{_how(label)}, {on_and_off(point, label, over)}"
                lines.append(f"- {case}: two streams over {plain}: {show(over, 'x')} with {sorts}")
            if (kept := kept_on(point)) is not None:
                lines.append(
                    f"- {case}: two streams that stay on, over {kept[0]} of their process: {show(kept[1], 'x')}"
                )
            lines += [f"- {case}, {label}: {report}" for label, report in point.facts["reports"].items()]
            if one_step.SETTINGS in point.facts:
                lines.append(f"- {case}: drawn are {point.facts[one_step.SETTINGS]}.")
        return lines

    def draw(self, result: Result, path: Path) -> None:
        steps = [point for point in result.points if _is_drawn(point)]
        rows = -(-len(steps) // 2)
        ratios = {"height_ratios": [4.0, *[1.4] * rows]}
        drawing, (whole, unused, *panels) = charts.panels(
            titled(result), 2 + len(steps), width=10.6, height=5.2 + 1.9 * rows, rows=1 + rows, **ratios
        )
        unused.remove()
        whole.set_subplotspec(whole.get_gridspec()[0, :])
        labels = sorted({label for point in result.points for label in gains(point)})
        series = [(f"over plain, {_how(one)}", [gains(point).get(one) for point in result.points]) for one in labels]
        for kind, words in ((COMPILED, "the best compiled step"), (GRAPH, "a CUDA graph alone")):
            peers = [best_gain(point, kind)[2] for point in result.points]
            series += [(f"over {words}", peers)] if any(peers) else []
        turned = [gain and gain[1] for gain in map(kept_on, result.points)]
        series += [("over plain, kept on in one process", turned)] if any(turned) else []
        charts.beside(whole, series, 0.16)
        charts.even_line(whole, "equally fast")
        whole.set_xticks(range(len(result.points)), [p.at["case"] for p in result.points], rotation=25, ha="right")
        whole.set_ylabel("steps per second of two streams\nagainst another step (x)")
        whole.legend(fontsize=8)
        for axes, point in zip(panels, steps, strict=True):
            over = best_gain(point, PLAIN)[2]
            gain = "" if over is None else f": {amount(over.median, 'x')} in fits"
            one_step.draw(axes, f"{point.at['case']}{gain}", point.facts)
        if steps:
            charts.colour_legend(drawing, one_step.KINDS, title=one_step.LEGEND, title_fontsize=8)
        charts.save(drawing, path)


ON_CPU = (
    "The best plain step is the fastest over its numbers of threads and its allocators, and two streams have the "
    "same allocator. All take turns in each round, and quartiles are over rounds. A fit whose search took two "
    "streams off runs plain steps; ratios pool it with fits that kept them, and remarks have each by itself where "
    "there are both. Steps of one process are those of bare loops that take turns with one heap, as processes "
    "differ by more than two streams gain; quartiles are over the rounds of all such processes. Steps from which "
    "two streams were taken off have the code of those that they are held against: their ratio shows what such "
    "turns can tell apart. Bytes alive are those of tensors of 16 KiB and more and of oneDNN's scratch, counted in "
    "a bare loop in which two streams stay on."
)
ON_DEVICE = (
    f"Fits take turns in each round, and quartiles are over rounds. CUDA events time the steps after {SEARCH_STEPS} of "
    "warm-up. A CUDA graph alone is torch's: forward and backward pass are captured, loss and update are not. Bytes "
    "alive are those of the device's allocator, without graphs, above what it had before the fit."
)


def _is_on_cpu(point: Point) -> bool:
    return str(point.settings.get("hardware", {}).get("device", "cpu")) == "cpu"


def _compile(
    settings: SingleDeviceSettings, request: dict[str, Any], cache: str, threads: int, missing: dict[str, str]
) -> dict[str, tuple[int, float]]:
    """Compile for each number of threads, so that later processes find it done; the number and seconds, by label."""
    compiled: dict[str, tuple[int, float]] = {}
    limit_s, environment = settings.compile_limit_s, {COMPILER_CACHE: cache}
    for number in range(1, threads + 1):
        label = one_step.label(COMPILED, number)
        try:
            with contextlib.closing(Worker(Server, request, limit_s, environment=environment)) as worker:
                compiled[label] = number, round(worker.ask({"do": "compile", "threads": number}), 2)
        except WorkerError as error:
            took_long = f"compiling takes more than {limit_s:g} s (compile_limit_s)"
            missing[label] = took_long if "no answer" in str(error) else str(error).strip().splitlines()[0]
    return compiled


def _look(
    settings: SingleDeviceSettings,
    request: dict[str, Any],
    environment: dict[str, str],
    drawn: dict[str, dict[str, Any]],
    facts: dict[str, Any],
) -> list[Row]:
    """One step of either kind goes to `facts`; rows of steps in turns, and of peaks if bytes can be counted here."""
    turned = dict[str, list[float]]()
    for number in range(settings.processes):
        turns = {"do": "turns", "rounds": settings.rounds, "two": drawn[TWO_STREAMS], "first": number}
        with contextlib.closing(Worker(Server, request, settings.timeout_s, environment=environment)) as worker:
            for label, values in worker.ask(turns).items():
                turned.setdefault(label, []).extend(values)
    rows = [Row(label, TURNED, "ms", values) for label, values in turned.items()]
    with contextlib.closing(Worker(Server, request, settings.timeout_s, environment=environment)) as worker:
        ask = worker.ask
        facts |= ask({"do": "both_steps", **drawn})
        which = {key: drawn[TWO_STREAMS][key] for key in ("threads", "layers")}
        try:
            for label, two in ((PLAIN, False), (TWO_STREAMS, True)):
                peaks = [ask({"do": "peak_bytes", "which": {**which, "two": two}}) for _ in range(PEAKS)]
                rows.append(Row(label, ALIVE, "MiB", [round(peak / 2**20, 4) for peak in peaks]))
        except WorkerError as error:
            facts["missing"][ALIVE] = str(error)
    return rows


def _case(point: Point) -> str:
    """The case's name, with its blocks' layers where they are not those that the network's name stands for."""
    blocks = point.settings["case"].get("model", {}).get("blocks")
    return f"{point.at['case']} (blocks of {', '.join(map(str, blocks))} layers)" if blocks else str(point.at["case"])


def _is_looked_at(point: Point) -> bool:
    """Return whether its loop did what its fits did: one recorded before ``layers`` were had no fused updates."""
    return not point.settings["case"].get("fuse_updates") or "layers" in point.facts


def _is_drawn(point: Point) -> bool:
    return _is_looked_at(point) and one_step.BUSY in point.facts


def _how(label: str) -> str:
    """With which allocator two streams ran, or by what on a device."""
    return label.removeprefix(f"{TWO_STREAMS}, ")


def fastest(point: Point, kind: str, allocator: str | None = None) -> str | None:
    """The fastest variant of a kind (plain, compiled, two streams), of one allocator if it is given."""
    labels = [label for label in point.variants(STEP) if label.startswith(f"{kind}, ")]
    labels = [label for label in labels if allocator is None or label.endswith(f", {allocator}")]
    return point.fastest(labels, STEP)


def best_gain(point: Point, kind: str) -> tuple[str | None, str | None, Spread | None]:
    """Two streams, the fastest variant of a kind, and the speed over it; both have the allocator of the latter.

    With the best allocator of each side, the ratio would be one of allocators too.
    """
    best = fastest(point, kind)
    allocator = (best or "").partition(" thread")[2].partition(", ")[2]  # of a device's variants there is none
    ours = fastest(point, TWO_STREAMS, allocator or None)
    return ours, best, ratio(point, best, ours or "")


def gains(point: Point) -> dict[str, Spread]:
    """Two streams over the best plain step of the same allocator, by variant; the fastest allocator first."""
    ours = sorted((point.median(label, STEP), label) for label in point.variants(STEP) if label.startswith(TWO_STREAMS))
    plain = {label: fastest(point, PLAIN, _how(label) if _is_on_cpu(point) else None) for _, label in ours}
    return {label: point.speedup(best, label, STEP) for label, best in plain.items() if best is not None}


def kept_on(point: Point) -> tuple[str, Spread] | None:
    """The best plain step of those that took turns in one process, and the speed of two streams over it; None: none."""
    best = point.fastest([label for label in point.variants(TURNED) if label.startswith(PLAIN)], TURNED)
    return None if best is None else (best, point.speedup(best, TWO_STREAMS, TURNED))


def on_and_off(point: Point, ours: str, over: Spread) -> str:
    """Number of fits that kept two streams on; where some did and others did not, the speed of each sort by itself."""
    on = point.facts["kept"][ours]  # by fit, each of which has as many rounds
    each, words = len(over.rounds) // len(on), f"on in {sum(on)} of {len(on)} fits"
    kept, off = ([one for at, one in enumerate(over.rounds) if on[at // each] is sort] for sort in (True, False))
    more = f": {show(spread(kept), 'x')}, off by itself in the others: {show(spread(off), 'x')}" if kept and off else ""
    return words + more


def verdict(over: Spread, wanted: float) -> str:
    """Holds, does not hold, or undecided where the quartiles lie on both sides."""
    words = {True: "holds", False: "does not hold", None: "undecided: the quartiles lie on both sides"}
    return words[inside(over, wanted, math.inf)]


class Server(one_step.BareLoops):
    """Fits of a Trainer too."""

    def compile(self, request: dict[str, Any]) -> float:
        """Return the seconds of compiling."""
        torch.set_num_threads(request["threads"])
        return self._compiled()[1]

    def fit(self, request: dict[str, Any]) -> None:
        """Train; it answers from inside of the fit with the steps of each turn and what two streams report."""
        torch.set_num_threads(request["threads"])
        case, method = self._case, METHODS[request["method"]] if "method" in request else PLAIN_STEP
        model = self._compiled()[0] if request.get("compiled") else build_model(case["model"], CPU, self._seed)
        task = Task(model, case["optimizer"], case.get("flags", {}))
        batches = build_batches(case["data"], case["batch_size"], 1)
        torch.manual_seed(0)  # dropout draws the same in every fit
        with quiet_lightning():
            fit_in_turns(task, batches, method, devices=1, trainer={}, facts={}, of_report=_kept)

    def _compiled(self) -> tuple[Any, float]:
        """The model, compiled in a first step, and the seconds of that."""
        case = self._case
        torch.compiler.reset()  # what an earlier fit has compiled is for another number of threads
        step: Any = torch.compile(build_model(case["model"], CPU, self._seed))
        ((inputs, targets),) = build_batches(case["data"], case["batch_size"], 1)
        started = perf_counter()
        loss_of(step(inputs), targets).backward()  # type: ignore[no-untyped-call]
        seconds = perf_counter() - started
        step.zero_grad()
        return step, seconds


def _kept(report: Any) -> dict[str, Any]:
    """Report of two streams, if this is theirs: in a line, whether they are on, and their fastest setting."""
    if not isinstance(report, TwoStreamReport):
        return {}
    on = report.setting is not None and report.setting.two_streams
    tried = {setting: ms for setting, ms in report.tried_ms.items() if setting.two_streams}
    best = report.setting if on else min(tried, key=tried.__getitem__, default=None)
    layers, forward = (None, 0) if best is None else (best.layers, best.forward_threads)
    names = None if layers is None else sorted(name.removeprefix("model.") for name in layers)  # a Loop's
    words = {"report": report.one_line, "setting": str(best or TWO_STREAMS)}
    return {**words, "on": on, "layers": names, "forward": forward}


EAGER = "eager"
WAYS: dict[str, Callable[[], Any]] = {
    f"{PLAIN}, {EAGER}": lambda: "auto",
    f"{COMPILED}, reduce-overhead": lambda: "auto",
    f"{GRAPH}, one stream": lambda: "auto",
    f"{TWO_STREAMS}, {EAGER}": partial(OOOSingleDeviceStrategy, threads=(1, 1)),
    f"{TWO_STREAMS}, CUDA graphs": partial(OOOSingleDeviceStrategy, threads=(1, 1), graph=True),
    f"{TWO_STREAMS}, search": partial(OOOSingleDeviceStrategy, graph=True),
}
"""Strategies of the fits on a device, by variant; with threads given there is no search."""


class GraphedByTorch(Callback):
    """Has the passes of a fit's network in torch's own CUDA graphs; a teardown moves what they were captured with."""

    def __init__(self, inputs: Tensor) -> None:
        self._inputs = inputs

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._model = pl_module.get_submodule("model")
        torch.cuda.make_graphed_callables(self._model, (self._inputs,), pool=torch.cuda.graph_pool_handle())

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        del self._model.forward


def on_device(settings: SingleDeviceSettings, case: dict[str, Any], tick: Tick) -> Measured:
    """Measure a case on the settings' device; why a way is missing stands in the facts."""
    device, missing = torch.device(settings.hardware.device), dict[str, str]()
    steps = 1 + SEARCH_STEPS + case.get("steps", settings.steps)
    batches = build_batches(case["data"], case["batch_size"], 1, device) * steps
    blocks: dict[str, Callable[[], tuple[float, float, Any]]] = {}
    for label in WAYS:
        model: Any = build_model(case["model"], CPU, settings.seed)
        model = torch.compile(model, mode="reduce-overhead") if label.startswith(COMPILED) else model
        blocks[label] = partial(_fit_on_device, label, model, case, batches, device)
        try:
            blocks[label]()  # compiles
        except Exception as error:  # whatever it was, it is the reason why this way is not there
            if label.startswith(PLAIN):
                raise
            missing[label] = one_line(error) or type(error).__name__
            del blocks[label]
    results = interleave(blocks, settings.rounds, 0, tick)
    rows = [Row(label, STEP, "ms", [round(ms, 4) for ms, _, _ in fits]) for label, fits in results.items()]
    eager = {name: results.get(f"{name}, {EAGER}", []) for name in (PLAIN, TWO_STREAMS)}
    if all(eager.values()):
        rows += [Row(name, ALIVE, "MiB", [round(mib, 4) for _, mib, _ in fits]) for name, fits in eager.items()]
    ours = {name: [_kept(one) for *_, one in fits] for name, fits in results.items() if name.startswith(TWO_STREAMS)}
    facts = {
        "missing": missing,
        "batch size": case["batch_size"],
        "reports": {label: reports[-1]["report"] for label, reports in ours.items()},
        "kept": {label: [report["on"] for report in reports] for label, reports in ours.items()},
    }
    return Measured(rows, facts)


def _fit_on_device(
    label: str, model: Any, case: dict[str, Any], batches: list[Batch], device: torch.device
) -> tuple[float, float, Any]:
    """Train; return the median step in ms, the MiB of the peak, and what two streams report."""
    gc.collect()  # an earlier fit is a reference cycle
    strategy = WAYS[label]()
    callbacks = [GraphedByTorch(batches[0][0])] if label.startswith(GRAPH) else []
    run, before, probe = Run(lambda: strategy, case.get("flags", {})), MemoryProbe(device), MemoryProbe(device)
    before.start()
    before.stop()
    probe.start()
    training = train(run, model, batches, case["optimizer"], device=device.type, callbacks=callbacks)
    probe.stop()
    peak_bytes = probe.peaks()["batch"] - before.peaks()["batch"]
    report = None if strategy == "auto" else strategy.report()
    return statistics.median(training.step_ms[SEARCH_STEPS:]), peak_bytes / 2**20, report
