"""The ways of data-parallel training that the out-of-order recipes compare, by name.

ddp                 Lightning's DDPStrategy with static_graph and gradient_as_bucket_view: what one gets today
ddp_layer_buckets   the same with buckets of about one layer: the strongest plain setting where buckets are the limit
ddp_tuned_buckets   the same with buckets of the size that ours takes, by the same measurement of the links
priority            as BytePS: first layers' gradients leave first, in partitions, and no weight gradient is deferred
ooo_k3              out of order, weight gradients of the first 3 layers deferred
ooo_auto            out of order, k found by its own search in the first steps of this run
ooo_tuned           out of order with the k that ooo_auto found before in the same process
..._waiting         out of order, but step() waits for all communication (cross_iteration=False)
..._layer_buckets   with buckets of about one layer
"""

import re
from dataclasses import dataclass
from typing import Any, Literal

from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy, Strategy

from retime.foundations.ddp import bucket_mb, measured_seconds_per_mb
from retime.recipes.ooo.priorities import PriorityDataParallel
from retime.strategies import OOODataParallelStrategy

_NAME = re.compile(
    r"(?P<priority>priority)|ddp(?P<tuned>_tuned_buckets)"
    r"|(?:ddp|ooo_(?P<k>auto|tuned|k\d+)(?P<waiting>_waiting)?)(?P<small>_layer_buckets)?"
)
COMPUTE, COMMUNICATION = "compute", "communication"
"""The bounds, measured beside the variants: a rank alone, and nothing but the all-reduce of all gradients."""


@dataclass(frozen=True)
class Variant:
    """One way of training. `k` is None for peers; "tuned" stands for what a search found before."""

    name: str
    k: int | str | None
    cross_iteration: bool
    layer_buckets: bool
    tuned_buckets: bool = False
    priority: bool = False

    @property
    def ours(self) -> bool:
        return self.k is not None

    def strategy(self, layer_bucket_mb: float, tuned_k: int | None = None) -> Strategy:
        """A new strategy; `tuned_k` is what "tuned" stands for. With tuned buckets all ranks call this."""
        if self.priority:
            return PriorityDataParallel(layer_bucket_mb)
        options: dict[str, Any] = {"static_graph": True, "gradient_as_bucket_view": True}
        if self.layer_buckets:
            options["bucket_cap_mb"] = layer_bucket_mb
        if self.tuned_buckets:
            options["bucket_cap_mb"] = bucket_mb(measured_seconds_per_mb())
        if self.k is None:
            return DDPStrategy(**options)
        k: int | Literal["auto"] | None
        k = tuned_k if self.k == "tuned" else "auto" if isinstance(self.k, str) else self.k
        if k is None:
            raise ValueError(f"{self.name} needs the k of a search: run one first")
        strategy: Strategy = OOODataParallelStrategy(k=k, cross_iteration=self.cross_iteration, **options)
        return strategy


def alone() -> Strategy:
    """A rank that trains by itself: the bound that computation sets."""
    return SingleDeviceStrategy(device="cpu")


def variant(name: str) -> Variant:
    """The variant of a name.

    Raises:
        ValueError: no such variant.
    """
    found = _NAME.fullmatch(name)
    if not found:
        raise ValueError(
            f"variant {name!r} is unknown: write ddp, ooo_auto, ooo_tuned or ooo_k<number>, then _waiting (ooo only) "
            "for cross_iteration=False and _layer_buckets for small buckets; or ddp_tuned_buckets, or priority"
        )
    k: int | str | None = found["k"]
    if isinstance(k, str) and k.startswith("k"):
        k = int(k[1:])
    priority = bool(found["priority"])
    return Variant(name, k, not found["waiting"], bool(found["small"]) or priority, bool(found["tuned"]), priority)


def label(name: str) -> str:
    """A variant's name for people."""
    if name in (COMPUTE, COMMUNICATION):
        return f"{name} alone"
    one = variant(name)
    if one.priority:
        return "sent by priority"
    words = "DDP" if one.k is None else f"reverse-first-k, k {'' if isinstance(one.k, str) else '= '}{one.k}"
    words += "" if one.cross_iteration else ", step waits"
    return words + (", small buckets" if one.layer_buckets else ", tuned buckets" if one.tuned_buckets else "")
