"""What a budget below the floor is told, and what had happened until then."""

from __future__ import annotations

from typing import Any

import torch

from retime.recipes.modnn_budget_worker import Training
from retime.recipes.modnn_processes import Answer
from retime.schedules.memory.errors import BudgetError


def serve() -> Answer:
    """For :class:`Worker`: asks for a budget of `share` of the floor."""
    torch.set_num_threads(1)
    return _refuse


def _refuse(request: dict[str, Any]) -> dict[str, Any]:
    training = Training(request, torch.load(request["batch"], map_location=request["device"]))
    floor = training.floor_bytes()
    before = [parameter.detach().clone() for parameter in training.model.parameters()]
    training.inside = training.budgeted(int(request["share"] * floor))
    steps = 0
    message, said = "", dict.fromkeys(("floor", "task", "layer", "what would help"), False)
    try:
        training.step()
        steps += 1
    except BudgetError as error:
        message = str(error)
        said = {
            "floor": str(error.floor_bytes) in message,
            "task": bool(error.task) and error.task in message,
            "layer": bool(error.layer) and error.layer in message,
            "what would help": bool(error.hint) and error.hint in message,
        }
    training.close()
    unchanged = all(torch.equal(*pair) for pair in zip(before, training.model.parameters(), strict=True))
    return {"steps before": steps, "weights unchanged": unchanged, "said": said, "message": message}
