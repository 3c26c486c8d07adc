"""Figures 1, 2, 7, 8 and 9 of out-of-order backprop, simulated: issue, streams and memory of counted networks.

Kernels are counted from shapes (:mod:`retime.recipes.ooo.counted_networks`) and run thread block by thread block
(:func:`retime.schedules.simulate_two_streams`). Facts have what the pictures show; verdicts follow from the numbers.
"""

from __future__ import annotations

from abc import abstractmethod
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

from retime.recipes.core import charts
from retime.recipes.core.claims import CLOSE, Comparison, amount, judged
from retime.recipes.core.recipe import Measured, SimulatedRecipe, Tick
from retime.recipes.core.results import Point, Result, Row
from retime.recipes.ooo import claims
from retime.recipes.ooo import counted_networks as counted
from retime.recipes.ooo.counted_networks import (
    BACKWARD_ONLY,
    BARRIERS,
    CAPACITY,
    JOINT,
    ONE,
    PAPERS,
    READY,
    SETUP_MS,
    CountedNetwork,
)
from retime.recipes.ooo.model_costs import TITAN_XP, V100
from retime.recipes.ooo.settings import SimulatedSettings
from retime.schedules import Kind, Task, TwoStreamSchedule, TwoStreamTimeline, profile_regions, simulate_two_streams

STEP, WAIT, EXECUTION, MAIN_WAITS = "step", "wait for issue", "execution", "main-stream waits"
RATIO, HIGHEST_RATIO = "issue over execution, mean", "issue over execution, highest"
PEAK, MOST_MORE, BLOCK_4_MORE = "peak", "most above one stream", "above one stream, end of DenseBlock-4"
MULTI_STREAM = {
    ("MobileNet V3 (alpha=0.25)", 32): "streams-mobilenet",
    ("ResNet-50", 64): "streams-resnet-50",
    ("ResNet-101", 64): "streams-resnet-101",
}
REORDERED_AT = ("DenseNet-121 (k=12)", 32)
"""The text's "DenseNet-121" of 1.54."""
GPUS = {gpu.name: gpu for gpu in (V100, TITAN_XP)}
"""Of Table 1, those on which one GPU trains."""
_LITTLE = 0.05  # of a block's execution that the device waits, of a step before its peak
_WIDEST = 10.7  # inches: 1,400 pixels
_MAIN, _SUB, _ISSUE = "main", "sub", "issue"
_FULL = "kernels with as many thread blocks as the device"

Box = tuple[int, str, float, float]
"""A block (from 0), the lane, start and end in milliseconds."""


class CountedRecipe(SimulatedRecipe[SimulatedSettings]):
    """A point a network and batch size. The paper's sentences are about DenseNet-121, and so are verdicts."""

    over: tuple[tuple[str, str], ...] = (("network", "networks"), ("batch_size", "batch_sizes"))
    quantity = STEP
    given = ""
    """What a reader has to know of this figure, in a sentence."""

    def measure(self, settings: SimulatedSettings, at: dict[str, Any], tick: Tick) -> Measured:
        gpu = GPUS[at.get("gpu", V100.name)]
        network = counted.counted_network(at["network"], at["batch_size"], image_size=settings.image_size, gpu=gpu)
        kind = "DenseBlock" if at["network"].startswith("DenseNet") else "block"
        names = [f"{kind}-{number}" for number in range(1, len(network.blocks) + 1)]
        measured = self.count(network, names, settings.issue_ms)
        return Measured(measured.rows, {"blocks": names, **measured.facts})

    @abstractmethod
    def count(self, network: CountedNetwork, names: list[str], issue_ms: float) -> Measured:
        """Simulate one network, of which the blocks have these names."""

    def judge(self, point: Point) -> Iterable[Comparison]:
        """The paper's numbers beside a DenseNet's."""
        return ()

    def verdicts(self, point: Point) -> Iterable[str]:
        """Verdicts on what the paper says of a DenseNet without a number."""
        return ()

    def references(self, point: Point) -> dict[str, str]:
        return {"speed over one stream": ONE}

    def compare(self, result: Result) -> list[Comparison]:
        return [line for point in _densenets(result) for line in self.judge(point)]

    def notes(self, result: Result) -> list[str]:
        given = result.points[0].settings
        return [
            f"Counted on images of {given['image_size']}, not measured: a {V100.name} by its data sheet that "
            f"runs {CAPACITY:,} thread blocks at once and takes {1e3 * SETUP_MS:g} us to set up a kernel (section 2: "
            "1 to 2). Thread blocks and times follow from shapes; no library's algorithms are known.",
            f"A number holds if it is within {100 * CLOSE:g} % of the paper's, of a speedup if its gain is.",
            self.given.format(issue=_issue(result)),
            *(f"- {_where(point)}: {line}" for point in _densenets(result) for line in self.verdicts(point)),
        ]


