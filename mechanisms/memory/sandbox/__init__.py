"""Runs a step without leaving a trace: stand-ins, copies, and everything put back."""

from retime.mechanisms.memory.sandbox.bound_names import BoundNames
from retime.mechanisms.memory.sandbox.dry_mode import DryMode
from retime.mechanisms.memory.sandbox.generators import cuda_generators, seed_torch
from retime.mechanisms.memory.sandbox.model_state import (
    Untouched,
    random_state,
    seed_all,
    set_random_state,
    why_not_replaced,
)
from retime.mechanisms.memory.sandbox.onlooker import Onlooker
from retime.mechanisms.memory.sandbox.outside import Outside
from retime.mechanisms.memory.sandbox.stand_ins import (
    Replacement,
    aliases,
    copies,
    fake,
    stand_in_optimizer,
    stand_ins,
)
from retime.mechanisms.memory.sandbox.uncompiled import CompiledCode, nothing_compiled
from retime.mechanisms.memory.sandbox.undisturbed import undisturbed
from retime.mechanisms.memory.sandbox.undo import Undo, reachable_tensors
from retime.mechanisms.memory.sandbox.value_reads import ValueReadError

__all__ = [
    "BoundNames",
    "CompiledCode",
    "DryMode",
    "Onlooker",
    "Outside",
    "Replacement",
    "Undo",
    "Untouched",
    "ValueReadError",
    "aliases",
    "copies",
    "cuda_generators",
    "fake",
    "reachable_tensors",
    "nothing_compiled",
    "random_state",
    "seed_all",
    "seed_torch",
    "set_random_state",
    "stand_in_optimizer",
    "stand_ins",
    "undisturbed",
    "why_not_replaced",
]
