"""What most recipes on moDNN share: their points are the networks of `cases`."""

from __future__ import annotations

from typing import Any

from retime.recipes.core.recipe import Recipe
from retime.recipes.modnn.settings import MemorySettings


class NetworkRecipe(Recipe[MemorySettings]):
    """A point a network, unless a recipe has more of them."""

    over: tuple[tuple[str, str], ...] = (("network", "cases"),)

    def detail(self, settings: MemorySettings, at: dict[str, Any]) -> dict[str, Any]:
        return {"network": settings.cases[at["network"]]}
