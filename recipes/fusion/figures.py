"""The optimizer-fusion paper's figures and tables (Jiang et al. 2021): the bare loop's variants timed, a class each.

`trainer` holds what runs inside a Lightning Trainer (targets, DDP), `memory` what is about memory. Figures
4 and 5 have the paper's speedup formula (appendix C.2) fitted to measured step times:

    s(b) = (b t_grad + t_opt) / (b t_grad + t_opt - t_saved)

b is the batch size, t_grad forward and backward per sample, t_opt the optimizer, t_saved what fusion saves; all in ms.
"""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from retime.foundations.measure import Spread, speedup, spread
from retime.recipes.core import charts
from retime.recipes.core.build import KernelUnavailable, build_batches, build_model
from retime.recipes.core.claims import Claim, Comparison, amount, claim_of, paper
from retime.recipes.core.measure import interleave
from retime.recipes.core.recipe import Measured, Recipe, Tick
from retime.recipes.core.results import Point, Result, phase_rows, ratio, titled
from retime.recipes.fusion.settings import FusionSettings
from retime.recipes.fusion.variants import PHASES, VARIANTS, BareLoop, choose_variants, kernel_flags
from retime.recipes.models import parameter_count, parameters_per_layer

PAPER = "optimizer-fusion"
claim = partial(claim_of, "fusion")


@dataclass(frozen=True)
class SpeedupFit:
    """The fitted times in ms (`saved_ms` by variant), and the worst relative error of a fitted speedup."""

    grad_ms: float
    opt_ms: float
    saved_ms: dict[str, float]
    worst_error: float

    def speedup(self, variant: str, batch_size: float) -> float:
        """s(b) of one variant."""
        whole = batch_size * self.grad_ms + self.opt_ms
        return whole / (whole - self.saved_ms[variant])


def fit_speedup(
    batch_sizes: Sequence[int], baseline_ms: Sequence[float], fused_ms: Mapping[str, Sequence[float]]
) -> SpeedupFit:
    """Least squares over the baseline's and all fused variants' step times, which share t_grad and t_opt.

    The step times are linear in the unknowns; each equation is divided by its measured time, so that a relative error
    counts alike at every batch size. ValueError with a single batch size, from which slope and offset cannot be told.
    """
    if len(set(batch_sizes)) < 2:
        raise ValueError(f"the formula needs at least two batch sizes, not {list(batch_sizes)}")
    names = list(fused_ms)
    equations = []
    for column, times in enumerate([baseline_ms, *fused_ms.values()]):
        for size, milliseconds in zip(batch_sizes, times, strict=True):
            saved = [-1.0 if column == index + 1 else 0.0 for index in range(len(names))]
            equations.append(np.array([float(size), 1.0, *saved]) / milliseconds)
    solution, *_ = np.linalg.lstsq(np.array(equations), np.ones(len(equations)), rcond=None)
    grad, opt, *saved_all = (float(value) for value in solution)
    fit = SpeedupFit(grad, opt, dict(zip(names, saved_all, strict=True)), 0.0)
    errors = [
        abs(fit.speedup(name, size) * fused / whole - 1)
        for name in names
        for size, whole, fused in zip(batch_sizes, baseline_ms, fused_ms[name], strict=True)
    ]
    return SpeedupFit(grad, opt, fit.saved_ms, max(errors, default=0.0))


OURS = ("retime_backward", "retime_forward")
LIKE_THE_PAPER = ("retime_backward_default", "retime_forward_default")
"""Ours with the baseline's kernel: what the paper compares. With the best kernel, two effects mix."""


class StepTimes(Recipe[FusionSettings]):
    """A recipe whose points are step times of the variants, with the model, optimizer and batch size of the point."""

    def turns(self, settings: FusionSettings) -> int | None:
        return len(settings.variants)

    def measure(self, settings: FusionSettings, at: dict[str, Any], tick: Tick) -> Measured:
        """Milliseconds of each phase and of the whole step, a value a round, for every variant that exists here."""
        device, named = torch.device(settings.hardware.device), self.detail(settings, at)
        model, optimizer = named.get("model", settings.model), named.get("optimizer", settings.optimizer)
        size = at.get("batch_size", settings.batch_size)
        if size is None:
            raise ValueError("this experiment needs batch_size=<number of samples>")
        (batch,) = build_batches(settings.data, size, 1, device)
        loops: dict[str, BareLoop] = {}
        facts: dict[str, Any] = {}
        for name, variant in choose_variants(settings.variants).items():
            plain_name = name.removesuffix("_default")
            if plain_name != name and kernel_flags("best", optimizer, device) == {} and plain_name in loops:
                facts[f"{name} left out"] = f"the same as {plain_name}: this optimizer has no fused kernel here"
                continue
            try:
                loops[name] = BareLoop(variant, build_model(model, device, settings.seed), batch, optimizer)
            except KernelUnavailable as reason:
                facts[f"{name} left out"] = str(reason)
        blocks = {name: partial(loop.block, settings.steps) for name, loop in loops.items()}
        times = interleave(blocks, settings.rounds, settings.warmup_rounds, tick)
        some = next(iter(loops.values())).model
        facts["parameters"] = parameter_count(some)
        facts["parameters per layer"] = round(parameters_per_layer(some))
        for name, loop in loops.items():
            if loop.wired.report is not None:
                facts[f"{name} reports"] = loop.wired.report().one_line
        return Measured(phase_rows(times, (*PHASES, "step")), facts)

    def references(self, point: Point) -> dict[str, str]:
        peer = strongest_peer(point)
        references = {"speed over the default optimizer": "baseline"}
        if peer and peer != "baseline":
            references[f"speed over the strongest peer ({peer})"] = peer
        return {**references, "speed over the bound (no_update)": "no_update"}