class IssueRatios(CountedRecipe):
    """Figure 1: a convolution's issue over its execution, by block."""

    quantity = RATIO
    given = "{issue} Convolutions alone; activations run in place."

    def count(self, network: CountedNetwork, names: list[str], issue_ms: float) -> Measured:
        ratios = counted.issue_ratios(network, issue_ms)
        rows = _rows(RATIO, "x", names, [sum(block) / len(block) for block in ratios])
        rows += _rows(HIGHEST_RATIO, "x", names, [max(block) for block in ratios])
        return Measured(rows + _rows(EXECUTION, "ms", names, counted.forward_ms(network)))

    def judge(self, point: Point) -> Iterator[Comparison]:
        highest, executed = max(_values(point, HIGHEST_RATIO)[2:]), _values(point, EXECUTION)
        share = 100 * sum(executed[2:]) / sum(executed)
        what = f"{_where(point)}, at the assumed issue"
        yield judged(claims.claim("figure-1-ratio"), highest, what, "counted kernels take other times than the paper's")
        why = "time follows arithmetic and bytes, of which the first two blocks have more"
        yield judged(claims.claim("figure-1-share"), share, f"{_where(point)}, forward", why)

    def verdicts(self, point: Point) -> Iterator[str]:
        for quantity in (RATIO, HIGHEST_RATIO):
            rises = _values(point, quantity) == sorted(_values(point, quantity))
            yield f"{quantity}, never falls from block to block: {'holds' if rises else 'does not hold'}."

    def draw(self, result: Result, path: Path) -> None:
        count, title = len(result.points), f"{result.title}\n{_issue(result)}"
        drawing, panels = charts.panels(title, count, width=min(_WIDEST, 1.5 + 3.6 * count), sharey=True)
        for axes, point in zip(panels, result.points, strict=True):
            charts.pairs(axes, {which: _values(point, which) for which in (RATIO, HIGHEST_RATIO)})
            paper = claims.claim("figure-1-ratio").value
            axes.axhline(paper, color=charts.GREY, linestyle=":", label="the paper, DenseBlock-3 and 4, at most")
            charts.even_line(axes, "issue as long as execution")
            axes.set_title(_where(point), fontsize=10)
            names = [name.replace("DenseBlock-", "Dense-\nBlock-") for name in point.facts["blocks"]]
            axes.set_xticks(range(len(names)), names)
        panels[0].set_ylabel("issue over execution, convolutions (x)")
        charts.legend_below(drawing, panels[0], 2)
        charts.save(drawing, path)


