"""Runs a step without leaving a trace: stand-ins, copies, and everything put back."""

from retime.foundations.preserve_state.outside import ExternalTensors, GlobalsSnapshot, ObserverMode, ValueReadError
from retime.foundations.preserve_state.stand_ins import (
    DryMode,
    Replacement,
    Undo,
    aliases,
    copies,
    fake,
    reachable_tensors,
    stand_in_optimizer,
    stand_ins,
    undisturbed,
)
from retime.foundations.preserve_state.state import (
    CompiledCode,
    Untouched,
    cuda_generators,
    nothing_compiled,
    random_state,
    seed_all,
    seed_torch,
    set_random_state,
    why_not_replaced,
)

__all__ = [
    "GlobalsSnapshot",
    "CompiledCode",
    "DryMode",
    "ObserverMode",
    "ExternalTensors",
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
