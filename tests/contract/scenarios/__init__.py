"""The runs, one file a theme; importing this package registers them all in `contract.registry.SCENARIOS`."""

from contract.registry import SCENARIOS
from contract.scenarios import (
    accumulation,
    averaging,
    checkpoints,
    compiled,
    constants,
    determinism,
    evaluation,
    hooks,
    interruptions,
    manual,
    optimizers,
    parameters,
    precision,
    readers,
    reinforcement,
    schedules,
    several_ranks,
    templates,
    tuning,
)

__all__ = ["SCENARIOS"]

THEMES = (
    accumulation,
    averaging,
    checkpoints,
    compiled,
    constants,
    determinism,
    evaluation,
    hooks,
    interruptions,
    manual,
    optimizers,
    parameters,
    precision,
    readers,
    reinforcement,
    schedules,
    several_ranks,
    templates,
    tuning,
)
