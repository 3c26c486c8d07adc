"""What the out-of-order backprop paper (Oh et al. 2022) states in numbers, and what we want: as in `claims.yaml`."""

from functools import partial
from typing import Any

from retime.recipes.core.claims import Claim, claim_of, paper, target_of

claim = partial(claim_of, "ooo")
target = partial(target_of, "ooo")


def scaling() -> dict[tuple[str, str, int], Claim]:
    """Figure 10, by cluster, network and GPUs: the speedup over BytePS that the text gives."""
    rows = paper("ooo").tables["figure-10"]
    return {tuple(at): Claim("ooo-backprop", "section 8.3, Figure 10", "x", value, what) for *at, value, what in rows}


def pipelines(figure: str) -> dict[tuple[Any, str, str], Claim]:
    """A figure of pipelines, by case, schedule and what it is over, if anything."""
    rows = paper("ooo").tables["pipelines"].get(figure, [])
    return {(case, name, over): Claim("Oh et al. 2022", *printed) for case, name, over, *printed in rows}
