"""Recipes that simulate: their results say so."""

from retime.recipes.core.recipe import Recipe, S


class SimulatedRecipe(Recipe[S]):
    """A recipe whose result says that it is simulated."""

    simulated = True
