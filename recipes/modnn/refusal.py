"""What a budget below the floor is told, whether what it is told is so, and what had happened until then."""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import nn

from retime.foundations.workers import Answer
from retime.recipes.modnn.budget_worker import Training
from retime.schedules.budget import BudgetError

FLOOR, TASK, LAYER, HINT = "a floor that trains", "an operation", "a layer of the model", "what would help"
_MESSAGE = re.compile(
    r"at least (?P<floor>\d+) bytes(?: \([^)]*\))? are needed"
    r"(?: at task '(?P<task>\w+)[^']*' of layer '(?P<layer>[^']*)')?\. (?P<hint>.*?) For batch size finders"
)
_HINT = re.compile(r"\b(would help|choose)\b")


def serve() -> Answer:
    """For :class:`Worker`: asks for a budget of `share` of the floor, then for the floor that the refusal names."""
    torch.set_num_threads(1)
    return _refuse


def _refuse(request: dict[str, Any]) -> dict[str, Any]:
    training = Training(request, torch.load(request["batch"], map_location=request["device"]))
    floor = training.floor_bytes()
    before = [parameter.detach().clone() for parameter in training.model.parameters()]
    training.inside = training.budgeted(int(request["share"] * floor))
    steps, message = 0, ""
    try:
        training.step()
        steps += 1
    except BudgetError as error:
        message = str(error)
    training.close()
    unchanged = all(torch.equal(*pair) for pair in zip(before, training.model.parameters(), strict=True))
    said, at_floor = check(message, training)
    return {
        "steps before": steps,
        "weights unchanged": unchanged,
        "said": said,
        "message": message,
        "at the floor it names": at_floor,
    }


def check(message: str, training: Training) -> tuple[dict[str, bool], str]:
    """What a reader of the message can do with it, and what comes of training in the floor that it names."""
    found = _MESSAGE.search(message)
    if found is None:
        return dict.fromkeys((FLOOR, TASK, LAYER, HINT), False), "none was named"
    at_floor = _train_in(int(found["floor"]), training)
    said = {
        FLOOR: at_floor == "trained",
        TASK: hasattr(torch.ops.aten, found["task"] or ""),
        LAYER: found["layer"] in _names(training.model),
        HINT: bool(_HINT.search(found["hint"])),
    }
    return said, at_floor


def _train_in(budget_bytes: int, training: Training) -> str:
    try:
        training.limit(budget_bytes)
        training.step()
    except BudgetError as error:
        return str(error)
    finally:
        training.close()
    return "trained"


def _names(model: nn.Module) -> set[str]:
    return {name for name, _ in model.named_modules()}
