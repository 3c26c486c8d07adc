"""`retime advise`: which methods of this package pay for your own training step, measured on this machine.

    retime advise my_package.models:model_and_batch --optimizer torch.optim.AdamW
    retime advise my_package.models:module_and_data --devices 2 --memory 8GiB --json advice.json --html advice.html
    retime advise --config conf/train.yaml --network 10gbit --ranks 8 model.width=64

It takes what `retime plan` takes. Each method trains in processes of its own, which build the model from that name
again, with one batch over and over, in turns with the strongest plain step; methods for several ranks with `ddp` on as
many. What is faster is measured once more in new processes before it is advised. What a Trainer is to be told besides
goes in by --trainer, such as --trainer gradient_clip_val=1.0, as some methods do nothing under it. docs/advise.md has
what is measured, and the words of the answer.

The answer on stdout ends with the line to paste. stderr says what is being measured. Ctrl-C ends with what was
measured so far and exit status 130. Exit status 0: advice, which may be to train as before; 2: something went wrong.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import json
import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import torch
from lightning.pytorch import Trainer

from retime.commands.advise_page import text, write
from retime.commands.advise_turns import (
    FASTER,
    UNDECIDED,
    Limit,
    MethodError,
    Running,
    in_turns,
    judged,
    no_effect,
    notes_of,
    settled,
)
from retime.commands.advise_worker import DDP_BUCKET_MB, METHODS, NAMES, PLAIN, Method, ddp, methods_for, serve
from retime.commands.errors import check_folder, progress
from retime.commands.job import add_job_options
from retime.foundations.measure import Spread, speedup, spread
from retime.foundations.messages import parse_bytes
from retime.foundations.workers import KEPT_HEAP
from retime.schedules import Cluster, LayerCost, Link, systems
from retime.schedules.network import parse_rate

SUMMARY = "which methods pay for your own training step, measured"
_ROUNDS, _SEARCH_ROUNDS = 9, 5
_FAR_BEHIND = 1.3
"""A plain setting whose least time is so many times the fastest one's is tried no more."""
_APART = 1.05
"""Least gain of either measurement that is advised, most by which quartiles of both differ; a choice of ours."""
_LOST = 1 / 9
"""Share of the rounds of both that may be slower: of a dozen methods one seems faster by chance. Ours, too."""
_MOST_RANKS = 64
_LATENCY_MS, _BUCKETS = 0.05, tuple(size * 2**20 for size in (1, 4, 25, 100))
"""Of simulated networks: of a message; bytes of DDP's buckets, of which the best count, for either way."""
_BUCKETS_MB = {1: 1, 4: 4, 100: DDP_BUCKET_MB}
"""Of `ddp`, each with how many MiB of gradients there must be for it to be another bucket than a larger one."""
_SIMULATED, _NOTHING, _OUT = "simulated", "no effect", "does not apply"
_IN_VAIN = {"below this step's floor": "was too small", "it took longer than": "took too long to plan"}
"""Words in the refusal of a budget, and what is said of one that need not be tried then: no larger, or for ranks."""
_NEEDS = {"ParallelScanBackward": "no_scan", "ScanChains": "no_chain"}
"""The fact that is the reason why a callback does not apply; empty where it does."""
_MEASURED = ("ms", "peak_bytes", "said", "report", "spans")
"""Of a process's first answer; the rest are facts of the job."""
_OURS = ("strategy", "devices", "accelerator", "num_", "callbacks", "logger", "max_", "enable_", "limit_val_batches")
"""Beginnings of Trainer's arguments that are not to be given."""


@dataclass(frozen=True)
class Setting:
    """Setting of a plain step: threads of its kernels, torch's fused optimizer kernel, the C library's heap kept."""

    threads: int
    fused: bool
    kept_heap: bool

    def __str__(self) -> str:
        threads = f"{self.threads} thread{'s' * (self.threads > 1)}"
        return ", ".join([threads, *["fused=True"] * self.fused, *["heap kept"] * self.kept_heap])


