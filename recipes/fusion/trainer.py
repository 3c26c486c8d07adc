"""Optimizer fusion inside a Lightning Trainer: this project's targets, and DDP (appendix C.5)."""

import copy
import os
import statistics
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed
from torch import nn

from retime.recipes.core import charts, machine
from retime.recipes.core.build import build_batches, build_model
from retime.recipes.core.claims import Comparison, Target, paper, show
from retime.recipes.core.measure import interleave
from retime.recipes.core.recipe import CaseRecipe, Measured, Tick
from retime.recipes.core.results import Point, Result, Row, percent_more, ratio, titled
from retime.recipes.core.trainer_loop import Batch, Run, Training, train
from retime.recipes.emulated import loopback, run_ranks
from retime.recipes.fusion.figures import MODES, OURS, PAPER, StepTimes, label, strongest_peer
from retime.recipes.fusion.settings import FusionSettings
from retime.recipes.fusion.variants import VARIANTS, BareLoop
from retime.recipes.models import parameter_count
from retime.strategies import FusedOptimizerDDPStrategy

MIB = 2**20
WARMUP_STEPS = 3
FIRST_GRADIENTS, GRADIENTS = "gradients alive, first step", "gradients alive, later"
RUNS = ("baseline", "foreach", "fused", *OURS)


def trainer_run(variant: str, *, distributed: bool = False) -> Run:
    """Trainer's run of one of `RUNS`, as the bare loop's of that name; ValueError: another one."""
    if variant not in RUNS:
        raise ValueError(f"variants: {variant!r} does not run in a Trainer: choose from {', '.join(RUNS)}")
    flags = {"baseline": {}, "foreach": {"foreach": True}}.get(variant, {"fused": True})
    mode = variant.removeprefix("retime_")
    if mode == variant:
        return Run(lambda: "ddp" if distributed else "auto", flags)
    if distributed:
        return Run(lambda: FusedOptimizerDDPStrategy(mode=mode), flags)
    return Run(lambda: "fused_optimizer" if mode == "backward" else "fused_optimizer_forward", flags)


def fit(settings: FusionSettings, model: nn.Module, batches: list[Batch], variant: str, **options: Any) -> Training:
    """A short fit of a variant on `settings.devices`, always from the same weights; `options` go to `train`."""
    run = trainer_run(variant, distributed=settings.devices > 1)
    options |= {"device": settings.hardware.device, "devices": settings.devices}
    return train(run, copy.deepcopy(model), batches, settings.optimizer, **options)


def step_ms(settings: FusionSettings, model: nn.Module, batches: list[Batch], variant: str) -> float:
    """The typical step of such a fit."""
    return statistics.median(fit(settings, model, batches, variant).step_ms[WARMUP_STEPS:])