def strongest_peer(point: Point) -> str | None:
    """The fastest of the ways torch offers today."""
    peers = [name for name in point.variants("step") if name in VARIANTS and VARIANTS[name].peer]
    return point.fastest(peers, "step")


def like_the_paper(point: Point, mode: str) -> str:
    """The variant that stands for the paper's `mode`-fusion: the baseline's kernel if it was measured apart."""
    name = f"retime_{mode}_default"
    return name if point.has(name, "step") else f"retime_{mode}"


def measured(point: Point, variant: str, quantity: str) -> Spread | None:
    """Median and quartiles of one quantity; None if it was not measured."""
    return point.spread(variant, quantity) if point.has(variant, quantity) else None


def difference(point: Point, one: tuple[str, str], other: tuple[str, str]) -> Spread | None:
    """Spread of the per-round difference of two quantities, each a variant and a quantity."""
    if not point.has(*one) or not point.has(*other):
        return None
    return spread([a - b for a, b in zip(point.values(*one), point.values(*other), strict=True)])


def label(variant: str) -> str:
    """A variant's name for people."""
    return VARIANTS[variant].label if variant in VARIANTS else variant


class Breakdown(StepTimes):
    """Figure 3: forward, backward and optimizer time of one step."""

    def compare(self, result: Result) -> list[Comparison]:
        (point,) = result.points
        backward = like_the_paper(point, "backward")
        growth = difference(point, (backward, "backward"), ("baseline", "backward"))
        return [
            Comparison(claim("figure-3-optimizer"), measured(point, "baseline", "optimizer")),
            Comparison(claim("figure-3-growth"), growth),
            *compare_modes(point, claim("figure-3-forward"), claim("figure-3-backward")),
        ]

    def draw(self, result: Result, path: Path) -> None:
        (point,) = result.points
        drawing, axes = charts.figure(titled(result), height=4.8)
        names = point.variants("step")
        bars = {label(name): {p: point.median(name, p) for p in PHASES} for name in names}
        totals = {label(name): point.spread(name, "step") for name in names}
        charts.stacked_bars(axes, bars, "one training step (ms)", totals)
        charts.save(drawing, path)


class BatchSizes(StepTimes):
    """Figures 4 and 5: step times over batch sizes, for one model or several, with the formula of C.2 fitted."""

    over = (("model", "models"),)
    axes = ("batch_size", "batch_sizes")
    needed = ("baseline",)

    def points(self, settings: FusionSettings) -> list[dict[str, Any]]:
        sizes = [settings.batch_size] if settings.batch_size else settings.batch_sizes
        names: list[str] = sorted(settings.models)
        if not sizes or not names:
            raise ValueError("this experiment needs batch_sizes=[...] (or batch_size) and models with an entry")
        return [{"model": name, "batch_size": size} for name in names for size in sizes]

    def notes(self, result: Result) -> list[str]:
        lines = []
        for model, points in by_model(result).items():
            fit = fitted(points)
            if fit is None:
                lines.append(f"{model}: one batch size only, so the formula of appendix C.2 is not fitted.")
                continue
            saved = ", ".join(f"{amount(value, 'ms')} ({label(name)})" for name, value in fit.saved_ms.items())
            lines.append(
                f"{model}: s = (b t_grad + t_opt) / (b t_grad + t_opt - t_saved) fitted with t_grad = "
                f"{amount(fit.grad_ms, 'ms')} a sample, t_opt = {amount(fit.opt_ms, 'ms')}, t_saved = {saved}; "
                f"worst error of a fitted speedup {amount(100 * fit.worst_error, '%')}."
            )
        return lines

    def compare(self, result: Result) -> list[Comparison]:
        lines = []
        up_to = claim("up-to")
        for mode in ("forward", "backward"):
            speedups = [(ratio(p, "baseline", like_the_paper(p, mode)), p) for p in result.points]
            best = max(((s, p) for s, p in speedups if s), key=lambda pair: pair[0].median, default=None)
            if best:
                where = f"{mode}-fusion, {best[1].at['model']}, batch {best[1].at['batch_size']}"
                lines.append(Comparison(up_to, best[0], f"{where}, same kernel as the baseline"))
        return lines


