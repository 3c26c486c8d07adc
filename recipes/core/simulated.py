"""Recipes that simulate: their results say so."""

from pathlib import Path

from retime.recipes.core.recipe import Recipe
from retime.recipes.core.results import Result
from retime.recipes.core.schema import SimulatedSettings


class SimulatedRecipe(Recipe[SimulatedSettings]):
    """A recipe whose result says that it is simulated."""

    def _open(self, settings: SimulatedSettings, folder: Path) -> Result:
        result = super()._open(settings, folder)
        result.simulated = True
        return result