class IssueTimeline(CountedRecipe):
    """Figure 2: issue and execution of the forward pass; drawn from where the last two blocks are issued."""

    quantity = WAIT
    given = (
        "{issue} Issuing and the forward pass start together. Issue counts as masked where the device waits less than "
        f"{100 * _LITTLE:g} % of the block's execution."
    )

    def count(self, network: CountedNetwork, names: list[str], issue_ms: float) -> Measured:
        rows = _rows(WAIT, "ms", names, counted.issue_waits_ms(network, issue_ms))
        rows += _rows(EXECUTION, "ms", names, counted.forward_ms(network))
        regions, device = network.regions[len(names) :], network.device(issue_ms=issue_ms)
        run = simulate_two_streams(TwoStreamSchedule(regions, ((),) * len(names)), network.kernels, device)
        products = [network.kernels(Task(Kind.F, layer))[-1] for block in network.blocks[-2:] for layer in block]
        took_us = [round(1e3 * (device.alone_ms(kernel) - SETUP_MS), 2) for kernel in products]
        facts = {
            "kernels by block": [sum(len(network.kernels(task)) for task in region.tasks) for region in regions],
            "kernels: start and end (ms)": _kernel_times(run),
            "convolutions of the last two blocks, shortest and longest (us)": [min(took_us), max(took_us)],
        }
        return Measured(rows, facts)

    def judge(self, point: Point) -> Iterator[Comparison]:
        shortest, longest = point.facts["convolutions of the last two blocks, shortest and longest (us)"]
        why = "a count of arithmetic and bytes has no floor, and no library's tiles"
        yield judged(claims.claim("figure-2-shortest"), shortest, _where(point), why)
        yield judged(claims.claim("figure-2-longest"), longest, _where(point), why)

    def verdicts(self, point: Point) -> Iterator[str]:
        waits, executed = _values(point, WAIT), _values(point, EXECUTION)
        share = [wait / ran for wait, ran in zip(waits, executed, strict=True)]
        verdict = "holds"
        if share[3] < _LITTLE:
            verdict = "does not hold, execution takes so long that issuing stays ahead to the end"
        elif share[2] >= _LITTLE:
            verdict = "does not hold, the device already waits in DenseBlock-3"
        by_block = ", ".join(f"{wait:.2f} ({ran:.2f})" for wait, ran in zip(waits, executed, strict=True))
        masked = "issue masked in DenseBlock-3, no more by the end of DenseBlock-4"
        yield f"{masked}: {verdict}. Waits by block, and executions (ms): {by_block}."

    def draw(self, result: Result, path: Path) -> None:
        count, title = len(result.points), f"{result.title}\n{_issue(result)}"
        drawing, panels = charts.panels(title, 2 * count, width=_WIDEST, height=1.5 + 1.9 * count, rows=count)
        for left, right, point in zip(panels[::2], panels[1::2], result.points, strict=True):
            boxes, end_ms = list(_issued_and_executed(point)), point.facts["kernels: start and end (ms)"][-1]
            names = point.facts["blocks"]
            start_ms = min(start for block, _, start, _ in boxes if block == len(names) - 2)
            issued_ms = max(end for _, lane, _, end in boxes if lane == _ISSUE)
            for axes, begin_ms in ((left, start_ms), (right, end_ms - 1.2)):
                charts.lanes(axes, boxes, {_MAIN: "execution", _ISSUE: "issue"}, apart=_ISSUE if axes is right else "")
                axes.set_xlim(begin_ms, end_ms)
            left.set_title(f"{_where(point)}: from the issue of {names[-2]} on", fontsize=9)
            right.set_title(f"the last 1.2 ms, where {names[-1]} ends", fontsize=9)
            if issued_ms < end_ms - 1.2:
                right.text(0.5, 0.75, "all kernels issued before", transform=right.transAxes, ha="center", va="center")
        for axes in panels[-2:]:
            axes.set_xlabel("time from the forward pass's start (ms)")
        charts.colour_legend(drawing, result.points[0].facts["blocks"])
        charts.save(drawing, path)


