"""Collections of garbage, of which plans, dry runs and tests ask for many, made short."""

import gc


def pass_over_what_is_there() -> None:
    """Collect once, and let later collections look at new objects only: what was imported are some 400,000."""
    gc.collect()
    gc.freeze()
