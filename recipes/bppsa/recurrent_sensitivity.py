"""BPPSA's sensitivity to what it depends on: Figure 8 with Tables 4 and 5 (RNN), Figure 9 with Table 6 (GRU)."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from matplotlib.ticker import NullLocator

from retime.foundations.measure import spread
from retime.recipes.bppsa import claims
from retime.recipes.bppsa.recurrent import (
    BASELINE,
    PHASES,
    Recurrent,
    best_scan,
    bound,
    label,
    ratio,
    scans,
    steps_for,
    worst_difference,
)
from retime.recipes.bppsa.settings import RecurrentSettings
from retime.recipes.core import charts
from retime.recipes.core.claims import Claim, Comparison, show
from retime.recipes.core.recipe import Measured, Tick
from retime.recipes.core.results import Point, Result, label_of, titled


class Scaling(Recurrent):
    """Figure 8, Tables 4 and 5: over T at one batch size, and over the batch size at one T."""

    axes = ("sequence_length", "sequence_lengths", "batch_size", "batch_sizes")

    def points(self, settings: RecurrentSettings) -> list[dict[str, Any]]:
        places = [(length, settings.batch_size) for length in settings.sequence_lengths]
        places += [(settings.sequence_length, size) for size in settings.batch_sizes]
        places = places or [(settings.sequence_length, settings.batch_size)]
        return [{"T": length, "B": size} for length, size in dict.fromkeys(places)]

    def measure(self, settings: RecurrentSettings, at: dict[str, Any], tick: Tick) -> Measured:
        data = {**settings.data, "steps": at["T"], "length": at["B"]}
        return self.time(settings, tick, data, at["B"], steps_for(settings, at["T"]))

    def compare(self, result: Result) -> list[Comparison]:
        lines = most(result, "figure-8")
        for point in over_length(result):
            lines += against(point, by_length(point))
        for point in over_batch(result):
            lines += against(point, by_batch(point))
        return lines

    def notes(self, result: Result) -> list[str]:
        return [*bounds(result), worst_difference(result), EPOCHS]

    def draw(self, result: Result, path: Path) -> None:
        rows: list[tuple[list[Point], Callable[[Point], float], str, Published]] = [
            (over_length(result), length_of, "time steps T", by_length),
            (over_batch(result), fraction_of, "fraction of the device a sample, 1/B", by_batch),
        ]
        rows = [row for row in rows if row[0]] or [(result.points, *rows[0][1:])]
        drawing, panels = charts.panels(titled(result), 3 * len(rows), 14, 4.4 * len(rows), rows=len(rows))
        for row, (points, where, text, published) in enumerate(rows):
            latency, speed, breakdown = panels[3 * row : 3 * row + 3]
            draw_backward(latency, points, where)
            draw_speedups(speed, points, where, published)
            draw_breakdown(breakdown, points, [tick_label(where(point)) for point in points], published)
            for axes in (latency, speed):
                axes.set_xscale("log")
                ticks = [where(point) for point in points]
                axes.set_xticks(ticks, [tick_label(tick) for tick in ticks], fontsize=8)
                axes.xaxis.set_minor_locator(NullLocator())
            for axes in (latency, speed, breakdown):
                axes.set_xlabel(text)
        charts.save(drawing, path)


class Instruments(Recurrent):
    """Figure 9 and Table 6: a GRU on IRMAS's feature sets S, M and L, over batch sizes."""

    over = (("features", "features"), ("B", "batch_sizes"))

    def measure(self, settings: RecurrentSettings, at: dict[str, Any], tick: Tick) -> Measured:
        return self.time(settings, tick, {**settings.data, "features": at["features"]}, at["B"], settings.steps)

    def compare(self, result: Result) -> list[Comparison]:
        lines = most(result, "figure-9")
        for point in result.points:
            lines += against(point, by_features(point))
        return lines

    def notes(self, result: Result) -> list[str]:
        overhead = (
            "Overhead: ours computes the GRU's gates again inside the backward pass, so its time is in `backward`; the "
            "paper's is in the forward pass (FO), and its backward speedup leaves it out."
        )
        return [*bounds(result), worst_difference(result), overhead, EPOCHS]

    def draw(self, result: Result, path: Path) -> None:
        drawing, axes = charts.figure(titled(result), width=11)
        names = [f"{point.at['features']}, B={point.at['B']}" for point in result.points]
        draw_breakdown(axes, result.points, names, by_features)
        charts.save(drawing, path)


Published = Callable[[Point], dict[str, Claim]]
TABLES_OF = "V100"
BELOW: Any = {"fontsize": 7, "loc": "upper center", "bbox_to_anchor": (0.5, -0.13), "ncols": 2, "frameon": False}
EPOCHS = "Tables 4 to 6 give seconds an epoch; their ratios stand beside ours, which are ratios of steps."


def by_length(point: Point) -> dict[str, Claim]:
    """Table 4 at the point's T, by phase."""
    return claims.of_epochs("Table 4", f"RNN, T={point.at['T']}, B=16")


def by_batch(point: Point) -> dict[str, Claim]:
    """Table 5 at the point's batch size, by phase."""
    return claims.of_epochs("Table 5", f"RNN, T=1000, B={point.at['B']}")


def by_features(point: Point) -> dict[str, Claim]:
    """Table 6 at the point's features and batch size, by phase."""
    return claims.of_epochs("Table 6", f"GRU, {point.at['features']}, B={point.at['B']}")


