"""Runs a step without leaving a trace: stand-ins, copies, and everything put back."""

from retime.foundations.preserve_state.outside import ExternalTensors, ObserverMode, ValueReadError
from retime.foundations.preserve_state.stand_ins import (
    DryMode,
    Replacement,
    ScratchModel,
    aliases,
    copies,
    fake,
    stand_in_optimizer,
    stand_ins,
    why_not_replaced,
)
from retime.foundations.preserve_state.state import (
    LARGE_BYTES,
    CompiledCode,
    SavedState,
    nothing_compiled,
    preserve_state,
    random_state,
    reachable_tensors,
    seed_all,
    seed_torch,
    set_random_state,
)
