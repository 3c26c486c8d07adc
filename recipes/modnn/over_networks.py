"""What most recipes on moDNN share: their points are the networks of `cases`."""

from __future__ import annotations

from typing import Any

from retime.recipes.core.recipe import Recipe
from retime.recipes.core.schema import MemorySettings


class NetworkRecipe(Recipe[MemorySettings]):
    """A point a network, unless a recipe has more of them."""

    axes: tuple[str, ...] = ("cases",)

    def points(self, settings: MemorySettings) -> list[dict[str, Any]]:
        return [{"network": name} for name in settings.cases]

    def detail(self, settings: MemorySettings, at: dict[str, Any]) -> dict[str, Any]:
        return {"network": settings.cases[at["network"]]}

    def blocks(self, settings: MemorySettings) -> int | None:
        a_round = self.blocks_a_round(settings)
        return None if a_round is None else a_round * (settings.rounds + settings.warmup_rounds)

    def blocks_a_round(self, settings: MemorySettings) -> int | None:
        """How many variants take turns, if that is known before a point runs."""
        return None
