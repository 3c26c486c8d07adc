"""Where scenarios register themselves."""

from collections.abc import Callable
from typing import Any

from contract.bench import Bench, Scenario

SCENARIOS: dict[str, Scenario] = {}

Drive = Callable[[Bench], None]


def add(name: str, drive: Drive, *traits: str, single: str = "", several: bool = False, **ddp: Any) -> None:
    """Register `drive` as a scenario; see `Scenario` for the arguments."""
    if name in SCENARIOS:
        raise ValueError(f"two scenarios are called {name!r}")
    SCENARIOS[name] = Scenario(name, drive, frozenset(traits), single, several, ddp)


def scenario(*traits: str, single: str = "", several: bool = False, **ddp: Any) -> Callable[[Drive], Drive]:
    """Register the decorated function under its own name."""

    def register(drive: Drive) -> Drive:
        add(drive.__name__, drive, *traits, single=single, several=several, **ddp)
        return drive

    return register
