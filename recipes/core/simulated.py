"""Recipes that simulate: their results say so."""

from retime.recipes.core.recipe import Recipe
from retime.recipes.core.schema import SimulatedSettings


class SimulatedRecipe(Recipe[SimulatedSettings]):
    """A recipe whose result says that it is simulated."""

    simulated = True
