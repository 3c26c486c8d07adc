"""Which mechanisms a strategy brings along, for the table of what goes together."""

from __future__ import annotations

from lightning.pytorch.strategies import DDPStrategy, Strategy

from retime.foundations.compatibility import Mechanism
from retime.strategies.support.lightning_private import user_comm_hook


def mechanisms_of(strategy: Strategy) -> tuple[Mechanism, ...]:
    """Those of a strategy of retime's or of anyone's; a communication hook of the user's own counts as one."""
    ours: tuple[Mechanism, ...] = getattr(strategy, "mechanisms", ())
    hooked = isinstance(strategy, DDPStrategy) and user_comm_hook(strategy)[0] is not None
    return (*ours, Mechanism.USERS_HOOK) if hooked else ours
