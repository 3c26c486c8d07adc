"""Experiments in small: settings as the command line gives them, and the picture of a result."""

from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_module

from retime.recipes.core.recipe import Recipe
from retime.recipes.core.results import Result
from retime.recipes.core.schema import register_all, settings_of


def settings_for(*overrides: str) -> Any:
    """The settings of `settings_for("experiment=demo", "rounds=1")`."""
    register_all()
    with initialize_config_module("retime.conf", version_base=None):
        return settings_of(compose("config", list(overrides)))


def assert_draws(recipe: Recipe[Any], result: Result, folder: Path) -> None:
    """The recipe draws a picture with something in it."""
    recipe.draw(result, folder / "picture.png")
    assert (folder / "picture.png").stat().st_size > 1000