class Placements(CountedRecipe):
    """Figure 8: both streams, by Algorithm 1 and as the paper places weight gradients."""

    given = f"Algorithm 1 has {counted.MEMORY_SHARE:g} of one stream's peak, as in section 8.2."

    def count(self, network: CountedNetwork, names: list[str], issue_ms: float) -> Measured:
        profile = profile_regions(network.regions, network.kernels, network.device())
        runs = counted.simulated_plans(network, (PAPERS, JOINT), profile)
        rows = _rows(STEP, "ms", runs, [run.makespan_ms for run in runs.values()])
        two = {name: run for name, run in runs.items() if name != ONE}
        for name, run in two.items():
            rows.append(Row(name, MAIN_WAITS, "ms", [round(run.timeline.idle_ms[_MAIN], 4)]))
            rows += [Row(name, f"{r.name} speedup", "x", [round(r.speedup, 4)]) for r in run.regions]
        second, blocks = network.regions[1].tasks, network.blocks
        fifth = [kernel for task in network.regions[len(blocks)].tasks for kernel in network.kernels(task)]
        kernels = [kernel for task in second for kernel in network.kernels(task)]
        last = [network.kernels(Task(Kind.W, layer))[0].thread_blocks for layer in blocks[-1]]
        full = sum(kernel.thread_blocks % CAPACITY == 0 for kernel in kernels)
        facts = {
            f"R2: {_FULL} (%)": 100 * full / len(kernels),
            "R5: kernels with more thread blocks than the device (%)": (
                100 * sum(kernel.thread_blocks > CAPACITY for kernel in fifth) / len(fifth)
            ),
            "R2: setting up (%)": 100 * len(kernels) * SETUP_MS / sum(profile.main_ms[task] for task in second),
            "last block's weight gradients: thread blocks, how many, of": [*Counter(last).most_common(1)[0], len(last)],
            "profiled alone": {
                "R2": profile.speedup[Task(Kind.W, blocks[-2][-1])][1],
                "R5": profile.speedup[Task(Kind.W, blocks[-1][-1])][len(blocks)],
            },
            "regions": {name: [(r.name, r.start_ms, r.end_ms) for r in run.regions] for name, run in two.items()},
            "boxes": {name: _boxes(network, run) for name, run in two.items()},
        }
        return Measured(rows, facts)

    def judge(self, point: Point) -> Iterator[Comparison]:
        free = "hardly a kernel has just as many thread blocks as the device, so places stay free"
        late = "the main-stream waits for updates there, as weight gradients of the first blocks run late"
        other = "Algorithm 1 puts other weight gradients there, or none"
        for region, why in (("R2", free), ("R5", late)):
            claim = claims.claim(f"figure-8-{region.lower()}")
            yield judged(claim, point.facts["profiled alone"][region], "the two profiled alone", why)
            for name, why_not in ((PAPERS, why), (JOINT, other)):
                yield judged(claim, point.values(name, f"{region} speedup")[0], name, why_not)
        full, setup = (point.facts[f"R2: {what} (%)"] for what in (_FULL, "setting up"))
        common, how_many, of = point.facts["last block's weight gradients: thread blocks, how many, of"]
        why = "the count has no library's tiles"
        yield judged(claims.claim("figure-8-full"), full, _where(point), why)
        yield judged(claims.claim("figure-8-setup"), setup, _where(point), "kernels take longer")
        yield judged(claims.claim("figure-8-blocks"), common, f"{how_many} of {of} kernels", why)

    def verdicts(self, point: Point) -> Iterator[str]:
        for name, boxes in point.facts["boxes"].items():
            own = [(start, end) for block, lane, start, end in boxes if (block, lane) == (3, _SUB)]
            regions = point.facts["regions"][name]
            inside = [(r, min(end, to) - max(start, since)) for r, since, to in regions for start, end in own]
            beside = list(dict.fromkeys(region for region, ms in inside if ms > 1e-3))
            verdict = "holds" if beside == ["R5"] else "does not hold, as counts leave more places free elsewhere"
            verdict = f": {verdict}" if name == JOINT else ""
            own_run = f"DenseBlock-4's weight gradients run beside {', '.join(beside)}, in the paper beside R5"
            waits = f"The main-stream waits {amount(point.values(name, MAIN_WAITS)[0], 'ms')} for the sub-stream"
            yield f"{name}: {own_run}{verdict}. {waits}."

    def draw(self, result: Result, path: Path) -> None:
        shown = [(point, name) for point in result.points for name in (PAPERS, JOINT)]
        count = len(shown)
        drawing, panels = charts.panels(result.title, count, width=_WIDEST, height=1.2 + 2.4 * count, rows=count)
        for axes, (point, name) in zip(panels, shown, strict=True):
            charts.lanes(axes, point.facts["boxes"][name], {_SUB: "sub-stream", _MAIN: "main-stream"})
            regions = point.facts["regions"][name]
            for region, start_ms, end_ms in regions:
                gain = point.values(name, f"{region} speedup")[0]
                axes.axvline(start_ms, color="black", linewidth=0.8)
                narrow = end_ms - start_ms < 0.05 * regions[-1][2]
                text = f"{region}\n{gain:.2f}" if narrow else f"{region}: {gain:.2f} x"
                axes.text((start_ms + end_ms) / 2, 1.5, text, ha="center", va="bottom", fontsize=7 if narrow else 9)
            axes.set_xlim(0, regions[-1][2])
            faster = amount(_over_one(point, name), "x")
            axes.set_title(f"{_where(point)}, {name}: {faster} over one stream", fontsize=10, pad=26)
        panels[-1].set_xlabel("time from the loss's gradient (ms), to the next forward pass; white: a stream waits")
        charts.colour_legend(drawing, result.points[0].facts["blocks"])
        charts.save(drawing, path)


