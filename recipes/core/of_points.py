"""What reports say of measured points: the machine's name, and how many times faster one variant is."""

from retime.recipes.core.measure import Spread, speedup
from retime.recipes.core.results import Point, Result


def ratio(point: Point, reference: str | None, variant: str) -> Spread | None:
    """How many times faster `variant` steps than `reference`; None if one of them was not measured."""
    if reference is None or not point.has(reference, "step") or not point.has(variant, "step"):
        return None
    return speedup(point.values(reference, "step"), point.values(variant, "step"))


def titled(result: Result, more: str = "") -> str:
    """A chart's title: what it is, with `more` if there is any, and on a line of its own where that was measured."""
    return f"{result.title}{f', {more}' if more else ''}\n{hardware_line(result)}"


def hardware_line(result: Result) -> str:
    """Short name of the machine of the first point, for a chart's title; an emulated network is named."""
    hardware = result.points[0].hardware
    chosen = result.points[0].settings.get("hardware", {})
    cores = chosen.get("cores")
    name = hardware.get("accelerator", hardware.get("processor", "unknown machine"))
    words = [name, *([f"{cores} core{'s' if cores != 1 else ''}"] if cores else [])]
    return ", ".join([*words, *(["emulated network"] if chosen.get("name") == "emulated" else [])])
