"""The table: one row a strategy. Adding a strategy to the contract is adding its line to `STRATEGIES`."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from lightning.pytorch import Callback, Trainer
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy, Strategy

from contract.record import Record


@dataclass(frozen=True)
class Row:
    """A strategy, the plain one it must equal, and when it lets Lightning step plainly.

    Attributes:
        name: how the test is called.
        strategy: what to pass to `Trainer(strategy=)`, from the DDP keyword arguments a scenario needs.
        plain: "auto" for one device or "ddp" for two gloo ranks.
        callbacks: fresh callbacks for one Trainer.
        tolerance: 0 compares the bits; otherwise the relative and absolute tolerance the docstring promises.
        unfused: the traits for which the mechanism must be off. Without any of them it must be on.
        report: where the mechanism's `report()` is; None when the row has no mechanism.
    """

    name: str
    strategy: Callable[[dict[str, Any]], Strategy | str]
    plain: str = "auto"
    callbacks: Callable[[], list[Callback]] = list
    tolerance: float = 0.0
    unfused: frozenset[str] = frozenset()
    report: Callable[[Trainer], Any] | None = None

    @property
    def reference(self) -> "Row":
        return PLAIN[self.plain]

    def expect_fused(self, traits: frozenset[str]) -> bool:
        """Whether the mechanism must have made updates in a scenario with these traits."""
        return self.report is not None and not self.unfused & traits

    def check_activity(self, traits: frozenset[str], record: Record) -> None:
        """Raise an AssertionError if the mechanism was off where it must be on, or the other way round."""
        if self.report is None:
            return
        if self.expect_fused(traits):
            off = [str(number + 1) for number, updates in enumerate(record.fused_updates) if not updates]
            assert not off, f"fusion was off in fit {', '.join(off)}: {record.reasons or 'no reason given'}"
            assert not record.no_effect, f"warned although fusion was on: {record.no_effect}"
        else:
            assert not any(record.fused_updates), f"fusion was on with a trait it cannot have: {set(traits)}"
            assert record.reasons, "fusion was off and report() gives no reason"
            assert record.no_effect, f"fusion was off ({record.reasons}) and nothing warned"


PLAIN = {
    "auto": Row("plain", lambda _: "auto"),
    "ddp": Row("plain_ddp", lambda ddp: DDPStrategy(**ddp), plain="ddp"),
}

STRATEGIES = [
    # Whatever differs in this row is the table's own doing.
    Row("plain_again", lambda _: SingleDeviceStrategy("cpu")),
]
