"""What the optimizer-fusion paper (Jiang et al. 2021) states in numbers, as in `claims.yaml`."""

from functools import partial

from retime.recipes.core.claims import Claim, claim_of, paper

PAPER = "optimizer-fusion"
claim = partial(claim_of, "fusion")
_TABLE_2 = (
    *(("ms", "baseline"), ("ms", "forward-fusion"), ("ms", "backward-fusion")),
    *(("x", "forward-fusion speedup"), ("x", "backward-fusion speedup")),
)


def table_2() -> dict[str, list[Claim]]:
    """Table 2, a row a machine: three step times, and the speedups of forward- and backward-fusion."""
    return {
        machine: [
            Claim(PAPER, "Table 2", unit, value, f"{machine}, {what}")
            for value, (unit, what) in zip(row, _TABLE_2, strict=True)
        ]
        for machine, row in paper("fusion").tables["table-2"].items()
    }