class SavedTime(BatchSizes):
    """Figure 4: milliseconds saved, which should not depend on the batch size."""

    def draw(self, result: Result, path: Path) -> None:
        title = titled(result)
        drawing, axes = charts.figure(title)
        for points in by_model(result).values():
            fit = fitted(points)
            peer = strongest_peer(points[0]) or "fused"
            places = [point.at["batch_size"] for point in points]
            for index, name in enumerate([*compared(points), *([peer] if peer != "baseline" else [])]):
                values = [difference(point, ("baseline", "step"), (name, "step")) for point in points]
                saved = fit.saved_ms.get(name) if fit else None
                text = label(name) if saved is None else f"{label(name)}\nfitted t_saved = {amount(saved, 'ms')}"
                colour = charts.points_with_spread(axes, places, values, text, index)
                if saved is not None:
                    axes.axhline(saved, color=colour, linewidth=1, linestyle=":")
        batch_axis(axes, result)
        axes.set_ylim(bottom=min(0.0, axes.get_ylim()[0]))
        axes.set_ylabel("saved per step against\nthe default optimizer (ms)")
        charts.legend_beside(axes)
        charts.save(drawing, path)


class Speedup(BatchSizes):
    """Figure 5: speedup over the batch size for several models, with the fitted formula."""

    def draw(self, result: Result, path: Path) -> None:
        groups = by_model(result)
        drawing, panels = charts.panels(titled(result), 2, sharey=True)
        for axes, mode in zip(panels, ("forward", "backward"), strict=True):
            for index, (model, points) in enumerate(groups.items()):
                name = like_the_paper(points[0], mode)
                places, values = [p.at["batch_size"] for p in points], [ratio(p, "baseline", name) for p in points]
                colour = charts.points_with_spread(axes, places, values, model, index)
                fit = fitted(points)
                if fit and name in fit.saved_ms:
                    grid = np.geomspace(min(places), max(places), 60)
                    axes.plot(grid, [fit.speedup(name, size) for size in grid], color=colour, linewidth=1, alpha=0.8)
            charts.even_line(axes, "no gain")
            batch_axis(axes, result)
            axes.set_title(f"{mode}-fusion over the default optimizer, same kernel", fontsize=10)
        panels[0].set_ylabel("speedup of a step (x)")
        panels[1].legend(fontsize=8, title="points: measured\nlines: formula of C.2", title_fontsize=8)
        charts.save(drawing, path)


class Along(StepTimes):
    """Speedups of both modes, same kernel and against the strongest peer, along a number that each point has."""

    scale, margin, text = "linear", 0.1, ""

    @abstractmethod
    def where(self, point: Point) -> float:
        """The point's place."""

    def draw(self, result: Result, path: Path) -> None:
        drawing, axes = charts.figure(titled(result), width=8.5)
        points = sorted(result.points, key=self.where)
        index, places = 0, [*map(self.where, points)]
        for mode in MODES:
            same_kernel = [ratio(point, "baseline", like_the_paper(point, mode)) for point in points]
            against_peer = [ratio(point, strongest_peer(point), f"retime_{mode}") for point in points]
            for text, values in (("the default, same kernel", same_kernel), ("the strongest peer", against_peer)):
                charts.points_with_spread(axes, places, values, f"{mode}-fusion over {text}", index)
                index += 1
        charts.even_line(axes, "no gain")
        bottom, top = axes.get_ylim()
        for number, (place, point) in enumerate(zip(places, points, strict=True)):
            at = place, top + (0.02 + 0.05 * (number % 3)) * (top - bottom)
            axes.annotate(point.at[self.over[0][0]], at, ha="center", fontsize=8, annotation_clip=False)
            axes.axvline(place, color=charts.GREY, linewidth=0.5, alpha=0.4, zorder=0)
        axes.set_ylim(bottom, top + 0.18 * (top - bottom))
        axes.set_ylabel("speedup of a step (x)")
        axes.legend(fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=2, frameon=False)
        axes.set_xscale(self.scale)
        axes.margins(x=self.margin)
        axes.set_xlabel(self.text)
        charts.save(drawing, path)


class Models(Along):
    """Figure 6: speedup against the average number of parameters in a layer."""

    over = (("model", "models"),)
    scale, margin, text = "log", 0.15, "parameters per layer (average)"

    def where(self, point: Point) -> float:
        return float(point.facts["parameters per layer"])


