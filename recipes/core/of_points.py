"""What reports say of measured points: the machine's name, and how many times faster one variant is."""

from retime.recipes.core.measure import Spread, speedup
from retime.recipes.core.results import Point, Result


def ratio(point: Point, reference: str | None, variant: str) -> Spread | None:
    """How many times faster `variant` steps than `reference`; None if one of them was not measured."""
    if reference is None or not point.has(reference, "step") or not point.has(variant, "step"):
        return None
    return speedup(point.values(reference, "step"), point.values(variant, "step"))


def hardware_line(result: Result) -> str:
    """Short name of the machine of the first point, for a chart's title."""
    hardware = result.points[0].hardware
    cores = result.points[0].settings.get("hardware", {}).get("cores")
    name = hardware.get("accelerator", hardware.get("processor", "unknown machine"))
    return f"{name}, {cores} core{'s' if cores != 1 else ''}" if cores else name
