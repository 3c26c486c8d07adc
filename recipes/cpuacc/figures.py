"""Fits on ranks: `cpuacc_fig3` times an iteration, `cpuacc_training` trains until outputs are right.

Figures 3 and 4 and Table 3 (:class:`Figures`): time of an iteration, weak scaling, and where the time goes. The paper's
ranks are GPUs; these are processes on cores. Its baseline is the naive way, `NaiveDDP` here, and torch's DDP is a
stronger peer. One rank that trains alone runs on every rank at the same time, so that what ranks lose by sharing cores
and memory is in the reference, and what is left is communication.

Sections 4.2.5 and 4.2.1 (:class:`Trainings`): whole trainings on real data, outputs compared every 20 iterations, and
the time to 50 % accuracy. A round is a seed of the network's first weights; the images that are looked at are not
trained on.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from retime.foundations.measure import Spread, spread
from retime.recipes.core import charts
from retime.recipes.core.claims import Comparison
from retime.recipes.core.recipe import Measured, Tick
from retime.recipes.core.results import Point, Result, Row, best_of, titled
from retime.recipes.cpuacc.naive import NAIVE
from retime.recipes.cpuacc.settings import AccumulationSettings
from retime.recipes.cpuacc.targets import STEP, WAITS, OnRanks, ask, claim, machine, measure_fits, place, target
from retime.recipes.cpuacc.worker import ALONE

EXPOSED, UPDATE = WAITS


class Figures(OnRanks):
    """A point a network and number of ranks."""

    quantity = STEP

    def references(self, point: Point) -> dict[str, str]:
        peers = (best_of(point, "ddp", STEP), NAIVE)
        return {f"speed over {peer}": peer for peer in peers if peer is not None and point.has(peer, STEP)}

    def measure(self, settings: AccumulationSettings, at: dict[str, Any], tick: Tick) -> Measured:
        return measure_fits(settings, at, tick)

    def compare(self, result: Result) -> list[Comparison]:
        lines = []
        for point in result.points:
            ours, theirs = best_of(point, "cpu_accumulate", STEP), best_of(point, "ddp", STEP)
            if ours is None or theirs is None:
                continue
            where, network = place(point), point.at["network"]
            naive = [NAIVE] if point.has(NAIVE, STEP) else []
            if network in ("AlexNet", "GoogLeNet", "VGG-16"):
                notes = {theirs: f"{where}: {ours} over {theirs}", NAIVE: f"{where}, over {NAIVE}: {ours}"}
                for peer in (theirs, *naive):
                    ratio = point.speedup(peer, ours, STEP)
                    lines.append(Comparison(claim(f"figure-3 {network}"), ratio, notes[peer]))
            scaling, ways = claim("scaling"), (ours, theirs, *naive)
            lines += [Comparison(scaling, efficiency(point, label), f"{where}: {label}") for label in ways]
            if network != "AlexNet":
                continue
            for label, when in ((theirs, "before"), (ours, "after")):
                if point.has(label, EXPOSED):
                    exposed = point.spread(label, EXPOSED)
                    lines.append(Comparison(claim(f"exposed-{when}"), exposed, f"{where}: {label}"))
            if point.has(NAIVE, EXPOSED):
                columns = (point.values(*row) for row in ((NAIVE, EXPOSED), (NAIVE, UPDATE), (theirs, UPDATE)))
                whole = [collected + there - plain for collected, there, plain in zip(*columns, strict=True)]
                lines.append(Comparison(claim("exposed-before"), spread(whole), f"{where}: {NAIVE}"))
        return lines

    def notes(self, result: Result) -> list[str]:
        lines = [
            "Efficiency is the step of a rank that trains alone, beside as many others that do, over the step. What "
            "communication leaves exposed is what the step waits for at the end of the backward pass; of the naive way "
            "the weights' broadcast is beside it, in the update."
        ]
        for point in result.points:
            same = ", ".join(point.facts["the same final weights"])
            mib = point.facts["gradient bytes"] / 2**20
            lines.append(
                f"- {place(point)} on {point.facts['cores']} cores, {mib:.0f} MiB of gradients: the same final "
                f"weights, bit by bit: {same}"
            )
        return lines

    def draw(self, result: Result, path: Path) -> None:
        names = list(dict.fromkeys(point.at["network"] for point in result.points))
        drawing, panels = charts.panels(titled(result), 2 * len(names), width=10.5, height=7.6, rows=2)
        for number, name in enumerate(names):
            points = sorted((p for p in result.points if p.at["network"] == name), key=lambda p: int(p.at["ranks"]))
            times, scaling = panels[number], panels[len(names) + number]
            labels = dict.fromkeys(label for point in points for label in point.variants(STEP))
            for index, label in enumerate(labels):
                ranks = [point.at["ranks"] for point in points if point.has(label, STEP)]
                steps = [point.spread(label, STEP) for point in points if point.has(label, STEP)]
                charts.points_with_spread(times, ranks, steps, label, index, line=True)
                if label != ALONE:
                    shares = [efficiency(point, label) for point in points if point.has(label, STEP)]
                    charts.points_with_spread(scaling, ranks, shares, label, index, line=True)
            charts.even_line(scaling, ALONE)
            least, axis = claim("scaling").value, ("axes fraction", "data")
            scaling.axhline(least, color=charts.GREY, linewidth=1, linestyle=":")
            scaling.annotate(f"the paper's: more than {least:g}", (0.25, least), xycoords=axis, fontsize=7, va="bottom")
            for axes, what in ((times, "iteration (ms)"), (scaling, "weak scaling efficiency")):
                axes.set_ylim(bottom=0)
                axes.set_title(name, fontsize=10)
                axes.set_xlabel("ranks")
                axes.set_ylabel(what)
                axes.set_xticks([point.at["ranks"] for point in points])
        charts.legend_below(drawing, panels[0], columns=3)
        charts.save(drawing, path)


def efficiency(point: Point, label: str) -> Spread:
    """Weak scaling: a rank's step alone over its step among others, 1 is no loss."""
    return point.speedup(ALONE, label, STEP)