@dataclass
class Row:
    """Findings on one method. `verdict` is one of those above; `why` says why there is no number, or none counts.

    `gain` is how many times as fast it is as what it is compared with, by round.
    """

    name: str
    method: Method
    verdict: str
    why: str = ""
    gain: Spread | None = None
    step_ms: float | None = None
    peak_bytes: int | None = None
    threads: int = 0
    kept_heap: bool = False
    report: str = ""
    notes: list[str] = field(default_factory=list)
    confirmed: bool = False
    is_steady: bool = True

    def hear(self, answer: Mapping[str, Any]) -> None:
        """Take over what the method has said and reported so far."""
        self.why, self.notes, self.report = no_effect(answer["said"]), notes_of(answer["said"]), answer["report"]

    def to_dict(self, devices: int, trainer: dict[str, Any]) -> dict[str, Any]:
        """Plain values, with all that a method is, and how it is written beside the Trainer's other arguments."""
        of_method = ("result", "strategy", "arguments", "callback", "ranks", "bare", "accelerate")
        return {
            **{key: value for key, value in vars(self).items() if key != "method"},
            **{key: getattr(self.method, key) for key in of_method},
            "gain": None if self.gain is None else vars(self.gain),
            "over": "ddp" if self.method.over_ddp else "plain",
            "trainer": self.method.trainer(devices, trainer),
        }