class Targets(CaseRecipe[FusionSettings], StepTimes):
    """`fusion_targets`: what this project wants to reach on one core, each case with the numbers it has to meet."""

    def points(self, settings: FusionSettings) -> list[dict[str, Any]]:
        for variant in settings.variants:
            trainer_run(variant)
        return super().points(settings)

    def measure(self, settings: FusionSettings, at: dict[str, Any], tick: Tick) -> Measured:
        case = settings.cases[at["case"]]
        device = torch.device(settings.hardware.device)
        model = build_model(case["model"], torch.device("cpu"), settings.seed)
        steps = WARMUP_STEPS + settings.steps + 1  # as many times between ends of batches, less one
        batches = build_batches(case["data"], case["batch_size"], steps, device)
        blocks = {name: partial(step_ms, settings, model, batches, name) for name in settings.variants}
        times = interleave(blocks, settings.rounds, settings.warmup_rounds, tick)
        rows = [Row(name, "step", "ms", [round(value, 5) for value in values]) for name, values in times.items()]
        digests = {}
        for name in settings.variants:
            counted = fit(settings, model, batches, name, count_gradients=True)
            digests[name] = counted.weights
            rows.append(Row(name, FIRST_GRADIENTS, "MiB", [counted.first_peak_gradient_bytes / MIB]))
            rows.append(Row(name, GRADIENTS, "MiB", [counted.peak_gradient_bytes / MIB]))
        same = [name for name in digests if digests[name] == digests.get("fused")]
        facts = {
            "parameters": parameter_count(model),
            "largest layer (MiB)": largest_layer_bytes(model) / MIB,
            "largest bucket (MiB)": largest_bucket_bytes(model, settings.optimizer, batches) / MIB,
            "final weights bit-identical to fused": ", ".join(same) or "none",
        }
        return Measured(rows, facts)

    def compare(self, result: Result) -> list[Comparison]:
        cases = {point.at["case"]: point for point in result.points}
        lines: list[Comparison] = []
        for case, wants in paper("fusion").targets["speed"].items():
            for variant, least in wants.items():
                if case in cases:
                    what = f"{case}: {label(variant)} over the plain strategy"
                    lines.append(Comparison(Target(what, "x", least), ratio(cases[case], "fused", variant)))
        for case, point in cases.items():
            if case == "large_convolution":  # where fusion cannot help
                for variant in OURS:
                    target = Target(f"{case}: time {label(variant)} adds to the plain strategy", "%", 1.0, at_most=True)
                    lines.append(Comparison(target, percent_more(point, variant, "fused", "step")))
            elif point.has("retime_backward", GRADIENTS):
                bound = point.facts["largest layer (MiB)"] + point.facts["largest bucket (MiB)"]
                target = Target(f"{case}: gradients alive in backward mode", "MiB", bound, at_most=True)
                alive = point.spread("retime_backward", GRADIENTS)
                first = point.values("retime_backward", FIRST_GRADIENTS)[0]
                lines.append(Comparison(target, alive, f"in every later step; {first:.1f} MiB in the first"))
        return lines

    def notes(self, result: Result) -> list[str]:
        return [
            f"- {point.at['case']}: {label(variant)} over default AdamW {speedup.median:.2f} x"
            for point in result.points
            for variant in OURS
            if (speedup := ratio(point, "baseline", variant))
        ]

    def draw(self, result: Result, path: Path) -> None:
        drawing, axes = charts.figure(titled(result), width=9)
        names = [n for n in result.points[0].variants("step") if VARIANTS[n].ours]
        cases, wanted = [point.at["case"] for point in result.points], paper("fusion").targets["speed"]
        for index, name in enumerate(names):
            values = [ratio(point, "fused", name) for point in result.points]
            places = [number + (index - (len(names) - 1) / 2) * 0.3 for number in range(len(cases))]
            charts.points_with_spread(axes, places, values, label(name), index)
            for x, case in zip(places, cases, strict=True):
                if (least := wanted.get(case, {}).get(name)) is not None:
                    axes.hlines(least, x - 0.12, x + 0.12, color=charts.COLOURS[index], linewidth=2.5, alpha=0.5)
        axes.plot([], [], color=charts.GREY, linewidth=2.5, alpha=0.6, label="wanted at least")
        charts.even_line(axes, "AdamW(fused=True), plain strategy")
        axes.set_xticks(range(len(cases)), cases)
        axes.set_xlim(-0.6, len(cases) - 0.4)
        axes.set_ylabel("steps per second against\nthe plain strategy (x)")
        charts.legend_beside(axes)
        charts.save(drawing, path)