STEPS_TO, SECONDS_TO, DIFFERENCE = "steps to accuracy", "time to accuracy", "difference"
RIGHT, ELAPSED = "right", "time"
FROM_ORDER, FROM_REPEAT = "difference from sums in the order of the ranks", "difference in a second run"


class Trainings(OnRanks):
    """A point a network and number of ranks."""

    quantity = SECONDS_TO
    curves = ((RIGHT, "checks"), (ELAPSED, "checks"))

    def references(self, point: Point) -> dict[str, str]:
        first = point.variants(SECONDS_TO)[0]
        return {f"speed over {first}": first}

    def measure(self, settings: AccumulationSettings, at: dict[str, Any], tick: Tick) -> Measured:
        answers = ask(settings, at, tick, "outputs")
        rows = [row for label, fits in answers[0].items() for row in _rows(settings, label, fits)]
        alike = all(_without_times(answer) == _without_times(answers[0]) for answer in answers)
        facts = {"accuracy": settings.accuracy, "all ranks answer the same": alike, **machine(settings, at["ranks"])}
        return Measured(rows, {**facts, "checked every": settings.check_every})

    def compare(self, result: Result) -> list[Comparison]:
        lines = []
        for point in result.points:
            first, *others = point.variants(SECONDS_TO)
            for label in others:
                where = f"{place(point)}: {label} over {first}"
                sooner = point.speedup(first, label, SECONDS_TO)
                steps = point.speedup(label, first, STEPS_TO)
                lines.append(Comparison(claim("sooner"), sooner, where))
                if label == NAIVE:
                    continue
                if NAIVE in others:  # the paper's baseline
                    sooner = point.speedup(NAIVE, label, SECONDS_TO)
                    lines.append(Comparison(claim("sooner"), sooner, where.replace(f"over {first}", f"over {NAIVE}")))
                lines.append(Comparison(target("same-steps"), steps, where))
                if point.at["ranks"] == 2:  # with more, gloo adds up in an order of its own
                    most = spread([max(point.values(label, DIFFERENCE))])
                    lines.append(Comparison(target("same-outputs"), most, where))
                for wanted, quantity in (("in-order", FROM_ORDER), ("repeated", FROM_REPEAT)):
                    most = spread([max(point.values(label, quantity))])
                    lines.append(Comparison(target(wanted), most, f"{place(point)}: {label}"))
        return lines

    def notes(self, result: Result) -> list[str]:
        lines = [
            "Quartiles are over seeds. Each fit trains for the same steps; the time of the checks is not counted. Sums "
            "in the order of the ranks are ddp's with a hook that gathers all gradients and adds them up by torch "
            "alone. With the first seed each strategy trains twice."
        ]
        for point in result.points:
            most = max(value for label in point.variants(DIFFERENCE) for value in point.values(label, DIFFERENCE))
            share = 100 * point.facts["accuracy"]
            lines.append(
                f"- {place(point)} on {point.facts['cores']} cores: held-out images looked at every "
                f"{point.facts['checked every']} steps; {share:.0f} % of them right is the accuracy; "
                f"all ranks answer the same: {point.facts['all ranks answer the same']}; an output differs by "
                f"{most:.2g} at most (on more than two ranks gloo adds up in another order); right at the end: "
                + ", ".join(f"{label} {100 * point.values(label, RIGHT)[-1]:.1f} %" for label in point.variants(RIGHT))
            )
        return lines

    def draw(self, result: Result, path: Path) -> None:
        count = len(result.points)
        drawing, panels = charts.panels(titled(result), count, width=5.0 * count)
        for axes, point in zip(panels, result.points, strict=True):
            for index, label in enumerate(point.variants(RIGHT)):
                seconds, right = point.values(label, ELAPSED), point.values(label, RIGHT)
                axes.plot(seconds, right, color=charts.COLOURS[index], marker="o", markersize=3, label=label)
            axes.axhline(point.facts["accuracy"], color=charts.GREY, linewidth=1, linestyle="--")
            axes.set_ylim(0, 1)
            axes.set_title(place(point), fontsize=10)
            axes.set_xlabel("training (s), first seed")
            axes.set_ylabel("held-out images right")
        charts.legend_below(drawing, panels[0], columns=3)
        charts.save(drawing, path)


