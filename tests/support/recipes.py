"""Experiments in small: settings as the command line gives them, and the picture of a result."""

from copy import deepcopy
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from hydra import compose, initialize_config_module
from rich.console import Console

from retime.foundations.workers import Worker
from retime.recipes.core.recipe import Recipe
from retime.recipes.core.results import Result
from retime.recipes.core.schema import register_all, settings_of


def settings_for(*overrides: str) -> Any:
    """The settings of `settings_for("experiment=demo", "rounds=1")`."""
    return deepcopy(_composed(*overrides))


@cache
def _composed(*overrides: str) -> Any:
    register_all()
    with initialize_config_module("retime.conf", version_base=None):
        return settings_of(compose("config", list(overrides)))


def fork_workers(monkeypatch: pytest.MonkeyPatch, module: ModuleType) -> None:
    """Fork a module's workers, seconds sooner than from nothing, which only settings of the C library need."""

    def forked(*given: Any, environment: dict[str, str], **more: Any) -> Worker:
        return Worker(*given, variables=environment, **more)

    monkeypatch.setattr(module, "Worker", forked)


def ran(recipe: Recipe[Any], settings: Any, folder: Path, least_bytes: int = 1000) -> Result:
    """What the recipe finds, and it draws a picture of that."""
    result = recipe.run(settings, folder, Console(quiet=True))
    assert_draws(recipe, result, folder, least_bytes)
    return result


def assert_draws(recipe: Recipe[Any], result: Result, folder: Path, least_bytes: int = 1000) -> None:
    """The recipe draws a picture with something in it."""
    recipe.draw(result, folder / "picture.png")
    assert (folder / "picture.png").stat().st_size > least_bytes