class Optimizers(Along):
    """Figure 7: speedup against the optimizer's share of the baseline's step."""

    over = (("optimizer", "optimizers"),)
    text = "optimizer's share of the default step (%)"
    needed = ("baseline",)

    def where(self, point: Point) -> float:
        return 100 * speedup(point.values("baseline", "optimizer"), point.values("baseline", "step")).median

    def notes(self, result: Result) -> list[str]:
        shares = ", ".join(f"{p.at['optimizer']} {amount(self.where(p), '%')}" for p in result.points)
        return [f"Optimizer's share of the default step: {shares}."]


class Machines(Breakdown):
    """Table 2: this machine's row beside the paper's three."""

    def compare(self, result: Result) -> list[Comparison]:
        (point,) = result.points
        forward, backward = like_the_paper(point, "forward"), like_the_paper(point, "backward")
        ours = (
            ("ms", "baseline", measured(point, "baseline", "step")),
            ("ms", "forward-fusion", measured(point, forward, "step")),
            ("ms", "backward-fusion", measured(point, backward, "step")),
            ("x", "forward-fusion speedup", ratio(point, "baseline", forward)),
            ("x", "backward-fusion speedup", ratio(point, "baseline", backward)),
        )
        return [
            Comparison(Claim(PAPER, "Table 2", unit, value, f"{machine}, {what}"), spread)
            for machine, row in paper("fusion").tables["table-2"].items()
            for value, (unit, what, spread) in zip(row, ours, strict=True)
        ]

    def draw(self, result: Result, path: Path) -> None:
        (point,) = result.points
        peer, table = strongest_peer(point), paper("fusion").tables["table-2"]
        names = [*(f"{machine}\n(paper)" for machine in table), "this machine\n(same kernel)"]
        names.append(f"this machine\n(against {peer})")
        drawing, axes = charts.figure(titled(result), width=10)
        for index, mode in enumerate(MODES):
            theirs = [spread([row[index - 2]]) for row in table.values()]
            ours = [ratio(point, "baseline", like_the_paper(point, mode)), ratio(point, peer, f"retime_{mode}")]
            shift, text = (index - 0.5) * 0.2, f"{mode}-fusion"
            places = [number + shift for number in range(len(names))]
            charts.points_with_spread(axes, places[: len(table)], theirs, f"{text}, the paper's", index, filled=False)
            charts.points_with_spread(axes, places[len(table) :], ours, text, index)
        axes.set_xticks(range(len(names)), names, fontsize=8)
        charts.even_line(axes, "no gain")
        axes.set_ylabel("speedup of a step (x)")
        axes.legend(fontsize=8, loc="upper right")
        charts.save(drawing, path)


class Translation(Breakdown):
    """Appendix C.4: Transformer (base)."""

    def compare(self, result: Result) -> list[Comparison]:
        (point,) = result.points
        return compare_modes(point, claim("transformer-forward"), claim("transformer-backward"))


MODES = ("forward", "backward")


def compare_modes(point: Point, forward: Claim, backward: Claim) -> list[Comparison]:
    """The paper's two speedups: with the baseline's kernel as in the paper, and against the strongest peer."""
    lines = []
    peer = strongest_peer(point)
    for mode, published in zip(MODES, (forward, backward), strict=True):
        same_kernel = ratio(point, "baseline", like_the_paper(point, mode))
        lines.append(Comparison(published, same_kernel, "same kernel as the baseline, as in the paper"))
        note = f"ours with the best kernel against {peer}, the strongest peer"
        lines.append(Comparison(published, ratio(point, peer, f"retime_{mode}"), note))
    return lines


def by_model(result: Result) -> dict[str, list[Point]]:
    """The points of each model, by rising batch size."""
    groups: dict[str, list[Point]] = {}
    for point in sorted(result.points, key=lambda point: int(point.at["batch_size"])):
        groups.setdefault(str(point.at["model"]), []).append(point)
    return dict(sorted(groups.items()))


def compared(points: list[Point]) -> list[str]:
    """Our variants that all of `points` have."""
    return [name for name in (*LIKE_THE_PAPER, *OURS) if all(point.has(name, "step") for point in points)]


def fitted(points: list[Point]) -> SpeedupFit | None:
    """The formula of C.2 fitted to a model's points; None with a single batch size."""
    sizes = [int(point.at["batch_size"]) for point in points]
    if len(set(sizes)) < 2:
        return None

    def medians(name: str) -> list[float]:
        return [point.median(name, "step") for point in points]

    return fit_speedup(sizes, medians("baseline"), {name: medians(name) for name in compared(points)})


def batch_axis(axes: Any, result: Result) -> None:
    """A logarithmic axis with a tick at each measured batch size."""
    sizes = sorted({int(point.at["batch_size"]) for point in result.points})
    axes.set_xscale("log", base=2)
    axes.set_xticks(sizes, [str(size) for size in sizes])
    axes.minorticks_off()
    axes.set_xlabel("batch size (samples)")
