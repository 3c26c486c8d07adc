"""The strategies for several ranks: one pair of processes checks many seeds, each beside plain `ddp`."""

import os
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import DDPStrategy

from contract.random_models.check import Verdict
from contract.random_models.fits import Fit, counted
from contract.random_models.losses import loss_of
from contract.random_models.mechanisms import UPDATED_TWICE, Mechanism, in_backward
from contract.random_models.model import batches, build
from contract.random_models.pipelines import PIPELINE
from contract.random_models.run import Outcome
from contract.random_models.spec import Spec
from contract.random_models.training import Order, Way, as_given
from contract.ranks import WORLD_SIZE, RankRuns, let_work
from contract.rows import STRATEGIES
from retime.strategies import CPUAccumulateStrategy, FusedOptimizerDDPStrategy, MemoryBudgetDDPStrategy

SEED_S = 150
"""The longest a seed may take, on a busy machine and made small if it fails."""
_OF_SOME_STEPS = {"every_other_step", "by_value"}
_CHANGES = {"freeze", "thaw"}


def _ddp(spec: Spec) -> dict[str, Any]:
    """What DDP has to be told: which parameters get no gradient, in all steps or in some."""
    if not _OF_SOME_STEPS.isdisjoint(spec.kinds()) or _CHANGES & {name for _, name in spec.training.between}:
        return {"find_unused_parameters": True}
    model = build(spec)
    try:
        loss_of(model, spec.training.loss, batches(spec)[0]).backward()
    except RuntimeError:  # plain training will say it
        return {}
    used = all(p.grad is not None for p in model.parameters() if p.requires_grad)
    steady = spec.training.accumulate == 1  # torch fails on static graphs with no_sync
    return {} if used else {"static_graph": True} if steady else {"find_unused_parameters": True}


def train_on_ranks(spec: Spec, way: Way, order: Order = as_given) -> dict[str, Any]:
    """For `Mechanism.train`; a `Way` that is no `Fit` stands for Lightning's own `ddp`."""
    fit = way if isinstance(way, Fit) else Fit(lambda spec: DDPStrategy(**_ddp(spec)))
    fit.rank, fit.ranks = int(os.environ["RANK"]), WORLD_SIZE
    return fit.fit(spec, order)


def used(spec: Spec) -> Spec:
    """Most models use the same parameters in each step, since DDP else keeps its plainest way."""
    if spec.seed % 4 == 0:
        return spec
    between = tuple(one for one in spec.training.between if one[1] not in _CHANGES)
    nodes = tuple(
        replace(node, kind="residual", options={}) if node.kind in _OF_SOME_STEPS else node for node in spec.nodes
    )
    return replace(spec, nodes=nodes, training=replace(spec.training, between=between))


def _longer(spec: Spec) -> Spec:
    """The order changes only once DDP's buckets are what they stay, in the third step or so."""
    spec = used(spec)
    return replace(spec, training=replace(spec.training, steps=spec.training.steps + 2))


def _used_in_backward(spec: Spec) -> Spec:
    spec = used(spec)
    training = replace(spec.training, to_none=spec.training.to_none or bool(spec.seed % 4))
    return in_backward(replace(spec, training=training))


def _state_left_alone(spec: Spec) -> Spec:
    """Who divides the state refuses to show it between two steps."""
    if spec.seed % 8 == 0:
        return spec
    between = tuple(one for one in spec.training.between if one[1] != "reload_optimizer")
    return replace(spec, training=replace(spec.training, between=between))


def _updated_on_host(trainer: Trainer) -> bool:
    update = trainer.strategy.report().update
    return update is not None and update.steps > 0


def _all_blocks(spec: Spec) -> Any:
    """Every weight gradient waits, those of small layers too."""
    row = next(row for row in STRATEGIES if row.name == "ooo_ddp_all_blocks")
    return row.strategy(_ddp(spec))


def _on_ranks(name: str, way: Any, fit: Any, **options: Any) -> Mechanism:
    return Mechanism(name, way, fit, here=False, train=train_on_ranks, **options)


ON_RANKS = [
    _on_ranks(
        "fused_optimizer_ddp",
        lambda: Fit(lambda spec: FusedOptimizerDDPStrategy(**_ddp(spec)), counted("fused_updates")),
        _used_in_backward,
        late=True,
        raises=UPDATED_TWICE,
        share=40,
        every=2,
    ),
    _on_ranks("ooo_ddp", lambda: Fit(_all_blocks, counted("deferred_gradients")), _longer, share=30, every=2),
    _on_ranks(
        "cpu_accumulate_ddp_update_on_host",
        lambda: Fit(lambda spec: CPUAccumulateStrategy(update_on_host=True, **_ddp(spec)), _updated_on_host),
        _state_left_alone,
        late=True,
        every=2,
    ),
    _on_ranks(
        "memory_budget_ddp",
        lambda: Fit(lambda spec: MemoryBudgetDDPStrategy(**_ddp(spec)), counted("steps")),
        used,
        every=5,
    ),
    PIPELINE,
]


class Pair(RankRuns):
    """Two processes of `contract.random_models.worker`, started again where they hang or die."""

    worker = "contract.random_models.worker"

    def __init__(self, mechanism: Mechanism, seeds: Iterable[int], folder: Path) -> None:
        super().__init__(mechanism.name, [str(seed) for seed in seeds], folder, SEED_S)

    def run(self) -> Outcome:
        """As `run.run`, on two ranks; a seed in which a rank hangs or dies is a failure too."""
        results: dict[str, list[Any]] = {}
        self._run_all(results)
        outcome, lost = Outcome(), ["not run: too many pairs of processes had failed before"]
        for name in self._scenarios:
            outcome.add(int(name), _together(results.get(name, lost)))
        return outcome


def run_pairs(pairs: list[Pair]) -> list[Outcome]:
    """The outcome of each; two pairs are at work at once."""
    try:
        for pair in pairs:
            pair.meanwhile = lambda: let_work(pairs)
        return [pair.run() for pair in pairs]
    finally:
        for pair in pairs:
            pair.stop()


def _together(results: list[Any]) -> Verdict:
    """Both ranks' verdict: what they say alike; what differs, or is no verdict, is a failure."""
    if all(isinstance(one, Verdict) for one in results):
        kinds = {one.kind for one in results}
        if len(kinds) == 1:
            return Verdict(kinds.pop(), any(one.on for one in results), results[0].text)
    return Verdict("failed", text="\n".join(f"rank {rank}: {one}" for rank, one in enumerate(results)))


def agreed(verdict: Verdict) -> Verdict:
    """The same on all ranks, in a worker: a failure of one is the failure of all."""
    if not torch.distributed.is_initialized():
        return verdict
    outcomes: list[Any] = [None] * WORLD_SIZE
    torch.distributed.all_gather_object(outcomes, verdict)
    return next((one for one in outcomes if one.kind == "failed"), verdict)