class Memory(CountedRecipe):
    """Figure 9: bytes alive as each layer's output gradient ends."""

    quantity = PEAK
    given = Placements.given

    def count(self, network: CountedNetwork, names: list[str], issue_ms: float) -> Measured:
        runs = counted.simulated_plans(network, (PAPERS, JOINT))
        curves = {name: counted.memory_by_layer(run.timeline) for name, run in runs.items()}
        rows = [Row(name, PEAK, "GB", [round(run.timeline.peak_bytes / 1e9, 5)]) for name, run in runs.items()]
        for name in (PAPERS, JOINT):
            more = {layer: curves[name][layer] - alive for layer, alive in curves[ONE].items()}
            rows.append(Row(name, MOST_MORE, "MB", [round(max(more.values()) / 1e6, 2)]))
            rows.append(Row(name, BLOCK_4_MORE, "MB", [round(more[network.blocks[-1][0]] / 1e6, 2)]))
        facts = {
            "layers": list(curves[ONE]),
            **{f"GB, {name}": [round(b / 1e9, 4) for b in curve.values()] for name, curve in curves.items()},
            "peak after (of the step)": {n: run.timeline.peak_ms / run.makespan_ms for n, run in runs.items()},
            "last layers of blocks": [block[-1] for block in network.blocks],
        }
        return Measured(rows, facts)

    def judge(self, point: Point) -> Iterator[Comparison]:
        behind = "long kernels of the first blocks leave little room, so the sub-stream lags behind"
        for name, late in ((PAPERS, behind), (JOINT, "Algorithm 1 lets weight gradients wait for later regions")):
            conventional, peak = point.values(ONE, PEAK)[0], point.values(name, PEAK)[0]
            for claim, value, what, why in (
                (claims.claim("figure-9-more"), point.values(name, MOST_MORE)[0], ", all layers", late),
                (claims.claim("figure-9-more"), point.values(name, BLOCK_4_MORE)[0], ", end of DenseBlock-4", late),
                (claims.claim("figure-9-peak-mb"), 1e3 * (peak - conventional), "", "more weight gradients wait"),
                (claims.claim("figure-9-peak"), 100 * (peak / conventional - 1), "", "more weight gradients wait"),
            ):
                yield judged(claim, value, f"{name}{what}", why)

    def verdicts(self, point: Point) -> Iterator[str]:
        for name, share in point.facts["peak after (of the step)"].items():
            verdict = "holds" if share < _LITTLE else "does not hold"
            yield f"{name}: the peak comes early in the step: {verdict}, after {100 * share:.1f} % of it."

    def draw(self, result: Result, path: Path) -> None:
        count = len(result.points)
        drawing, panels = charts.panels(result.title, count, width=10.5, height=1.0 + 4.6 * count, rows=count)
        for axes, point in zip(panels, result.points, strict=True):
            titles, layers = [], point.facts["layers"]
            for index, name in enumerate((ONE, PAPERS, JOINT)):
                curve, style = point.facts[f"GB, {name}"], ("-", "--", "-.")[index]
                axes.plot(layers, curve, style, color=charts.COLOURS[index], label=name)
                titles.append(f"{name}: peak {point.values(name, PEAK)[0]:.3f} GB")
                if name != ONE:
                    titles[-1] += f", largest difference {point.values(name, MOST_MORE)[0]:,.0f} MB"
            edges = [0, *point.facts["last layers of blocks"]]
            top = {"transform": axes.get_xaxis_transform(), "ha": "center", "va": "bottom", "fontsize": 8}
            for block, start, end in zip(point.facts["blocks"], edges, edges[1:], strict=False):
                axes.axvline(end + 0.5, color=charts.GREY, linewidth=0.7, linestyle=":")
                axes.text((start + end + 1) / 2, 1.0, block, **top)
            axes.set_title("\n".join([_where(point), *titles]), fontsize=9, pad=16)
            axes.set_xlim(max(layers) + 1, min(layers) - 1)
            axes.set_xlabel("layer whose output gradient ends, the last one first")
            axes.set_ylabel("alive (GB)")
            axes.legend(fontsize=8)
        charts.save(drawing, path)