class Distributed(StepTimes):
    """`fusion_ddp`, appendix C.5: the same comparison under DDP and on one device, always in a fresh process.

    A process joins a process group once; a second job of a sweep in it would silently be a group of one.
    """

    def points(self, settings: FusionSettings) -> list[dict[str, Any]]:
        for variant in settings.variants:
            trainer_run(variant)
        machine.need_gpu_each(settings.hardware.device, settings.devices)
        return [{"devices": 1}, {"devices": settings.devices}] if settings.devices > 1 else [{"devices": 1}]

    def blocks(self, settings: FusionSettings) -> int | None:
        return 1

    def measure(self, settings: FusionSettings, at: dict[str, Any], tick: Tick) -> Measured:
        settings = replace(settings, devices=at["devices"])
        reply = run_ranks(loopback(at["devices"]), serve, {"settings": settings})[0]
        tick("fresh processes")
        if reply["world_size"] != at["devices"]:
            raise RuntimeError(f"{at['devices']} ranks were asked for, {reply['world_size']} ran")
        rows = [Row(name, "step", "ms", values) for name, values in reply["step_ms"].items()]
        return Measured(rows, reply["facts"])

    def notes(self, result: Result) -> list[str]:
        lines = [f'{PAPER}, appendix C.5: "training speedup with DDP is similar to that on a single GPU". Here:']
        for point in sorted(result.points, key=lambda point: int(point.at["devices"])):
            peer = strongest_peer(point)
            for mode in MODES:
                gain = ratio(point, peer, f"retime_{mode}")
                if gain:
                    lines.append(f"- {ranks(point)}: {mode}-fusion {show(gain, 'x')} over {peer}, the strongest peer")
        return lines

    def draw(self, result: Result, path: Path) -> None:
        points = sorted(result.points, key=lambda point: int(point.at["devices"]))
        drawing, axes = charts.figure(titled(result))
        names = points[0].variants("step")
        for index, name in enumerate(names):
            values = [point.spread(name, "step") for point in points]
            places = [number + (index - (len(names) - 1) / 2) * 0.19 for number in range(len(points))]
            heights = [value.median for value in values]
            bars = axes.bar(places, heights, 0.17, color=charts.COLOURS[index], label=label(name))
            axes.bar_label(bars, fmt="%.1f", fontsize=8, label_type="center", color="white")  # clear of the whiskers
            reach = [[v.median - v.low for v in values], [v.high - v.median for v in values]]
            axes.errorbar(places, heights, yerr=reach, fmt="none", color="black", capsize=2, linewidth=1)
        axes.set_xticks(range(len(points)), [ranks(point) for point in points])
        axes.set_ylabel("one training step (ms)")
        charts.legend_beside(axes)
        charts.save(drawing, path)


def serve(request: dict[str, Any]) -> dict[str, Any] | None:
    """For `run_ranks`: step times of each variant as rank 0 sees them; None on other ranks. Lightning joins them."""
    settings: FusionSettings = request["settings"]
    rank = int(os.environ.get("LOCAL_RANK", "0"))
    device = torch.device("cpu")
    if settings.hardware.device == "cpu":
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[rank % len(cores)]})
        torch.set_num_threads(1)
    else:
        device = torch.device("cuda", rank)
    model = build_model(settings.model, torch.device("cpu"), settings.seed)
    steps = WARMUP_STEPS + settings.steps + 1
    batches = build_batches(settings.data, settings.batch_size or 1, steps * settings.devices, device)
    batches = batches[rank :: settings.devices]
    blocks = {name: partial(step_ms, settings, model, batches, name) for name in settings.variants}
    times = interleave(blocks, settings.rounds, settings.warmup_rounds)
    digests = {name: fit(settings, model, batches, name).weights for name in settings.variants}
    world_size = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
    if world_size > 1:
        # Left to the interpreter's end, gloo's threads may outlive what they use, and the process aborts.
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()
    if rank != 0:
        return None
    same = [name for name, value in digests.items() if value == digests.get("fused")]
    facts = {"parameters": parameter_count(model), "final weights bit-identical to fused": ", ".join(same)}
    return {"world_size": world_size, "step_ms": times, "facts": facts}


def ranks(point: Point) -> str:
    count = int(point.at["devices"])
    return "one device" if count == 1 else f"DDP, {count} ranks"


def largest_layer_bytes(model: nn.Module) -> int:
    """Bytes of the parameters, hence of the gradients, that the largest layer holds itself."""
    return max(sum(p.numel() * p.element_size() for p in m.parameters(recurse=False)) for m in model.modules())


def largest_bucket_bytes(model: nn.Module, optimizer: dict[str, Any], batches: list[Batch]) -> int:
    """The largest bucket that backward fusion really updated at once, in a bare loop of a few steps."""
    loop = BareLoop(VARIANTS["retime_backward"], copy.deepcopy(model).to(batches[0][0].device), batches[0], optimizer)
    for _ in range(3):
        loop.step()
    assert loop.wired.report is not None
    return int(loop.wired.report().largest_bucket_bytes)
