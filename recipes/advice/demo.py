"""`make demo`: one training, plain and by each method of the package: time, memory, and whether the weights are equal.

Two processes train in turns on the same batches of real data, one by torch alone and one by the method, as in
`retime advise`. Both begin with the same weights, which are compared after the same number of steps.
"""

from __future__ import annotations

import os
import textwrap
from contextlib import closing
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from rich.console import Console

from retime.commands.advise_turns import FASTER, SLOWER, Limit, MethodError, Running, in_turns, judged, no_effect
from retime.commands.advise_worker import DDP, FIRST_STEPS, METHODS, PLAIN, Method, fit_in_turns, memory_budget
from retime.foundations import workers
from retime.foundations.measure import speedup
from retime.recipes.advice.settings import AdviceSettings
from retime.recipes.core import charts
from retime.recipes.core.build import CPU, build_batches, build_model
from retime.recipes.core.recipe import Measured, Recipe, Tick
from retime.recipes.core.results import Point, Result, Row
from retime.recipes.core.trainer_loop import Task, quiet_lightning
from retime.recipes.models import parameter_count

STEP, SPEED, PEAK = "step", "speed over plain", "peak"
IDENTICAL, CLOSE, DIFFERENT = "identical", "within tolerance", "DIFFERENT"
NO_EFFECT, LEFT_OUT = "no effect", "left out"
BUDGET = "memory_budget, half"
RANKS = 2
TOLERANCE = 100.0
"""How many times the plain training's own rounding weights may lie apart, as in `tests/contract/random_models`."""
_MIB, _COLUMNS = 2**20, 80
_COLOURS = {FASTER: "#009e73", SLOWER: "#d55e00"}

Rows = dict[tuple[str, str], Row]
"""By variant and quantity."""


class Demo(Recipe[AdviceSettings]):
    """One point: `cases` name a model, its data and the methods that are shown on it."""

    quantity = STEP
    on_cpu = "trains on a CPU"

    def points(self, settings: AdviceSettings) -> list[dict[str, Any]]:
        for name, case in settings.cases.items():
            if unknown := [one for one in case["methods"] if one not in (*METHODS, BUDGET)]:
                raise ValueError(
                    f"cases.{name}.methods has {unknown[0]!r}: choose from {', '.join([*METHODS, BUDGET])}"
                )
        if settings.steps <= FIRST_STEPS:
            raise ValueError(f"steps={settings.steps}: give {FIRST_STEPS + 1} or more, as weights are compared then")
        return [{}]

    def blocks(self, settings: AdviceSettings) -> int | None:
        return sum(len(case["methods"]) for case in settings.cases.values())

    def measure(self, settings: AdviceSettings, at: dict[str, Any], tick: Tick) -> Measured:
        rows: Rows = {}
        facts: dict[str, Any] = {}
        for name, case in settings.cases.items():
            with closing(_Case(settings, name, case, rows, facts)) as measuring:
                measuring.everything(tick)
        return Measured([*rows.values()], facts)

    def show(self, result: Result, console: Console) -> None:
        (point,) = result.points
        notes = [line for note in self.notes(result) for line in _wrapped(note)]
        for line in [*table(point), "", *notes, "", *paste(point)]:
            console.print(line, highlight=False, markup=False, soft_wrap=True)

    def notes(self, result: Result) -> list[str]:
        (point,) = result.points
        facts = methods_of(point)
        sentences = [f"{_short(name)}, {fact['verdict']}: {fact['why']}" for name, fact in facts.items() if fact["why"]]
        same = "identical: all bits of the weights are those of the plain training, on as many ranks"
        sentences.append("Peak: most resident bytes of a process, less those before training; of ranks the largest.")
        sentences.append(f"Weights are compared after {point.settings['steps']} steps from the same ones; {same}.")
        if apart := [fact for fact in facts.values() if "difference" in fact]:
            furthest = max(apart, key=lambda fact: float(fact["difference"]))
            sentences.append(
                f"Within tolerance: they lie apart by at most {TOLERANCE:g} times what two plain trainings do if one "
                f"takes the samples of each batch in reverse order. Here by {furthest['difference']:.1g} of their "
                f"length at most, two plain trainings by {furthest['rounding']:.1g}."
            )
        if any(fact.get("weights") == DIFFERENT for fact in apart):
            sentences.append("DIFFERENT weights are a bug: please report it, with result.json.")
        if any(fact["verdict"] == SLOWER for fact in facts.values()):
            sentences.append(
                "What is slower here, or takes more memory, pays elsewhere: "
                "each card, mechanisms/*/README.md, says where."
            )
        return sentences

    def draw(self, result: Result, path: Path) -> None:
        (point,) = result.points
        entries: list[tuple[str, str | None]] = []
        for plain, variants in groups_of(point).items():
            entries += [(_heading(point, plain), None), *((_short(one), one) for one in variants)]
        if not entries:
            charts.save(charts.only_text(result.title, self.notes(result)), path)
            return
        title = "\n".join([claim(point), _machine(point)])
        drawing, (speed, memory) = charts.panels(title, 2, 10.6, 1.5 + 0.28 * len(entries), sharey=True)
        box = {"facecolor": "white", "edgecolor": "none", "pad": 0.8}
        words = {"textcoords": "offset points", "va": "center", "fontsize": 8, "bbox": box}
        for place, (text, variant) in enumerate(entries):
            if variant is None:
                speed.text(0, place, text, transform=speed.get_yaxis_transform(), fontsize=8.5, va="center", bbox=box)
                continue
            fact, gain = point.facts[variant], point.spread(variant, SPEED)
            reach = [[gain.median - gain.low], [gain.high - gain.median]]
            colour = _COLOURS.get(fact["verdict"], charts.GREY)
            speed.errorbar(gain.median, place, xerr=reach, fmt="o", color=colour, capsize=3, markersize=5)
            speed.annotate(f"{gain.median:.2f} {fact['verdict']}", (gain.high, place), (8, 0), **words)
            peak, base = (point.values(name, PEAK)[0] for name in (variant, fact["over"]))
            memory.barh(place, peak / base, color=charts.COLOURS[0], height=0.6)
            memory.annotate(f"{peak:.0f} of {base:.0f} MiB", (peak / base, place), (5, 0), **words)
            memory.annotate(fact["weights"], (1.0, place), (8, 0), xycoords=memory.get_yaxis_transform(), **words)
        for axes, title in (
            (speed, "speed over the plain training (x)"),
            (memory, "peak memory over the plain one's (x)"),
        ):
            axes.axvline(1.0, color=charts.GREY, linewidth=1, linestyle="--", zorder=1)
            axes.set_title(title, fontsize=9)
            axes.grid(axis="y", visible=False)
        speed.margins(x=0.35)  # room for the words
        memory.set_xlim(0, 1.45 * max(1.0, *(bar.get_width() for bar in memory.patches)))
        shown = [(place, text) for place, (text, variant) in enumerate(entries) if variant is not None]
        speed.set_yticks([place for place, _ in shown], [text for _, text in shown], fontsize=8.5)
        speed.set_ylim(len(entries) - 0.5, -0.7)
        memory.annotate("weights", (1.0, -0.9), (8, 0), xycoords=memory.get_yaxis_transform(), **words)
        charts.save(drawing, path)


