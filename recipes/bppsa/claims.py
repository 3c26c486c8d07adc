"""What BPPSA (Wang, Bai and Pekhimenko 2020) states in numbers, as in `claims.yaml`; most figures' points have none."""

from functools import partial

from retime.recipes.core.claims import Claim, claim_of, paper

claim = partial(claim_of, "bppsa")


def of_epochs(table: str, what: str) -> dict[str, Claim]:
    """The speedups of a column or row of Tables 4 to 6, by phase: step and backward; none if it is not there.

    The tables are seconds an epoch; ratios of them need no epoch's length. A forward pass with the GRU's gates computed
    again is taken off instead of the plain one, where the table has it.
    """
    seconds = paper("bppsa").tables[table].get(what)
    if seconds is None:
        return {}
    forward, baseline, scan, *prepared = seconds
    backward = (baseline - forward) / (scan - (prepared or [forward])[0])
    return {
        "step": Claim("bppsa", table, "x", baseline / scan, f"{what}, whole step (V100)"),
        "backward": Claim("bppsa", table, "x", backward, f"{what}, backward (V100)"),
    }
