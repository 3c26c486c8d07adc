"""Where scenarios register themselves."""

from collections.abc import Callable, Mapping
from typing import Any

from contract.bench import Bench, Scenario

SCENARIOS: dict[str, Scenario] = {}

Drive = Callable[[Bench], object]


def add(name: str, drive: Drive, *traits: str, single: str = "", several: bool = False, **ddp: Any) -> None:
    """Register `drive` as a scenario; see `Scenario` for the arguments."""
    if name in SCENARIOS:
        raise ValueError(f"two scenarios are called {name!r}")
    SCENARIOS[name] = Scenario(name, drive, frozenset(traits), single, several, ddp)


def fits(*traits: str, single: str = "", several: bool = False, ddp: Mapping[str, Any] = {}, **drives: Drive) -> None:
    """Register scenarios by their names, each one fit."""
    for name, drive in drives.items():
        add(name, drive, *traits, single=single, several=several, **ddp)


def scenario(*traits: str, single: str = "", several: bool = False, **ddp: Any) -> Callable[[Drive], Drive]:
    """Register the decorated function under its own name."""

    def register(drive: Drive) -> Drive:
        add(drive.__name__, drive, *traits, single=single, several=several, **ddp)
        return drive

    return register
