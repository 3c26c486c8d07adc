"""Which mechanisms a strategy brings along, for the table of what goes together."""

from __future__ import annotations

from lightning.pytorch.strategies import DDPStrategy, Strategy

from retime.mechanisms.capabilities import Mechanism


def mechanisms_of(strategy: Strategy) -> tuple[Mechanism, ...]:
    """Those of a strategy of retime's or of anyone's; a communication hook of the user's own counts as one."""
    ours: tuple[Mechanism, ...] = getattr(strategy, "mechanisms", ())
    hooked = isinstance(strategy, DDPStrategy) and strategy._ddp_comm_hook is not None
    return (*ours, Mechanism.USERS_HOOK) if hooked else ours