def most(result: Result, figure: str) -> list[Comparison]:
    """The largest speedups over all points and variants beside the paper's largest."""
    lines = []
    for phase, which in (("backward", "backward"), ("step", "overall")):
        speeds = [(ratio(point, name, phase), point, name) for point in result.points for name in scans(point)]
        best = max(((s, p, n) for s, p, n in speeds if s), key=lambda entry: entry[0].median, default=None)
        over, note = (best[0], f"{label_of(best[1].at)}, {label(best[2], best[1])}") if best else (None, "")
        lines.append(Comparison(claims.claim(f"{figure}-{which}"), over, note))
    return lines


def against(point: Point, row: dict[str, Claim]) -> list[Comparison]:
    """A table's row, if there is one, beside the fastest of our variants at that point."""
    ours = best_scan(point)
    published = row.items() if ours else ()
    return [Comparison(theirs, ratio(point, str(ours), phase), label(str(ours), point)) for phase, theirs in published]


def bounds(result: Result) -> list[str]:
    """How close each point comes to a backward pass that takes no time."""
    lines = []
    for point in result.points:
        ours, most_possible = best_scan(point), bound(point)
        reached = ratio(point, ours, "step") if ours else None
        if reached and most_possible:
            lines.append(
                f"- {label_of(point.at)}: step {show(reached, 'x')} over torch.nn; with torch.nn's forward pass and a "
                f"backward pass that took no time it would be {show(most_possible, 'x')}"
            )
    if lines:
        lines.append(
            "Ours can pass that bound: its forward pass records no graph of every time step, so it is faster as well."
        )
    return lines


def over_length(result: Result) -> list[Point]:
    """The points along T, at the batch size that most of them share."""
    return _along(result, "T", "B")


def over_batch(result: Result) -> list[Point]:
    """The points along the batch size, at the T that most of them share; falling, as the fraction of a device rises."""
    return _along(result, "B", "T")[::-1]


def _along(result: Result, axis: str, fixed: str) -> list[Point]:
    values = [point.at[fixed] for point in result.points]
    shared = max(values, key=lambda value: (values.count(value), value))
    points = sorted((p for p in result.points if p.at[fixed] == shared), key=lambda p: int(p.at[axis]))
    return points if len(points) > 1 else []


def length_of(point: Point) -> float:
    return float(point.at["T"])


def fraction_of(point: Point) -> float:
    """The paper's "fraction of GPU per sample"."""
    return 1 / int(point.at["B"])


def tick_label(value: float) -> str:
    return f"{value:g}" if value >= 1 else f"1/{round(1 / value)}"


def draw_backward(axes: Any, points: list[Point], where: Callable[[Point], float]) -> None:
    """Panels a and d: milliseconds of a backward pass."""
    for index, name in enumerate([BASELINE, *scans(points[0])]):
        values = [spread(point.values(name, "backward")) for point in points]
        charts.points_with_spread(axes, [where(p) for p in points], values, label(name), index, line=True)
    axes.set_yscale("log")
    charts.plain_numbers(axes.yaxis)
    axes.set_ylabel("backward pass of a step (ms)")
    axes.legend(**BELOW)


def draw_speedups(axes: Any, points: list[Point], where: Callable[[Point], float], published: Published) -> None:
    """Panels b and e: speedup of the backward pass, and of the whole step beside it; the paper's hollow."""
    index = 0
    rows = [(where(point), row) for point in points if (row := published(point))]
    for colour, marker, phase in zip(charts.COLOURS, "os", ("backward", "step"), strict=False):
        theirs = [row[phase].value for _, row in rows]
        text = f"the paper's ({TABLES_OF}): {'whole step' if phase == 'step' else phase}"
        axes.plot([x for x, _ in rows], theirs, marker, markerfacecolor="none", color=colour, label=text)
    for name in scans(points[0]):
        for phase in ("backward", "step"):
            text = f"{label(name)}: {'whole step' if phase == 'step' else phase}"
            values = [ratio(point, name, phase) for point in points]
            charts.points_with_spread(axes, [where(p) for p in points], values, text, index, line=True)
            index += 1
    charts.even_line(axes, "torch.nn")
    axes.set_yscale("log")
    charts.plain_numbers(axes.yaxis)
    axes.set_ylabel("speedup over torch.nn (x)")
    axes.legend(**BELOW)


def draw_breakdown(axes: Any, points: list[Point], names: list[str], published: Published) -> None:
    """Panels c and f, and Figure 9: phases of a step as parts of torch.nn's step, torch.nn's bar beside ours.

    A hollow circle is the paper's whole step.
    """
    for number, point in enumerate(points):
        row = published(point)
        if row:
            text = f"the paper's step ({TABLES_OF})" if not number else None
            axes.plot(number + 0.2, 1 / row["step"].value, "ko", markerfacecolor="none", label=text)
        whole = spread(point.values(BASELINE, "step")).median
        ours = best_scan(point)
        for shift, name in ((-0.2, BASELINE), (0.2, ours)):
            bottom = 0.0
            for colour, phase in zip(charts.COLOURS, PHASES, strict=False):
                height = spread(point.values(name, phase)).median / whole if name else 0.0
                text = phase if not number and name == BASELINE else None
                axes.bar(
                    number + shift, height, 0.36, bottom=bottom, color=colour, label=text, alpha=1 if shift < 0 else 0.7
                )
                bottom += height
    axes.set_xticks(range(len(points)), names, fontsize=8)
    axes.set_ylabel("time over torch.nn's step")
    axes.grid(axis="x", visible=False)
    which = "left bar: torch.nn, right bar: our fastest"
    axes.legend(**BELOW, title=which, title_fontsize=7)
