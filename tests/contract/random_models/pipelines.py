"""The pipeline on two ranks, beside one device that has the same batches."""

import re
import warnings
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from lightning.pytorch import Trainer

from contract.in_stages import completed
from contract.random_models.fits import Fit
from contract.random_models.losses import COUNTS
from contract.random_models.mechanisms import Mechanism, double
from contract.random_models.spec import Node, Spec
from contract.random_models.training import Order, Way, as_given
from contract.ranks import WORLD_SIZE
from retime.foundations.messages import DifferenceWarning
from retime.mechanisms.pipeline import RankLostError
from retime.strategies import OOOPipelineStrategy
from support.time_limits import limit_s

SCHEDULES = ("ooo2", "ooo1", "gpipe", "1f1b", "zb_h1", "ooo2_flush", "ooo1_flush", "ooo")
OF_MANY_LAYERS = ("ooo2", "zbv", "ooo_v", "interleaved", "interleaved_zero_bubble", "ooo")
MANY = 4
"""Layers, of which each rank can have two stages."""
_LOSSES = ("mean", "clamped", "sum", "tokens", "epsilon", "classes", "smoothed", "maxed", "penalty")
_LOSSES += ("rows", "normalised")
_MAY_DIFFER = {"power", "read_power", "root", "share"}
"""Logged numbers that are neither means nor sums over samples."""
_NAMED = re.compile(r"the logged value '(\w+)' is")
_BETWEEN = {"reload_optimizer", "lower_rate", "reset_state", "evaluate", "copy", "change_class_weights"}
"""What does not write parameters of other ranks, and freezes none."""
_BY_BATCH = {"batchnorm", "counter", "running_mean", "spectral_norm", "by_value"}
"""What sees micro-batches, as the card and warnings say: buffers that passes change, branches by a batch's values."""


def _strategy(spec: Spec) -> OOOPipelineStrategy:
    names = OF_MANY_LAYERS if len(spec.nodes) >= MANY and spec.seed % 2 else SCHEDULES
    return OOOPipelineStrategy(
        schedule=names[spec.seed // 2 % len(names)],
        microbatches=2 + spec.seed % 3,
        layers="net.layers" if spec.seed % 8 else None,
        loss_weight=COUNTS[spec.training.loss] if spec.training.told else None,
        timeout=timedelta(seconds=limit_s(20)),
    )


def _ran(trainer: Trainer) -> bool:
    report = trainer.strategy.report()
    return bool(report.steps > 0 and report.micro_batches > 1)


def train_in_stages(spec: Spec, way: Way, order: Order = as_given) -> dict[str, Any]:
    """For `Mechanism.train`; a `Way` that is no `Fit` stands for one device.

    Returns:
        What both ranks left, put together: each has its layers' gradients and state of the optimizer.
    """
    if not isinstance(way, Fit):
        return Fit().fit(spec, order)
    way.ranks = WORLD_SIZE
    way.by_value = frozenset({"read_power"})
    left, error = None, None
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            left = way.fit(spec, order)
        except Exception as found:
            error = found
    said = [_NAMED.match(str(one.message)) for one in caught if one.category is DifferenceWarning]
    warned = {one[1] for one in said if one is not None}
    everyone: list[Any] = [(left, repr(error), warned)]
    if dist.is_initialized():
        everyone = [None] * WORLD_SIZE
        dist.all_gather_object(everyone, (left, repr(error), warned))
    if any(one[0] is None for one in everyone):
        if error is None or isinstance(error, RankLostError):
            raise AssertionError(f"one rank alone was refused: {[one[1] for one in everyone]}")
        raise error
    assert left is not None
    for other, _, names in everyone:
        left = completed(left, other)
        way.told |= names
    assert way.told <= _MAY_DIFFER, f"warned of means or sums: {sorted(way.told - _MAY_DIFFER)}"
    return left


def in_a_row(spec: Spec) -> Spec:
    """Layers one after another, a loss that is known or told, and more that is logged; one spec in eight as drawn."""
    spec = double(spec)
    training = replace(spec.training, between=tuple(one for one in spec.training.between if one[1] in _BETWEEN))
    nodes = list(map(_by_sample, spec.nodes))
    while len(nodes) < 2 + spec.seed % 4:
        nodes.append(Node("linear"))
    if spec.seed % 8:
        nodes = [replace(node, of=(1,) * len(node.of), like=0, unused=False) for node in nodes]
        training = replace(training, loss=_LOSSES[spec.seed % len(_LOSSES)])
    weighed = training.loss in COUNTS and spec.seed % 5 > 0
    return replace(spec, nodes=tuple(nodes), training=replace(training, told=weighed, logs=spec.seed % 3 > 0))


def _by_sample(node: Node) -> Node:
    if node.kind in _BY_BATCH:
        return Node("linear", node.of)
    alone = {"norm": "", "by_freq": False}
    options = {
        name: alone[name] if value in ("batch", True) and name in alone else value
        for name, value in node.options.items()
    }
    return replace(node, options=options, inner=tuple(map(_by_sample, node.inner)))


PIPELINE = Mechanism(
    "ooo_pipeline", lambda: Fit(_strategy, _ran), in_a_row, exact=False, every=4, here=False, train=train_in_stages
)