class _Case:
    """Measures the methods of one model; the plain training that they are compared with waits meanwhile."""

    def __init__(
        self, settings: AdviceSettings, name: str, case: dict[str, Any], rows: Rows, facts: dict[str, Any]
    ) -> None:
        self._settings, self._name, self._case, self._rows, self._facts = settings, name, case, rows, facts
        self._cores = len(os.sched_getaffinity(0))
        batches = build_batches(case["data"], case["batch_size"], RANKS * settings.steps)
        # as arrays: of a tensor a handle would be sent
        self._batches = [(inputs.numpy(), targets.numpy()) for inputs, targets in batches]
        self._base: Running | None = None
        self._base_method = PLAIN
        self._weights: Any = None
        self._plain_bytes = 0
        self._rounding: dict[str, float] = {}
        self._refused: dict[str, MethodError] = {}

    def close(self) -> None:
        """End the plain training."""
        base, self._base = self._base, None
        if base is not None:
            base.close()

    def everything(self, tick: Tick) -> None:
        """Measure all methods, those on one device first."""
        model = build_model(self._case["model"], CPU, self._settings.seed)
        workers.PRELOADED.extend([__name__, *{type(one).__module__ for one in model.modules()}])
        data, optimizer = (self._case[key]["_target_"].rpartition(".")[2] for key in ("data", "optimizer"))
        samples = f"{self._case['batch_size']} of {data} a step"
        self._facts[self._name] = f"{parameter_count(model) / 1e6:.2g} M parameters, {samples}, {optimizer}"
        for name in sorted(self._case["methods"], key=lambda name: METHODS.get(name, PLAIN).over_ddp):
            fact = self._fact(name)
            self._facts[f"{self._name}: {name}"] = fact
            tick(f"{name}: {fact['verdict']}")

    def _fact(self, name: str) -> dict[str, Any]:
        """Facts on a method; its numbers go into the rows."""
        fact: dict[str, Any] = {"verdict": LEFT_OUT, "why": "", "over": "", "trainer": ""}
        method = METHODS.get(name, PLAIN)
        if method.ranks and self._cores < RANKS:
            return fact | {"why": f"it trains on {RANKS} ranks, and this process may use {self._cores} core"}
        try:
            base = self._base_of(DDP if method.over_ddp else PLAIN)
        except MethodError as error:
            self.close()
            return fact | {"why": f"the plain training does not run: {error}"}
        if name == BUDGET:
            method = memory_budget(self._plain_bytes // 2)
        fact |= {"over": self._variant(self._base_method), "trainer": method.trainer(RANKS, {})}
        try:
            return fact | self._compared(name, method, base)
        except MethodError as error:
            if base.is_busy:  # its answer would be taken for the next one's
                self.close()
            return fact | {"why": str(error)}

    def _compared(self, name: str, method: Method, base: Running) -> dict[str, Any]:
        limit, steps = self._limit(), self._settings.steps
        with closing(self._start(method, limit)) as other:
            answer = other.steps(limit, steps - FIRST_STEPS, weights=True)
            weights = answer["weights"]
            if method.warm_steps > steps:
                answer = other.steps(limit, method.warm_steps - steps)
            before, after = in_turns(base, other, limit, self._settings.rounds)
        gain = speedup([ms for ms, _ in before], [ms for ms, _ in after])
        equality = self._equality(weights)  # its own training may fail: then this method has no rows
        variant, plain = f"{self._name}: {name}", self._variant(self._base_method)
        self._add(variant, STEP, "ms", [ms for ms, _ in after])
        self._add(variant, SPEED, "x", gain.rounds)
        self._add(variant, PEAK, "MiB", [max(peak for _, peak in after) / _MIB])
        self._add(plain, STEP, "ms", [ms for ms, _ in before])
        why = no_effect(answer["said"])
        verdict = {"verdict": NO_EFFECT if why else judged(gain), "why": why, "report": answer["report"]}
        return verdict | equality

    def _equality(self, weights: Any) -> dict[str, Any]:
        if np.array_equal(self._weights, weights):
            return {"weights": IDENTICAL}
        plain = self._variant(self._base_method)
        if plain not in self._rounding:  # by how much weights differ with the samples of its batches in reverse order
            limit = self._limit()
            with closing(self._start(self._base_method, limit, reverse=True)) as other:
                answer = other.steps(limit, self._settings.steps - FIRST_STEPS, weights=True)
            self._rounding[plain] = _apart(self._weights, answer["weights"])
        difference, rounding = _apart(self._weights, weights), self._rounding[plain]
        is_close = difference <= TOLERANCE * rounding
        return {"weights": CLOSE if is_close else DIFFERENT, "difference": difference, "rounding": rounding}

    def _base_of(self, method: Method) -> Running:
        """The plain training, on as many ranks; started if it is not there, but not a second time if that failed."""
        if method.strategy in self._refused:
            raise self._refused[method.strategy]
        if self._base is None or self._base_method is not method:
            self.close()
            limit = self._limit(3)  # the first process of all imports
            try:
                self._base, self._base_method = self._start(method, limit), method
                answer = self._base.steps(limit, self._settings.steps - FIRST_STEPS, weights=True)
            except MethodError as error:
                self._refused[method.strategy] = error
                raise
            self._weights = answer["weights"]
            step_ms, peak_bytes = self._base.block(limit, median(answer["ms"]))
            if method is PLAIN:
                self._plain_bytes = peak_bytes
            self._facts[self._variant(method)] = method.trainer(RANKS, {})
            self._add(self._variant(method), STEP, "ms", [step_ms])
            self._add(self._variant(method), PEAK, "MiB", [peak_bytes / _MIB])
        return self._base

    def _start(self, method: Method, limit: Limit, *, reverse: bool = False) -> Running:
        ranks = RANKS if method.ranks else 1
        steps = self._settings.steps
        by_rank = method is DDP or method.over_ddp  # ranks of a pipeline take the same batches
        request = {
            "method": method,
            "case": {key: self._case[key] for key in ("model", "optimizer")},
            "batches": [self._batches[rank::RANKS] if by_rank else self._batches[:steps] for rank in range(ranks)],
            "threads": max(1, self._cores // ranks),
            "devices": ranks,
            "seed": self._settings.seed,
            "reverse": reverse,
        }
        return Running(serve, request, None, ranks, limit)

    def _limit(self, times: int = 1) -> Limit:
        seconds = self._settings.seconds
        return Limit(times * seconds, f"{f'{times} times ' if times > 1 else ''}seconds={seconds:g}")

    def _variant(self, method: Method) -> str:
        return f"{self._name}: {'ddp' if method is DDP else 'plain'}"

    def _add(self, variant: str, quantity: str, unit: str, values: list[float]) -> None:
        """Rounds of a quantity, behind those that are there."""
        row = self._rows.setdefault((variant, quantity), Row(variant, quantity, unit, []))
        row.values.extend(round(value, 5) for value in values)


def _apart(one: Any, other: Any) -> float:
    """The distance of two vectors over the length of the first."""
    return float(np.linalg.norm(other - one) / np.linalg.norm(one))


def methods_of(point: Point) -> dict[str, dict[str, Any]]:
    """Facts on each method, by its variant's name."""
    return {name: fact for name, fact in point.facts.items() if isinstance(fact, dict)}


def groups_of(point: Point) -> dict[str, list[str]]:
    """The variants that were measured, by the plain one that they are compared with."""
    groups: dict[str, list[str]] = {}
    for variant, fact in methods_of(point).items():
        if point.has(variant, SPEED):
            groups.setdefault(fact["over"], []).append(variant)
    return groups


def table(point: Point) -> list[str]:
    """Table of what was measured, in 80 columns."""
    rows = [_machine(point)]
    for plain, variants in groups_of(point).items():
        rows += ["", *_wrapped(_heading(point, plain)), _line("", "step", "speed", "", "peak", "weights")]
        for one in (plain, *variants):
            ms, peak = median(point.values(plain, STEP)), f"{point.values(one, PEAK)[0]:.0f} MiB"
            speed, fact = "", {"verdict": "", "weights": ""}
            if one != plain:
                gain, fact = point.median(one, SPEED), point.facts[one]
                ms, speed = ms / gain, f"{gain:.2f}"  # in turns with plain steps, which differ from method to method
            step = f"{ms:.1f} ms" if ms < 100 else f"{ms:.0f} ms"
            rows.append(_line(f"  {_short(one)}", step, speed, fact["verdict"], peak, fact["weights"]))
    return rows


def paste(point: Point) -> list[str]:
    """The line for a Trainer: the fastest method of the first model on one device, if one is faster."""
    groups = groups_of(point)
    first = next((variants for plain, variants in groups.items() if not plain.endswith(": ddp")), [])
    facts = point.facts
    faster = [one for one in first if facts[one]["verdict"] == FASTER and facts[one]["weights"] != DIFFERENT]
    yours = "Which pays for your own model, `retime advise` measures."
    if not faster:
        return [*_wrapped(f"Nothing is faster than the plain training here. {yours}"), "    trainer = Trainer()"]
    best = max(faster, key=lambda one: point.median(one, SPEED))
    return [*_wrapped(f"Fastest here: {_short(best)}. {yours}"), f"    trainer = {point.facts[best]['trainer']}"]


def claim(point: Point) -> str:
    """The picture's title."""
    variants = [one for variants in groups_of(point).values() for one in variants]
    facts = [point.facts[one] for one in variants]
    small = sum(point.values(one, PEAK)[0] <= 0.9 * point.values(point.facts[one]["over"], PEAK)[0] for one in variants)
    counts = {word: sum(fact["weights"] == word for fact in facts) for word in (IDENTICAL, CLOSE, DIFFERENT)}
    words = ", ".join(f"{count} {word}" for word, count in counts.items() if count)
    faster = sum(fact["verdict"] == FASTER for fact in facts)
    return f"{faster} of {len(facts)} methods train faster than plain torch, {small} in less memory; weights: {words}"


def _machine(point: Point) -> str:
    processor, cores = (point.hardware.get(key, "unknown") for key in ("processor", "cores"))
    rounds, steps = point.settings["rounds"], point.settings["steps"]
    return f"{processor}, {cores} cores, {rounds} rounds in turns after {steps} steps"


def _heading(point: Point, plain: str) -> str:
    case, _, kind = plain.rpartition(": ")
    return f"{case}: {point.facts[case]}" if kind == "plain" else f"{case}: data parallel, on {RANKS} ranks"


def _short(variant: str) -> str:
    return variant.rpartition(": ")[2]


def _line(name: str, step: str, speed: str, verdict: str, peak: str, weights: str) -> str:
    return f"{name:<29}{step:>8}{speed:>6} {verdict:<9}{peak:>9}  {weights}".rstrip()


def _wrapped(text: str) -> list[str]:
    """Lines of at most 80 columns; no word is cut."""
    return textwrap.wrap(text, _COLUMNS, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)


def serve(request: dict[str, Any]) -> Any:
    """Train by `request["method"]`; it answers from inside of the fit, which does not return."""
    torch.set_num_threads(request["threads"])
    case, dims = request["case"], (0,) if request["reverse"] else ()
    arrays = request["batches"][request["rank"]]
    batches = [tuple(torch.from_numpy(array).flip(dims) for array in batch) for batch in arrays]
    try:
        task = Task(build_model(case["model"], CPU, request["seed"]), case["optimizer"], {})
        with quiet_lightning():
            fit_in_turns(task, batches, request["method"], devices=request["devices"], trainer={}, facts={})
    except Exception as error:  # whatever it was, it is the reason why this method is left out
        return {"error": " ".join(str(error).split()) or type(error).__name__, "missing": None}
