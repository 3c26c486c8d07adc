"""Does the simulator say what real ranks do?  It is fitted to measured steps, and to all but one to predict one."""

import itertools
import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from retime.recipes.core.results import Point, load
from retime.recipes.ooo.variants import COMPUTE, variant
from retime.schedules import Cluster, Communication, LayerCost, Link, simulate_data_parallel, size_buckets

_RANGES = {"share": (0.05, 1.5), "latency_ms": (0.0, 50.0), "interference": (0.0, 0.9)}
_FIRST_BUCKET_BYTES = 2**20  # DistributedDataParallel's first bucket


@dataclass(frozen=True)
class MeasuredRun:
    """One variant's step on a number of hosts, and what the simulator is told about it."""

    name: str  # for reports
    costs: tuple[LayerCost, ...]  # of the layers that have parameters; others count into the one before
    hosts: int  # how many ranks, one a host
    bits_per_s: float  # of each link
    bucket_bytes: int  # of DistributedDataParallel
    k: int  # deferred layers
    cross_iteration: bool  # whether the next forward pass waits for each layer's own bucket only
    contended: bool  # whether the processors that compute also move the data; not so where layers sleep
    step_ms: float  # as measured


@dataclass(frozen=True)
class Parameters:
    """Parameters that the measured steps decide."""

    share: float = 0.9  # of a link's rate that an all-reduce gets
    latency_ms: float = 0.2  # of one of its messages
    interference: float = 0.2  # of the computation's speed, lost while the link is busy, where processors do both


def read_runs(path: Path) -> list[MeasuredRun]:
    """The runs of a Figure 10 measured on ranks: every variant but the bounds, on every number of hosts above one.

    Raises:
        FileNotFoundError: it has not been measured.
    """
    if not path.exists():
        raise FileNotFoundError(
            f"{path} does not exist: measure it with `python -m retime.recipes experiment=ooo_fig10 "
            "hardware=emulated record=true`, or name another result with calibration=<path>"
        )
    runs = []
    for point in load(path).points:
        cluster = point.facts.get("cluster", {})
        if cluster.get("hosts", 1) < 2:
            continue
        costs = _costs(point)
        for name in point.variants("step"):
            try:
                one = variant(name)
            except ValueError:
                continue  # a bound
            k = cluster.get("k") if isinstance(one.k, str) else one.k
            if one.priority or one.tuned_buckets or (one.k is not None and k is None):
                continue
            layer_bytes = int(point.settings.get("layer_bucket_mb", 25) * 2**20)
            run = MeasuredRun(
                name=" ".join([*(f"{key}={value}" for key, value in point.at.items()), name]),
                costs=costs,
                hosts=cluster["hosts"],
                bits_per_s=cluster["rate_bits"] or cluster["tcp_bits"],
                bucket_bytes=layer_bytes if one.layer_buckets else cluster["bucket_bytes"],
                k=min(int(k or 0), len(costs)),
                cross_iteration=one.k is not None and one.cross_iteration,
                contended=point.at.get("compute") != "emulated",
                step_ms=point.median(name, "step"),
            )
            runs.append(run)
    return runs


def calibrate(runs: Sequence[MeasuredRun]) -> tuple[Parameters, dict[str, float]]:
    """Fit the parameters to all runs; by name, how far off the step of each run is where all others are fitted.

    Raises:
        ValueError: fewer runs than it takes to leave one out.
    """
    if len(runs) < 4:
        raise ValueError(f"{len(runs)} measured runs: three parameters and a run to leave out take 4 or more")
    fitted = fit(runs)
    errors = {}
    for run in runs:
        without = fit([one for one in runs if one is not run], fitted)
        errors[run.name] = simulated_ms(run, without) / run.step_ms - 1
    return fitted, errors


def fit(runs: Sequence[MeasuredRun], start: Parameters | None = None) -> Parameters:
    """The parameters with the least mean squared relative error, by a pattern search; near `start` if one is given."""
    best = start or Parameters()
    least = _loss(runs, best)
    near = 1.0 if start is None else 0.25  # one run less moves the parameters little
    step = Parameters(share=0.2 * near, latency_ms=0.4 * near, interference=0.2 * near)
    for _ in range(6 if start is None else 4):
        improved = True
        while improved:
            improved = False
            for name, sign in itertools.product(asdict(step), (1, -1)):
                low, high = _RANGES[name]
                moved = getattr(best, name) + sign * getattr(step, name)
                candidate = replace(best, **{name: min(max(moved, low), high)})
                loss = _loss(runs, candidate) if candidate != best else math.inf
                if loss < least - 1e-12:
                    best, least, improved = candidate, loss, True
        step = Parameters(*(value / 2 for value in asdict(step).values()))
    return best


def simulated_ms(run: MeasuredRun, parameters: Parameters) -> float:
    """The step that the simulator predicts for a run."""
    link = Link(run.bits_per_s * parameters.share, parameters.latency_ms)
    k = run.k if run.k > 1 else 0
    communication = Communication(
        size_buckets(run.costs, run.bucket_bytes, first_bytes=min(_FIRST_BUCKET_BYTES, run.bucket_bytes), k=k),
        Cluster(run.hosts, 1, link).all_reduce,
        cross_iteration=run.cross_iteration,
        interference=parameters.interference if run.contended else 0.0,
    )
    return simulate_data_parallel(run.costs, communication, k=k).step_ms


def _loss(runs: Sequence[MeasuredRun], parameters: Parameters) -> float:
    return statistics.fmean(math.log(simulated_ms(run, parameters) / run.step_ms) ** 2 for run in runs)


def _costs(point: Point) -> tuple[LayerCost, ...]:
    """The layers with parameters, scaled so that a step takes as long as it did on one rank.

    A layer without parameters counts into the one before it (into the first one if there is none). The optimizer's
    update runs in the next forward pass or before it; each layer takes its share by bytes.
    """
    layers = [layer for layer in point.facts["layers"] if layer["bytes"]]
    whole_bytes = sum(layer["bytes"] for layer in layers)
    update_ms = point.facts["cluster"].get("update_ms", 0.0)
    times = [[update_ms * layer["bytes"] / whole_bytes, 0.0, 0.0] for layer in layers]
    place = -1
    for layer in point.facts["layers"]:
        place += 1 if layer["bytes"] else 0
        own = times[max(place, 0)]
        own[0] += layer["forward_ms"]
        own[1] += layer["output_ms"]
        own[2] += layer["weight_ms"]
    whole_ms = sum(map(sum, times)) - times[0][1]
    scale = point.median(COMPUTE, "step") / whole_ms if point.has(COMPUTE, "step") else 1.0
    return tuple(
        LayerCost(forward * scale, output * scale, weight * scale, int(layer["bytes"]))
        for (forward, output, weight), layer in zip(times, layers, strict=True)
    )