class Speedups(CountedRecipe):
    """Figure 7, with issue compiled away: two streams over one, in the layers' order and re-ordered."""

    over = (*CountedRecipe.over, ("gpu", "gpus"))
    given = (
        f"{Placements.given} Speedups are upper bounds of this model: a thread block takes as long whatever runs "
        "beside it, so a device with a third of its thread blocks in use has a third of its speed: gains are too large."
    )

    def points(self, settings: SimulatedSettings) -> list[dict[str, Any]]:
        if unknown := sorted(set(settings.gpus) - set(GPUS)):
            raise ValueError(f"gpus={unknown}: there are {', '.join(GPUS)}")
        return super().points(settings)

    def count(self, network: CountedNetwork, names: list[str], issue_ms: float) -> Measured:
        runs = counted.simulated_plans(network, (READY, JOINT, BACKWARD_ONLY))
        rows = _rows(STEP, "ms", runs, [run.makespan_ms for run in runs.values()])
        rows += _rows(STEP, "ms", [BARRIERS], [counted.barriers_ms(network)])
        return Measured(rows, {"places idle on one stream": round(runs[ONE].idle_share, 4)})

    def compare(self, result: Result) -> list[Comparison]:
        points = {(point.at["network"], point.at["batch_size"]): point for point in _of(result, V100.name)}
        gains = {at: _over_one(point, JOINT) for at, point in points.items()}
        what, of_model = "two streams alone", "an upper bound of this model"
        there = {name: gains[at] for at, name in MULTI_STREAM.items() if at in gains}
        lines = [judged(claims.claim(name), gain, what, of_model) for name, gain in there.items()]
        if point := points.get(REORDERED_AT):
            gain = point.speedup(READY, JOINT, STEP).median
            why = "in the layers' order they already gain most of it"
            lines.append(judged(claims.claim("reordered"), gain, what, why))
        for where, share in _shares(result).items():
            lines.append(judged(claims.claim("titan-xp"), share, where, "its counted kernels leave fewer places free"))
        return lines

    def notes(self, result: Result) -> list[str]:
        lines, most = super().notes(result), []
        for family in ("ResNet", "DenseNet-121", "MobileNet"):
            points = [point for point in _of(result, V100.name) if point.at["network"].startswith(family)]
            gains = [_over_one(point, JOINT) for point in points] or [1.0]
            lines.append(f"- {family}: {amount(min(gains), 'x')} to {amount(max(gains), 'x')} over one stream.")
            most.append(max(gains))
        for name in (JOINT, BACKWARD_ONLY):
            over = sorted(point.speedup(READY, name, STEP).median for point in result.points)
            ends = ", ".join(amount(over[place], "x") for place in (0, len(over) // 2, -1))
            lines.append(f"{name[13:]}, over weight gradients once ready: least, median and most {ends}.")
        verdict = "holds" if most == sorted(most) else "does not hold"
        lines.append(f"ResNet gains less than DenseNet-121, and that less than MobileNet, at most: {verdict}.")
        if shares := _shares(result).values():
            blocks = CAPACITY * TITAN_XP.multiprocessors // V100.multiprocessors
            lines.append(
                f"A {TITAN_XP.name} has {TITAN_XP.multiprocessors} of a V100's {V100.multiprocessors} multiprocessors, "
                f"hence {blocks} thread blocks. Its gain is {min(shares):.2f} to {max(shares):.2f} of a V100's where "
                f"the paper says similar: an error of {100 * (min(shares) - 1):+.0f} to {100 * (max(shares) - 1):+.0f} "
                "%. The paper has no step time of one, so its roofline is unchecked."
            )
        return lines

    def draw(self, result: Result, path: Path) -> None:
        sizes, gpus = (list(dict.fromkeys(point.at[axis] for point in result.points)) for axis in ("batch_size", "gpu"))
        rows, height = len(sizes) * len(gpus), 1.2 + 2.6 * len(sizes) * len(gpus)
        drawing, panels = charts.panels(result.title, rows, width=_WIDEST, height=height, rows=rows, sharex=True)
        for axes, (gpu, size) in zip(panels, product(gpus, sizes), strict=True):
            points = [point for point in _of(result, gpu) if point.at["batch_size"] == size]
            charts.pairs(axes, {name: [_over_one(point, name) for point in points] for name in (READY, JOINT)})
            for place, point in enumerate(points):
                if gpu == V100.name and (claim := MULTI_STREAM.get((point.at["network"], size))):
                    star = {"color": charts.COLOURS[3], "markersize": 13, "markeredgecolor": "black"}
                    axes.plot([place + 0.42], [claims.claim(claim).value], "*", **star)
            names = [point.at["network"] for point in points]
            axes.set_xticks(range(len(points)), names, rotation=35, ha="right", fontsize=8)
            axes.set_title(f"{gpu}, batch {size}", fontsize=10)
            axes.set_ylim(bottom=1.0)
            axes.set_ylabel("over one stream, issue compiled\nin both (x), upper bounds", fontsize=8)
        stars = "stars: the paper's multi-stream computation alone, on a V100"
        charts.legend_below(drawing, panels[0], 2, title=stars, title_fontsize=8)
        charts.save(drawing, path)


def _rows(quantity: str, unit: str, names: Iterable[str], values: Iterable[float]) -> list[Row]:
    return [Row(name, quantity, unit, [round(value, 4) + 0.0]) for name, value in zip(names, values, strict=True)]


def _kernel_times(run: TwoStreamTimeline) -> list[float]:
    """Start and end of each of the main-stream's kernels in turn; setting up the next one lies between two."""
    moments: list[float] = []
    for moment_ms, main, _ in run.occupancy:
        if (main > 0) == (len(moments) % 2 == 0):  # it starts, or has ended
            moments.append(round(moment_ms, 4))
    return moments


def _issued_and_executed(point: Point) -> Iterator[Box]:
    issue_ms, times = point.settings["issue_ms"], point.facts["kernels: start and end (ms)"]
    blocks = [block for block, count in enumerate(point.facts["kernels by block"]) for _ in range(count)]
    for number, (block, start_ms, end_ms) in enumerate(zip(blocks, times[::2], times[1::2], strict=True)):
        yield block, _ISSUE, number * issue_ms, (number + 1) * issue_ms
        yield block, _MAIN, start_ms, end_ms


def _boxes(network: CountedNetwork, run: TwoStreamTimeline) -> list[Box]:
    """Each lane's stretches of one block; a gap of less than a thousandth of the step is not drawn."""
    block_of = {layer: number for number, block in enumerate(network.blocks) for layer in block}
    boxes: list[Box] = []
    for span in run.timeline.spans:  # lane by lane
        block, before = block_of[int(span.name.strip("FOWU'"))], boxes[-1] if boxes else None
        start_ms, end_ms = round(span.start_ms, 4), round(span.end_ms, 4)
        if before and before[:2] == (block, span.lane) and start_ms - before[3] < run.makespan_ms / 1000:
            start_ms = boxes.pop()[2]
        boxes.append((block, span.lane, start_ms, end_ms))
    return boxes


def _densenets(result: Result) -> list[Point]:
    return [point for point in result.points if point.at["network"].startswith("DenseNet")]


def _where(point: Point) -> str:
    return f"{point.at['network']}, batch {point.at['batch_size']}"


def _values(point: Point, quantity: str) -> list[float]:
    return [point.values(name, quantity)[0] for name in point.variants(quantity)]


def _over_one(point: Point, name: str) -> float:
    return point.speedup(ONE, name, STEP).median


def _of(result: Result, gpu: str) -> list[Point]:
    return [point for point in result.points if point.at["gpu"] == gpu]


def _shares(result: Result) -> dict[str, float]:
    """By network and batch, the gain of re-ordered streams on a Titan XP over a V100's."""
    gains = [{_where(p): _over_one(p, JOINT) - 1 for p in _of(result, gpu)} for gpu in (V100.name, TITAN_XP.name)]
    return {where: gains[1][where] / gain for where, gain in gains[0].items() if where in gains[1]}


def _issue(result: Result) -> str:
    return f"Issuing a kernel is assumed to take {1e3 * result.points[0].settings['issue_ms']:g} us."
