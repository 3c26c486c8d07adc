"""Cases of the out-of-order recipes: a case names what differs from the experiment's own settings."""

from typing import Any

from retime.recipes.core.schema import OutOfOrderSettings

_KEYS = (
    *("model", "data", "optimizer", "variants", "batch_size", "rate", "rounds", "warmup_rounds", "steps", "epochs"),
    *("layer_bucket_mb", "search_steps", "kind"),
)


def case_of(settings: OutOfOrderSettings, name: str) -> dict[str, Any]:
    """The case's own settings.

    Raises:
        ValueError: a key that a case cannot have.
    """
    case = dict(settings.cases[name])
    unknown = [key for key in case if key not in _KEYS]
    if unknown:
        raise ValueError(f"cases.{name}.{unknown[0]} is no setting of a case; there are {', '.join(_KEYS)}")
    return case