def _rows(settings: AccumulationSettings, label: str, fits: list[dict[str, Any]]) -> list[Row]:
    reached = [_reached(settings, label, one["right"]) for one in fits]
    seconds = [round(one["seconds"][check], 4) for one, check in zip(fits, reached, strict=True)]
    steps = [float(settings.check_every * (check + 1)) for check in reached]
    return [
        Row(label, SECONDS_TO, "s", seconds),
        Row(label, STEPS_TO, "steps", steps),
        Row(label, DIFFERENCE, "", [max(one["differences"]) for one in fits]),
        Row(label, FROM_ORDER, "", [max(one["from_order"]) for one in fits]),
        Row(label, FROM_REPEAT, "", [max(one["from_repeat"]) for one in fits if "from_repeat" in one]),
        Row(label, RIGHT, "", [round(share, 4) for share in fits[0]["right"]]),
        Row(label, ELAPSED, "s", [round(second, 4) for second in fits[0]["seconds"]]),
    ]


def _reached(settings: AccumulationSettings, label: str, right: list[float]) -> int:
    """The first check at which the accuracy was there; ValueError if it never was."""
    for check, share in enumerate(right):
        if share >= settings.accuracy:
            return check
    raise ValueError(
        f"{label} has at most {max(right, default=0):.2f} of the held-out images right after {settings.steps} steps, "
        f"and accuracy={settings.accuracy} is asked for: use more steps, or a smaller accuracy"
    )


def _without_times(answer: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    return {label: [{**one, "seconds": None} for one in fits] for label, fits in answer.items()}
