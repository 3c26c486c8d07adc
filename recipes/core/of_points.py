"""What reports say of measured points: the machine's name, sizes, and how many times faster one variant is."""

from textwrap import fill
from typing import Any

from retime.foundations.measure import Spread, speedup
from retime.recipes.core.results import Point, Result


def ratio(point: Point, reference: str | None, variant: str, quantity: str = "step") -> Spread | None:
    """How many times faster `variant` is than `reference`; None if one of them was not measured."""
    if reference is None or not point.has(reference, quantity) or not point.has(variant, quantity):
        return None
    return speedup(point.values(reference, quantity), point.values(variant, quantity))


_SIZES = {
    "image_size": "{} px",
    "width": "width {}",
    "layers": "{} layers",
    "hidden_size": "hidden size {}",
    "tokens": "{} tokens",
    "batch_size": "batch {}",
}
"""What a title says of the sizes among a point's settings, in this order."""
_BATCH_AXES = {"B", "batch_size", "images"}
LONGEST_LINE, MOST_NAMED = 75, 4


def titled(result: Result, more: str = "") -> str:
    """A chart's title: what it is, with `more` if there is any, and below it where that was measured and its sizes."""
    below = "; ".join(filter(None, (hardware_line(result), sizes(result))))
    return f"{result.title}{f', {more}' if more else ''}\n{fill(below, LONGEST_LINE)}"


def sizes(result: Result) -> str:
    """Sizes of images, networks and batches, as settings say: `64 px, width 0.5 (VGG-16), batch 8 to 32`.

    Nothing of a simulation: what it takes from its settings differs from point to point.
    """
    if result.simulated:
        return ""
    values: dict[str, dict[float, list[str]]] = {key: {} for key in _SIZES}
    names = [", ".join(str(value) for value in point.at.values() if isinstance(value, str)) for point in result.points]
    for name, point in zip(names, result.points, strict=True):
        for key, value in _sizes_in(point.settings).items():
            if key != "batch_size" or not _BATCH_AXES & point.at.keys():
                values[key].setdefault(value, []).append(name)
    words = []
    for key, text in _SIZES.items():
        if not values[key]:
            continue
        named = {value: list(dict.fromkeys(of)) for value, of in values[key].items() if set(of) != set(names)}
        if len(values[key]) > 2 or sum(map(len, named.values())) > MOST_NAMED:
            ends = dict.fromkeys(f"{end(values[key]):g}" for end in (min, max))
            words.append(text.format(" to ".join(ends)))
        else:
            of_some = {value: f" ({', '.join(of)})" for value, of in named.items()}
            words += [text.format(f"{value:g}") + of_some.get(value, "") for value in values[key]]
    return ", ".join(words)


def _sizes_in(settings: dict[str, Any]) -> dict[str, float]:
    """The sizes by name; those of a case, a network or data inside take the place of the settings' own."""
    found = {
        key: value for key, value in settings.items() if key in _SIZES and isinstance(value, int | float) and value
    }
    for value in settings.values():
        found |= _sizes_in(value) if isinstance(value, dict) else {}
    return found


def hardware_line(result: Result) -> str:
    """Name of the first point's machine, for a chart's title; emulated networks and simulations are named."""
    if result.simulated:
        return "simulated"
    hardware = result.points[0].hardware
    chosen = result.points[0].settings.get("hardware", {})
    cores = chosen.get("cores") or hardware.get("cores")
    name = hardware.get("accelerator", hardware.get("processor", "unknown machine"))
    words = [name, *([f"{cores} core{'s' if str(cores) != '1' else ''}"] if cores else [])]
    return ", ".join([*words, *(["emulated network"] if chosen.get("name") == "emulated" else [])])
