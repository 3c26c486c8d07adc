"""What the BPPSA paper states in numbers for recurrent networks; its figures' points have no printed values.

Tables 4 to 6 are seconds an epoch on a V100; ratios of them need no epoch's length.
"""

from dataclasses import dataclass

from retime.recipes.core.claims import Claim

PAPER = "bppsa"

OVERALL_RNN = Claim(PAPER, "section 5.1, Figure 7", "x", 2.73, "RNN, T=1000, B=16, whole training (RTX 2070)")
BACKWARD_RNN = Claim(PAPER, "section 5.1, Figure 7", "x", 16.0, "RNN, T=1000, B=16, backward (RTX 2070)")
MOST_OVERALL = Claim(PAPER, "section 5.1, Figure 8", "x", 2.75, "RNN, whole step, at most (RTX 2070)")
MOST_BACKWARD = Claim(PAPER, "section 5.1, Figure 8", "x", 108.0, "RNN, backward, at most (RTX 2080Ti)")
MOST_OVERALL_GRU = Claim(PAPER, "section 5.2, Figure 9", "x", 2.36, "GRU, whole step, at most")
MOST_BACKWARD_GRU = Claim(PAPER, "section 5.2, Figure 9", "x", 13.4, "GRU, backward without overhead, at most")


@dataclass(frozen=True)
class EpochSeconds:
    """One column or row of Tables 4 to 6: seconds an epoch of the forward pass alone, of the baseline and of BPPSA.

    `with_overhead` is the forward pass with what BPPSA adds to it, the GRU's gates computed again; else `forward`.
    """

    table: str
    what: str
    forward: float
    baseline: float
    scan: float
    with_overhead: float | None = None

    def overall(self) -> Claim:
        return Claim(PAPER, self.table, "x", self.baseline / self.scan, f"{self.what}, whole step (V100)")

    def backward(self) -> Claim:
        prepared = self.forward if self.with_overhead is None else self.with_overhead
        value = (self.baseline - self.forward) / (self.scan - prepared)
        return Claim(PAPER, self.table, "x", value, f"{self.what}, backward (V100)")


_TABLE_4 = {
    10: (1.57, 4.49, 4.24),
    30: (2.13, 5.5, 4.91),
    100: (3.82, 8.87, 6.64),
    300: (8.79, 18.49, 11.71),
    1000: (25.86, 53.33, 29.29),
    3000: (75.33, 157.11, 79.48),
    10000: (250.28, 510.13, 265.02),
    30000: (748.99, 1557.94, 764.31),
}
_TABLE_5 = {
    256: (2.13, 4.02, 3.72),
    128: (3.87, 7.96, 5.49),
    64: (7.51, 14.77, 9.27),
    32: (13.62, 29.51, 15.0),
    16: (25.86, 53.33, 29.29),
    8: (51.29, 102.77, 56.37),
    4: (100.55, 209.67, 112.23),
    2: (200.65, 409.33, 227.13),
}
_TABLE_6 = {
    ("S", 16): (1.66, 3.71, 2.94, 2.1),
    ("S", 32): (0.91, 1.9, 1.48, 1.09),
    ("S", 64): (0.52, 1.0, 0.82, 0.62),
    ("M", 16): (3.21, 6.19, 4.2, 3.52),
    ("M", 32): (1.73, 3.3, 2.22, 1.83),
    ("M", 64): (0.86, 1.82, 1.2, 1.18),
    ("L", 16): (5.78, 11.43, 6.91, 6.06),
    ("L", 32): (3.04, 6.09, 3.57, 3.23),
    ("L", 64): (1.64, 3.19, 2.33, 2.13),
}

BY_LENGTH = {length: EpochSeconds("Table 4", f"RNN, T={length}, B=16", *row) for length, row in _TABLE_4.items()}
BY_BATCH = {size: EpochSeconds("Table 5", f"RNN, T=1000, B={size}", *row) for size, row in _TABLE_5.items()}
BY_FEATURES = {
    (name, size): EpochSeconds("Table 6", f"GRU, {name}, B={size}", *row) for (name, size), row in _TABLE_6.items()
}