@dataclass
class Advice:
    """All that was measured, as far as it came."""

    facts: dict[str, Any] = field(default_factory=dict)
    devices: int = 1
    memory_bytes: int | None = None
    trainer: dict[str, Any] = field(default_factory=dict)
    tried_ms: dict[Setting, float] = field(default_factory=dict)
    as_it_is: Setting | None = None
    strongest: Setting | None = None
    plain_ms: float | None = None
    plain_bytes: int | None = None
    ddp_ms: float | None = None
    ddp_bytes: int | None = None
    ddp_tried_ms: dict[int, float] = field(default_factory=dict)
    """By MiB of its buckets, where there is a choice."""
    rows: list[Row] = field(default_factory=list)
    best: Row | None = None
    best_of_ranks: Row | None = None
    spans: dict[str, list[Any]] = field(default_factory=dict)
    interrupted: bool = False

    def sorted_rows(self) -> list[Row]:
        """The most gain first, those without a number last."""
        return sorted(self.rows, key=lambda row: -row.gain.median if row.gain is not None else 0.0)

    def choose(self) -> None:
        """The fastest that is faster and fits, and if the plain step, or ddp, does not fit the fastest that does."""
        self.best = self._fastest(False, self.plain_bytes)
        self.best_of_ranks = self._fastest(True, self.ddp_bytes)

    def _fastest(self, over_ddp: bool, base_bytes: int | None) -> Row | None:
        rows = [row for row in self.sorted_rows() if row.gain is not None and row.method.over_ddp == over_ddp]
        rows = [row for row in rows if row.verdict not in (_NOTHING, _SIMULATED) and self._fits(row.peak_bytes)]
        faster = [row for row in rows if row.verdict == FASTER]
        return next(iter([*faster, *(rows if not self._fits(base_bytes) else [])]), None)

    def _fits(self, peak_bytes: int | None) -> bool:
        return self.memory_bytes is None or peak_bytes is None or peak_bytes <= self.memory_bytes

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON; times in ms, memory in bytes."""
        return {
            "job": self.facts,
            "devices": self.devices,
            "memory_bytes": self.memory_bytes,
            "trainer": self.trainer,
            "plain": {
                "tried_ms": {str(setting): ms for setting, ms in self.tried_ms.items()},
                "as_it_is": str(self.as_it_is),
                "as_it_is_ms": self.as_it_is and self.tried_ms.get(self.as_it_is),
                "strongest": None if self.strongest is None else vars(self.strongest),
                "strongest_is": str(self.strongest),
                "step_ms": self.plain_ms,
                "peak_bytes": self.plain_bytes,
                "ddp_ms": self.ddp_ms,
                "ddp_bytes": self.ddp_bytes,
                "ddp_tried_ms": {str(size): ms for size, ms in self.ddp_tried_ms.items()},
                "trainer": PLAIN.trainer(1, self.trainer),
            },
            "methods": [row.to_dict(self.devices, self.trainer) for row in self.sorted_rows()],
            "advised": None if self.best is None else self.best.name,
            "advised_on_ranks": None if self.best_of_ranks is None else self.best_of_ranks.name,
            "interrupted": self.interrupted,
        }


def add_options(command: argparse.ArgumentParser) -> None:
    """Say what `retime advise` takes."""
    add_job_options(command)
    command.add_argument("--devices", type=int, metavar="N", help="local ranks of methods for several (default 2)")
    command.add_argument("--memory", metavar="BYTES", help="memory that training may take, such as 8GiB")
    command.add_argument("--seconds", type=float, default=60.0, help="at most, for each method (default 60)")
    command.add_argument("--only", action="append", default=[], metavar="METHOD", help="try these alone")
    command.add_argument("--network", metavar="RATE", help="simulate ooo_ddp between machines, such as 10gbit")
    command.add_argument("--ranks", type=int, metavar="N", help="with --network: machines (default 8)")
    command.add_argument("--trainer", action="append", default=[], metavar="KEY=VALUE", help="for each Trainer")
    command.add_argument("--json", type=Path, metavar="FILE", help="write all numbers")
    command.add_argument("--html", type=Path, metavar="FILE", help="write a page with timelines of the step")


def run(options: argparse.Namespace, words: Sequence[str]) -> int:
    """Do what the command line asks for; 0: advice, 130: Ctrl-C, with what was measured so far."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    advice = _checked(options, cores)
    link_bits = None if options.network is None else parse_rate(options.network)
    try:
        with closing(_Measuring(options, words, advice, cores)) as measuring:
            measuring.everything(link_bits)
    except KeyboardInterrupt:
        advice.interrupted = True
        progress("stopped; this was measured so far")
    advice.choose()
    whole = advice.to_dict()
    print("\n".join(text(whole)))
    if options.json is not None:
        options.json.write_text(json.dumps(whole, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    if options.html is not None:
        write(options.html, whole, advice.spans)
    return 130 if advice.interrupted else 0


def _checked(options: argparse.Namespace, cores: int) -> Advice:
    """Refuse before minutes of measuring what would show in or after them."""
    devices = options.devices if options.devices is not None else min(2, cores)
    if not 1 <= devices <= _MOST_RANKS:
        raise ValueError(f"--devices {devices}: give 1 to {_MOST_RANKS} local ranks")
    if not 1 <= options.seconds < float("inf"):
        raise ValueError(f"--seconds {options.seconds:g}: give 1 or more")
    if options.ranks is not None and options.network is None:
        raise ValueError(f"--ranks {options.ranks} is about a network: give --network too, such as --network 10gbit")
    if options.ranks is not None and options.ranks < 2:
        raise ValueError(f"--ranks {options.ranks}: give 2 machines or more")
    check_folder("--json", options.json)
    check_folder("--html", options.html)
    if unknown := [one for one in options.only if one not in NAMES]:
        raise ValueError(f"--only {unknown[0]}: give one of {', '.join(map(repr, NAMES))}")
    memory = None if options.memory is None else parse_bytes("--memory", options.memory)
    return Advice(devices=devices, memory_bytes=memory, trainer=_trainer_options(options.trainer))


def _trainer_options(given: Sequence[str]) -> dict[str, Any]:
    options = {}
    for word in given:
        name, equals, value = word.partition("=")
        if not equals or name not in inspect.signature(Trainer).parameters or name.startswith(_OURS):
            raise ValueError(f"--trainer {word}: write an argument of Trainer as gradient_clip_val=1.0; not {_OURS}")
        try:
            options[name] = ast.literal_eval(value)
        except (SyntaxError, ValueError):
            options[name] = value
    return options


class _Measuring:
    """Goes through the methods, and puts what it finds into the advice at once, so that Ctrl-C loses nothing.

    The plain step that methods are compared with stays where it is, waiting, from one method to the next.
    """

    def __init__(self, options: argparse.Namespace, words: Sequence[str], advice: Advice, cores: int) -> None:
        job = {key: getattr(options, key) for key in ("config", "batch", "optimizer")} | {"device": "cpu"}
        self._request = {"job": job, "words": list(words), "trainer": advice.trainer}
        self._seconds, self._ranks, self._only = options.seconds, options.ranks or 8, options.only
        self._advice, self._cores = advice, cores
        self._base: Running | None = None
        self._base_method = PLAIN
        self._anew = True
        """Whether processes are started, and not forked, which takes seconds less: memory lies alike in all forks."""
        self._ddp: Method | None = None

    def close(self) -> None:
        """End the plain step's processes."""
        base, self._base = self._base, None
        if base is not None:
            base.close()

    def everything(self, link_bits: float | None) -> None:
        """Measure all methods, then the advised one once more."""
        advice = self._advice
        try:
            self._find_strongest()
            self._anew = False
            self._base_of(PLAIN)
        except MethodError as error:
            if error.missing:
                raise ModuleNotFoundError(str(error), name=error.missing) from error
            raise ValueError(f"the plain step does not run: {error}") from error
        methods = self._methods()
        for number, (name, method) in enumerate(methods.items(), 1):
            why = self._why_not(method)
            row = Row(name, method, _OUT, why) if why else self._measured(name, method)
            advice.rows.append(row)
            progress(f"{number} of {len(methods)}: {name}: {_short(row)}")
        if link_bits is not None:
            self._simulate(link_bits)
        self._confirm()

    def _methods(self) -> dict[str, Method]:
        """Methods, those on one device first, as the plain step waits beside them; budgets follow from its peak."""
        advice = self._advice
        assert advice.plain_bytes is not None
        methods = methods_for(advice.plain_bytes, advice.memory_bytes, advice.facts["chains"])
        tried = [one for one in methods.items() if not self._only or one[0].partition(",")[0] in self._only]
        return dict(sorted(tried, key=lambda entry: (entry[1].over_ddp, entry[1].ranks)))

    def _why_not(self, method: Method) -> str:
        """Reason why it need not be tried."""
        if "budget" in method.arguments:
            refused = " ".join(row.why for row in self._advice.rows if "budget" in row.method.arguments)
            if reasons := [words for sign, words in _IN_VAIN.items() if sign in refused]:
                return f"a budget as large {reasons[0]} already"
        if method.callback in _NEEDS:
            return str(self._advice.facts[_NEEDS[method.callback]])
        if method.ranks and self._advice.devices < 2:
            return "it needs two ranks: give --devices 2"
        return ""

    def _find_strongest(self) -> None:
        """The plain step by threads, fused kernels and heaps, in turns."""
        advice, limit = self._advice, Limit(self._seconds)
        default = torch.get_num_threads()
        powers = [2**power for power in range(self._cores.bit_length()) if 2**power < self._cores]
        threads = sorted({*powers, self._cores, default})
        progress("the plain step, by threads, fused optimizer and heap")
        advice.as_it_is = Setting(default, False, False)
        with ExitStack() as stack:
            both = (closing(self._start(PLAIN, Setting(default, False, kept), limit)) for kept in (False, True))
            running = [stack.enter_context(one) for one in both]
            first, _ = (one.first for one in running)
            advice.facts = {key: value for key, value in first.items() if key not in _MEASURED}
            kernels = (False, True) if first["has_fused"] else (False,)
            settings = [Setting(*key) for key in ((t, f, k) for t in threads for f in kernels for k in (False, True))]
            times: dict[Setting, list[float]] = {setting: [] for setting in settings}
            for number in range(1 + _SEARCH_ROUNDS):
                began = limit.left_s()
                for setting in settings if number % 2 else reversed(settings):
                    how = {"threads": setting.threads, "fused": setting.fused}
                    guess = running[setting.kept_heap].steps(limit, 1, **how)["ms"][0]
                    times[setting].append(running[setting.kept_heap].block(limit, guess, **how)[0])
                if began - limit.left_s() > limit.left_s():
                    break
                if number > 1:  # those far behind the fastest need no more rounds
                    fastest = min(min(values[1:]) for values in times.values())
                    settings = [one for one in settings if min(times[one][1:]) < _FAR_BEHIND * fastest]
        advice.tried_ms = {setting: median(values[1:] or values) for setting, values in times.items()}
        advice.strongest = min(advice.tried_ms, key=advice.tried_ms.__getitem__)
        progress(f"the strongest plain step: {advice.strongest}, {advice.tried_ms[advice.strongest]:.4g} ms")

    def _start(self, method: Method, setting: Setting, limit: Limit) -> Running:
        ranks = self._advice.devices if method.ranks else 1
        how = {"method": method, "threads": setting.threads, "fused": setting.fused, "devices": ranks}
        how |= {"facts": not self._advice.facts, "keep_heap": setting.kept_heap and not self._anew}
        environment = (KEPT_HEAP if setting.kept_heap else {}) if self._anew else None
        return Running(serve, {**self._request, **how}, environment, ranks, limit)

    def _setting_of(self, method: Method) -> Setting:
        """The strongest plain one, as far as a method leaves it: cores are shared by its ranks or streams."""
        strongest = self._advice.strongest
        assert strongest is not None
        threads = strongest.threads
        if method.ranks and self._advice.devices > 1:
            threads = max(1, self._cores // self._advice.devices)
        elif method.all_cores:
            threads = self._cores
        return Setting(threads, strongest.fused, strongest.kept_heap and not method.own_memory)

    def _base_of(self, method: Method) -> Running:
        """The plain step, or ddp, which waits; started if it is not there."""
        if self._base is None or self._base_method is not method:
            self.close()
            limit = Limit(self._seconds)
            self._base, self._base_method = self._start(method, self._setting_of(method), limit), method
            self._base.steps(limit, method.warm_steps)
            step_ms, peak_bytes = self._base.block(limit, median(self._base.steps(limit, 2)["ms"]))
            if method is self._ddp:
                self._advice.ddp_ms, self._advice.ddp_bytes = step_ms, peak_bytes
            else:
                if self._advice.plain_ms is None:
                    self._advice.plain_ms, self._advice.plain_bytes = step_ms, peak_bytes
                self._advice.spans["plain"] = self._base.steps(limit, 3, spans=True)["spans"]
        return self._base

    def _strongest_ddp(self) -> Method:
        """`ddp` with the buckets that are fastest here, as far as half of --seconds is enough to try them."""
        if self._ddp is None:
            self.close()
            gradients_mib, half = 4 * self._advice.facts["parameters"] / 2**20, Limit(self._seconds / 2)
            sizes = [DDP_BUCKET_MB, *(size for size, least in _BUCKETS_MB.items() if gradients_mib > least)]
            times: dict[int, float] = {}
            for size in sizes if len(sizes) > 1 else ():
                if not half.left_s():
                    break
                progress(f"ddp with buckets of {size} MiB")
                limit, method = Limit(self._seconds), ddp(size)
                with closing(self._start(method, self._setting_of(method), limit)) as running:
                    running.steps(limit, method.warm_steps)
                    guess = median(running.steps(limit, 2)["ms"])
                    times[size] = median(running.block(limit, guess)[0] for _ in range(_SEARCH_ROUNDS))
            self._advice.ddp_tried_ms = times
            self._ddp = ddp(min(times, key=times.__getitem__, default=DDP_BUCKET_MB))
        return self._ddp

    def _measured(self, name: str, method: Method, *, show: bool = False) -> Row:
        setting = self._setting_of(method)
        row = Row(name, method, _OUT, threads=setting.threads, kept_heap=setting.kept_heap)
        try:
            base = self._base_of(self._strongest_ddp() if method.over_ddp else PLAIN)
        except MethodError as error:
            row.why = f"{'ddp' if method.over_ddp else 'the plain step'} does not run beside it: {error}"
            self.close()
            return row
        limit = Limit(self._seconds)
        try:
            with closing(self._start(method, setting, limit)) as other:
                before, after = self._rounds(base, other, limit, row)
                if show:
                    self._advice.spans[name] = other.steps(limit, 3, spans=True)["spans"]
        except MethodError as error:
            row.why = str(error)
            if base.is_busy:  # its answer would be taken for the next one's
                self.close()
            return row
        row.gain, row.step_ms = speedup(before, after), median(after)
        row.verdict = _NOTHING if row.why else judged(row.gain)
        return row

    def _rounds(self, base: Running, other: Running, limit: Limit, row: Row) -> tuple[list[float], list[float]]:
        """The medians of blocks in turns; what the method says goes into the row."""
        answer, done = settled(other, row.method.warm_steps, limit)
        row.hear(answer)
        before, after = in_turns(base, other, limit, _ROUNDS)
        row.hear(other.steps(limit, 1))  # of what took itself off meanwhile, too
        if done < row.method.warm_steps:
            row.notes.append(f"it settles after {row.method.warm_steps} steps; {done} ran in half of --seconds")
        row.peak_bytes = max(peak for _, peak in after)
        return [ms for ms, _ in before], [ms for ms, _ in after]

    def _confirm(self) -> None:
        """Measure again, in new processes, what is to be advised: where memory lies is decided once a process."""
        advice = self._advice
        while True:
            advice.choose()
            chosen = [row for row in (advice.best, advice.best_of_ranks) if row is not None and not row.confirmed]
            if not chosen:
                return
            row = chosen[0]
            progress(f"once more, in new processes: {row.name}")
            self.close()
            self._anew = True
            again = self._measured(row.name, row.method, show=True)
            row.confirmed = True
            if again.gain is None or row.gain is None:
                row.verdict, row.why = UNDECIDED, f"measured once only: {again.why}"
                continue
            first, second = row.gain.median, again.gain.median
            row.gain = spread([*row.gain.rounds, *again.gain.rounds])
            if row.verdict == FASTER:
                lost = sum(speed <= 1 for speed in row.gain.rounds) / len(row.gain.rounds)
                agree = again.verdict == FASTER and min(first, second) >= _APART and lost <= _LOST
                row.verdict = judged(row.gain) if agree else UNDECIDED
            row.is_steady = row.gain.reach[1] <= _APART * row.gain.reach[0]
            if not row.is_steady:
                row.notes.append(f"size undecided: {first:.2f} times in one measurement, {second:.2f} in the other")
            progress(_short(row))

    def _simulate(self, link_bits: float) -> None:
        """`ooo_ddp` between machines with such links, from layers that are timed one by one."""
        progress(f"simulating ooo_ddp on {self._ranks} machines")
        advice, method = self._advice, METHODS["ooo_ddp"]
        row = Row(f"ooo_ddp, {self._ranks} machines", method, _OUT)
        advice.rows.append(row)
        setting = advice.strongest
        assert setting is not None
        assert advice.plain_ms is not None
        request = {**self._request, "layers": True, "threads": setting.threads}
        try:
            with closing(Running(serve, request, KEPT_HEAP, 1, Limit(self._seconds))) as process:
                layers = process.first["layers"]
        except MethodError as error:
            row.why = str(error)
            return
        alone_ms = sum(sum(times) for *times, _ in layers) - layers[0][1] if layers else 0.0
        if not alone_ms or not any(size for *_, size in layers):
            row.why = "no layer could be timed by itself, so there is nothing to simulate from"
            return
        cluster = Cluster(self._ranks, 1, Link(link_bits, _LATENCY_MS))
        gains = [_simulated_gain(layers, advice.plain_ms / alone_ms, cluster), _simulated_gain(layers, 1.0, cluster)]
        row.gain, row.verdict = Spread(gains[0], min(gains), max(gains)), _SIMULATED
        row.notes.append(
            f"simulated, not measured: layers timed one by one take {alone_ms / advice.plain_ms:.0%} of the measured "
            "step. The range is that of the gains with these times and with times scaled to add up to the step."
        )


def _simulated_gain(layers: Sequence[tuple[Any, ...]], scale: float, cluster: Cluster) -> float:
    """A step of `ddp` over one of `ooo_ddp`, each with its best buckets; of layers F, O, W in ms and bytes."""
    costs = [LayerCost(scale * f, scale * o, scale * w, size) for f, o, w, size in layers]
    ddp_ms, ours_ms = (
        min(systems.run(how, costs, cluster, systems.Sizes(size, size))[1].step_ms for size in _BUCKETS)
        for how in (systems.DDP, systems.OURS_DDP)
    )
    return ddp_ms / ours_ms


def _short(row: Row) -> str:
    return row.verdict if row.gain is None else f"{row.verdict}, {row.gain.median:.3f}"
