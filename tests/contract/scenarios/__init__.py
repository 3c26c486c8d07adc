"""The runs, one file a theme; importing this package registers them all in `contract.registry.SCENARIOS`."""

from importlib import import_module
from pathlib import Path

from contract.registry import SCENARIOS

__all__ = ["SCENARIOS"]

for _theme in sorted(Path(__file__).parent.glob("[a-z]*.py")):
    import_module(f"contract.scenarios.{_theme.stem}")
