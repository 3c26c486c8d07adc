"""Runs a step without leaving a trace: stand-ins, copies, and everything put back."""

from retime.foundations.preserve_state.bound_names import BoundNames
from retime.foundations.preserve_state.dry_mode import DryMode
from retime.foundations.preserve_state.generators import cuda_generators, seed_torch
from retime.foundations.preserve_state.model_state import (
    Untouched,
    random_state,
    seed_all,
    set_random_state,
    why_not_replaced,
)
from retime.foundations.preserve_state.onlooker import Onlooker
from retime.foundations.preserve_state.outside import Outside
from retime.foundations.preserve_state.stand_ins import (
    Replacement,
    aliases,
    copies,
    fake,
    stand_in_optimizer,
    stand_ins,
)
from retime.foundations.preserve_state.uncompiled import CompiledCode, nothing_compiled
from retime.foundations.preserve_state.undisturbed import undisturbed
from retime.foundations.preserve_state.undo import Undo, reachable_tensors
from retime.foundations.preserve_state.value_reads import ValueReadError

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
    "nothing_compiled",
    "random_state",
    "reachable_tensors",
    "seed_all",
    "seed_torch",
    "set_random_state",
    "stand_in_optimizer",
    "stand_ins",
    "undisturbed",
    "why_not_replaced",
]
