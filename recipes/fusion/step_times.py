"""The common part of the optimizer-fusion recipes: time the bare loop's variants, interleaved, at one point."""

from functools import partial
from typing import Any

import torch

from retime.foundations.measure import Spread, spread
from retime.recipes.core.build import KernelUnavailable, build_batches, build_model
from retime.recipes.core.measure import interleave
from retime.recipes.core.recipe import Measured, Recipe, Tick
from retime.recipes.core.results import Point, phase_rows
from retime.recipes.fusion.settings import FusionSettings
from retime.recipes.fusion.variants import PHASES, VARIANTS, BareLoop, choose_variants, kernel_flags
from retime.recipes.models import parameter_count, parameters_per_layer

OURS = ("retime_backward", "retime_forward")
LIKE_THE_PAPER = ("retime_backward_default", "retime_forward_default")
"""Ours with the baseline's kernel: what the paper compares. With the best kernel, two effects mix."""


class StepTimes(Recipe[FusionSettings]):
    """A recipe whose points are step times of the variants, with the model, optimizer and batch size of the point."""

    def turns(self, settings: FusionSettings) -> int | None:
        return len(settings.variants)

    def measure(self, settings: FusionSettings, at: dict[str, Any], tick: Tick) -> Measured:
        """Milliseconds of each phase and of the whole step, a value a round, for every variant that exists here."""
        device, named = torch.device(settings.hardware.device), self.detail(settings, at)
        model, optimizer = named.get("model", settings.model), named.get("optimizer", settings.optimizer)
        size = at.get("batch_size", settings.batch_size)
        if size is None:
            raise ValueError("this experiment needs batch_size=<number of samples>")
        (batch,) = build_batches(settings.data, size, 1, device)
        loops: dict[str, BareLoop] = {}
        facts: dict[str, Any] = {}
        for name, variant in choose_variants(settings.variants).items():
            plain_name = name.removesuffix("_default")
            if plain_name != name and kernel_flags("best", optimizer, device) == {} and plain_name in loops:
                facts[f"{name} left out"] = f"the same as {plain_name}: this optimizer has no fused kernel here"
                continue
            try:
                loops[name] = BareLoop(variant, build_model(model, device, settings.seed), batch, optimizer)
            except KernelUnavailable as reason:
                facts[f"{name} left out"] = str(reason)
        blocks = {name: partial(loop.block, settings.steps) for name, loop in loops.items()}
        times = interleave(blocks, settings.rounds, settings.warmup_rounds, tick)
        some = next(iter(loops.values())).model
        facts["parameters"] = parameter_count(some)
        facts["parameters per layer"] = round(parameters_per_layer(some))
        for name, loop in loops.items():
            if loop.wired.report is not None:
                facts[f"{name} reports"] = loop.wired.report().one_line
        return Measured(phase_rows(times, (*PHASES, "step")), facts)

    def references(self, point: Point) -> dict[str, str]:
        peer = strongest_peer(point)
        found = {"speed over the default optimizer": "baseline"}
        if peer and peer != "baseline":
            found[f"speed over the strongest peer ({peer})"] = peer
        return {**found, "speed over the bound (no_update)": "no_update"}


def strongest_peer(point: Point) -> str | None:
    """The fastest of the ways torch offers today."""
    peers = [name for name in point.variants("step") if name in VARIANTS and VARIANTS[name].peer]
    return min(peers, key=lambda name: spread(point.values(name, "step")).median, default=None)


def like_the_paper(point: Point, mode: str) -> str:
    """The variant that stands for the paper's `mode`-fusion: the baseline's kernel if it was measured apart."""
    name = f"retime_{mode}_default"
    return name if point.has(name, "step") else f"retime_{mode}"


def measured(point: Point, variant: str, quantity: str) -> Spread | None:
    """Median and quartiles of one quantity; None if it was not measured."""
    return spread(point.values(variant, quantity)) if point.has(variant, quantity) else None


def difference(point: Point, one: tuple[str, str], other: tuple[str, str]) -> Spread | None:
    """Spread of the per-round difference of two quantities, each a variant and a quantity."""
    if not point.has(*one) or not point.has(*other):
        return None
    return spread([a - b for a, b in zip(point.values(*one), point.values(*other), strict=True)])


def label(variant: str) -> str:
    """A variant's name for people."""
    return VARIANTS[variant].label if variant in VARIANTS else variant
