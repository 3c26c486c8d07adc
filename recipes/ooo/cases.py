"""Cases of the out-of-order recipes: a case names what differs from the experiment's own settings."""

from dataclasses import fields, replace
from typing import TypeVar

from retime.recipes.core.schema import Settings

S = TypeVar("S", bound=Settings)
_NOT_OF_A_CASE = {"cases", *(field.name for field in fields(Settings))} - {"rounds", "warmup_rounds", "steps"}


def of_case(settings: S, name: str, *own: str) -> S:
    """The settings of the case `name`, whose keys `own` are no settings.

    Raises:
        ValueError: a key that a case cannot have.
    """
    case = settings.cases[name]  # type: ignore[attr-defined]
    there = [field.name for field in fields(settings) if field.name not in _NOT_OF_A_CASE]
    unknown = [key for key in case if key not in (*there, *own)]
    if unknown:
        raise ValueError(f"cases.{name}.{unknown[0]} is no setting of a case; there are {', '.join((*there, *own))}")
    return replace(settings, **{key: value for key, value in case.items() if key not in own})
