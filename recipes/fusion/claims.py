"""Table 2 of the optimizer-fusion paper (Jiang et al. 2021); what else it states in numbers stands in `claims.yaml`."""

from dataclasses import dataclass
from functools import partial

from retime.recipes.core.claims import Claim
from retime.recipes.core.published import claim_of

PAPER = "optimizer-fusion"
claim = partial(claim_of, "fusion")


@dataclass(frozen=True)
class Table2Row:
    """One machine of Table 2: MobileNetV2, batch 32; step times in ms and speedups as printed."""

    machine: str
    baseline_ms: float
    forward_ms: float
    backward_ms: float
    forward_speedup: float
    backward_speedup: float

    def claims(self) -> list[Claim]:
        cells = (
            ("ms", self.baseline_ms, "baseline"),
            ("ms", self.forward_ms, "forward-fusion"),
            ("ms", self.backward_ms, "backward-fusion"),
            ("x", self.forward_speedup, "forward-fusion speedup"),
            ("x", self.backward_speedup, "backward-fusion speedup"),
        )
        return [Claim(PAPER, "Table 2", unit, value, f"{self.machine}, {what}") for unit, value, what in cells]


TABLE_2 = (
    Table2Row("Core i9-7900X, TITAN Xp", 98.77, 84.52, 82.99, 1.17, 1.19),
    Table2Row("Core i7-3770, GTX 1080", 163.60, 145.80, 129.71, 1.12, 1.26),
    Table2Row("Core i7-8750H, GTX 1070 maxQ", 174.43, 157.27, 158.89, 1.11, 1.10),
)
