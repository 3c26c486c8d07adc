"""The first batch, run on each rank without a trace: what goes between layers, and who needs which parameters."""

from __future__ import annotations

import math
import random
import re
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from retime.foundations.lazy_updates import nbytes
from retime.foundations.messages import warn_difference
from retime.foundations.parts import leaves_of, loss_of, tensors_of
from retime.foundations.preserve_state import preserve_state, reachable_tensors, seed_all
from retime.foundations.weight_gradients import SMALL, SplitBackward
from retime.mechanisms.pipeline.calls import LayerInterceptors, Returned, SuspendedCall, Workers
from retime.mechanisms.pipeline.checks import PipelineError, all_gather_object, broadcast, dropouts_in, messages_of
from retime.mechanisms.pipeline.layers import FIRST_SEED, LayerList, LayerProfile, profile_layers
from retime.mechanisms.pipeline.losses import LossWeight, LossWeights, look_at_losses
from retime.mechanisms.pipeline.meta_device import DeferredInitModel
from retime.mechanisms.pipeline.ownership import Ownership, Reached
from retime.mechanisms.pipeline.plan import Costs, PipelinePlan, Planner
from retime.mechanisms.pipeline.running import AtEdge, PipelineState, RankInfo, StepModule, TrainingCall

# What the ranks of a pipeline agree upon before a step: that they have the same batch, and the seeds of its parts.

DIFFERENT = (
    "the ranks of a pipeline were given different batches: each needs the same one. Give the sampler num_replicas and "
    "rank of the data parallel ranks, or leave it to the Trainer"
)
_LOOKED_AT = 256
"""Values of each tensor, spread over it."""


def agreed_seeds(place: RankInfo, batch: Any, count: int) -> list[int]:
    """Seeds for ``count`` micro-batches, drawn from the first rank's global generator; all ranks call this.

    Ranks that draw different numbers otherwise, as where only the first one draws samples to log, so go on to see the
    same random numbers in front of the layers and in the loss.

    Raises:
        PipelineError: this rank's batch is not that of the first one.
    """
    mine = torch.tensor([int(torch.randint(2**62, ())), _checksum(batch, _LOOKED_AT)])
    of_first = mine.to(place.device, copy=True)
    if place.ranks > 1:
        broadcast(of_first, 0, place.group)
    seed, checksum = of_first.tolist()
    if checksum != int(mine[1]):
        raise PipelineError(
            f"{DIFFERENT}. The first batches were the same, so look for a shuffle that ranks seed apart"
        )
    return torch.randint(2**62, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def _checksum(batch: Any, most: int | None = None) -> int:
    """Checksum of shapes, and of so many values of each tensor, or all."""
    checksum = 0
    for tensor in tensors_of(batch).values():
        checksum = zlib.crc32(repr((tuple(tensor.shape), tensor.dtype)).encode(), checksum)
        if tensor.numel():
            values = tensor.detach().reshape(-1)
            some = values[:: 1 if most is None else -(-len(values) // most)].contiguous().cpu()
            checksum = zlib.crc32(bytes(some.view(torch.uint8).numpy()), checksum)
    return checksum


_PINGS = 4
_TASK_MS = 0.5
"""Time of the runtime for each task: threads that take turns, hooks, a call of autograd; as seen on processors."""
_ROUNDING = {torch.float64: 1e-10, torch.float32: 1e-5}
_LOW_PRECISION = 1e-2
_NO_GRADIENT = "the loss of training_step has no gradient: nothing of the model is trained"
_GOES_PAST = (
    "a tensor goes past the layers of other ranks that is no argument of the next layer, as a loss that a layer keeps "
    "on itself (of mixtures of experts)"
)
_TAKE_ALL = (
    "Let the layers take and return all that is needed, in an nn.Sequential or ModuleList of the model, or name "
    "another list with layers="
)
_SMALLEST = 0.1
"""Where all values are smaller, they are compared as if one were this large: they may be differences of larger ones."""


class FirstBatch:
    """Looks at the first batch.

    Args:
        hollow: the model, where its layers have their values only while they run.
    """

    def __init__(
        self,
        model: nn.Module,
        layers: LayerList,
        gates: LayerInterceptors,
        place: RankInfo,
        workers: Workers,
        hollow: DeferredInitModel | None = None,
    ) -> None:
        self._model, self._layers, self._gates, self._place, self._workers = model, layers, gates, place, workers
        self._hollow = hollow

    def spread(
        self,
        step: Callable[[Any], Any],
        batch: Any,
        parts: Sequence[Any],
        planner_of: Callable[[int, Costs], Planner],
        loss_weight: LossWeight | None,
    ) -> PipelineState:
        """Run it, and let each rank keep its stages only.

        Args:
            planner_of: makes the planner, from the number of ranks and the layers' costs.
            loss_weight: what a step divides its sum by; None: its operations tell.

        Raises:
            PipelineError: the model or the batch cannot go through a pipeline.
        """
        if len(set(all_gather_object(_checksum(batch), self._place.group))) > 1:
            raise PipelineError(DIFFERENT)
        with self._no_trace(batch):
            weights, look = look_at_losses(
                self._model, step, batch, parts, loss_weight=loss_weight, gates=self._gates, names=self._place.names
            )
            weights = replace(weights, certificate=self._place.agreed(weights.certificate))
        with self._no_trace(batch):
            seed_all(FIRST_SEED)
            untouched = _next_numbers()
            seeded(step, parts[0])
            draws = _next_numbers() != untouched
        if draws and not dropouts_in(self._model):
            warn_difference("training_step draws random numbers: under a pipeline they are others than on one device")
        with self._no_trace(batch):
            profile = profile_layers(
                lambda: seeded(step, parts[0]),
                self._model,
                self._gates,
                self._layers.modules,
                self._place.names,
                lambda: self._no_trace(batch, parameters=False),
            )
        planner = planner_of(self._place.ranks, self._costs(profile))
        plan, whole = planner.plan(len(parts)), StepModule(self._model)
        # its hooks on layers are to stay: not inside of what leaves no trace
        split = SplitBackward(whole)
        try:
            with self._no_trace(batch):
                spread = self._cut(step, parts[0], profile, planner, plan, weights, whole, split)
        except BaseException:
            split.remove()
            raise
        spread.look = look
        spread.owners.free()
        if self._hollow is not None:
            absent = set(spread.owners.absent)
            self._hollow.keep(
                self._layers.modules, {p for name, p in spread.owners.parameters.items() if name not in absent}
            )
            spread.owners.free()
        return spread

    @contextmanager
    def _no_trace(self, batch: Any, *, parameters: bool = True) -> Iterator[None]:
        """Leave the model, the batch and random numbers as they were before what runs inside."""
        tensors = reachable_tensors(self._model, batch, parameters=parameters and self._hollow is None)
        with preserve_state(self._model, tensors=tensors):
            try:
                yield
            finally:
                self._gates.handler = None

    def _costs(self, profile: LayerProfile) -> Costs:
        hop, message = self._hop_ms(max((sum(t.nbytes for t in given) for given in profile.given), default=0))
        by_layer = [set(layer.parameters()) for layer in self._layers.modules]
        around = set(self._model.parameters()).difference(*by_layer)  # what is around them counts with the outermost
        by_layer[0] |= around & profile.front
        by_layer[-1] |= around & profile.behind
        costs: Costs = self._place.agreed(
            Costs(
                tuple(profile.forward_ms),
                tuple(profile.saved_bytes),
                hop,
                _TASK_MS,
                tuple(profile.output_gradient_ms),
                tuple(profile.weight_gradient_ms),
                message,
                tuple(sum(map(nbytes, one)) for one in by_layer),
            )
        )
        return costs

    def _hop_ms(self, nbytes: int) -> tuple[float, float]:
        """Return the time of a message from rank 0 to rank 1, and what it takes of their processors."""
        place = self._place
        if place.ranks < 2 or place.rank > 1:
            return 0.0, 0.0
        message = torch.zeros(max(1, nbytes), dtype=torch.uint8, device=place.device)
        peer, took = dist.get_global_rank(place.group, 1 - place.rank), []
        with messages_of(lambda: f"rank {peer}"):
            for _ in range(_PINGS):
                start, busy = time.perf_counter(), time.process_time()
                for sender in (0, 1):
                    if place.rank == sender:
                        dist.send(message, peer, place.group)
                    else:
                        dist.recv(message, peer, place.group)
                took.append((time.perf_counter() - start, time.process_time() - busy))
        whole, own = (500 * min(values) for values in zip(*took[1:], strict=True))
        own = own if place.device.type == "cpu" else 0.0  # other devices compute on
        return max(0.0, whole - 2 * own), own

    def _cut(
        self,
        step: Callable[[Any], Any],
        part: Any,
        profile: LayerProfile,
        planner: Planner,
        plan: PipelinePlan,
        weights: LossWeights,
        whole: StepModule,
        split: SplitBackward,
    ) -> PipelineState:
        """Run one micro-batch in stages on this rank alone: what a stage is sent, and which parameters it uses."""
        place = self._place
        self._gates.handler = TrainingCall(plan, place, profile.outputs, profile.writes)
        mine = [stage for stage, rank in enumerate(plan.rank_of) if rank == place.rank]
        positions: dict[int, list[int]] = {}
        edges: dict[int, list[Tensor]] = {}
        call = SuspendedCall(lambda: seeded(step, part), self._workers, FIRST_SEED)
        try:
            answer: Any = call.resume()
            for stage in mine:
                given = profile.given[plan.layers_of(stage)[0]]
                while isinstance(answer, AtEdge) and answer.stage != stage:
                    answer = call.resume()
                assert isinstance(answer, AtEdge)
                follows = stage - 1 in mine  # nothing is sent, but each stage has a graph of its own
                if stage:
                    positions[stage] = [
                        number
                        for number, one in enumerate(answer.given)
                        if (not _equal(one, given[number]) or (follows and one.requires_grad))
                        and all(one is not other for other in answer.given[:number])
                    ]
                sent = {number: _leaf(given[number]) for number in positions.get(stage, [])}
                with split.passes.begin(stage):
                    answer = whole(lambda sent=sent: call.resume(sent))
                edges[stage] = [loss_of(answer.value)] if isinstance(answer, Returned) else answer.given
            if isinstance(answer, Returned):
                _warn_of_other_values(answer.value, profile.output)
        finally:
            call.close()
        positions = _merged(all_gather_object(positions, place.group))
        roots = {
            stage: edges[stage]
            if stage + 1 == plan.stages
            else [edges[stage][number] for number in positions[stage + 1]]
            for stage in mine
        }
        flags = {stage + 1: [one.requires_grad for one in roots[stage]] for stage in mine if stage + 1 < plan.stages}
        needs_gradient = _merged(all_gather_object(flags, place.group))
        graphs = {stage: Reached(roots[stage]) for stage in mine}
        self._check_graphs(graphs, roots, profile, plan)
        self._check_values(edges, profile, plan)
        split.watch([root for stage in mine for root in roots[stage]])
        for stage in mine:
            split.passes.drop(stage)
        # a small gradient is computed with the output gradient in any case; nobody waits for its place in a sum
        split.passes.chosen = {layer for layer in split.layers if layer.why_buffered != SMALL}
        here = [self._layers.modules[layer] for stage in mine for layer in plan.layers_of(stage)]
        needed = {leaf for graph in graphs.values() for leaf in graph.leaves}
        owners = Ownership(self._model, needed, place.group, here)
        self._check_hidden(graphs, owners)
        spread = PipelineState(
            place,
            planner,
            plan,
            whole,
            split,
            owners,
            weights,
            profile.outputs,
            positions,
            needs_gradient,
            profile.writes,
            is_finite=bool(loss_of(profile.output).detach().isfinite()),
        )
        self._divide(spread, {stage: graph.leaves for stage, graph in graphs.items()})
        return spread

    def _check_graphs(
        self, graphs: dict[int, Reached], roots: dict[int, list[Tensor]], profile: LayerProfile, plan: PipelinePlan
    ) -> None:
        """Raise on all ranks what one of them finds."""
        why, skip = _why_not(graphs, roots, plan), self._skip(profile, plan)
        if why is not None and why != _NO_GRADIENT and skip is not None:
            why = f"{skip}. {_TAKE_ALL}"
        if why == _NO_GRADIENT and loss_of(profile.output).requires_grad:
            why = (
                f"the loss does not depend on what {self._place.names[-1]!r} gives, the last of the layers, as of a "
                "second head that is not trained: leave it out of the list, or call it in front of the others"
            )
        for one in all_gather_object(why, self._place.group):
            if one is not None:
                raise PipelineError(one)

    def _check_hidden(self, graphs: dict[int, Reached], owners: Ownership) -> None:
        """Raise on all ranks where a reentrant checkpoint may hide parameters around the layers from the graph."""
        hidden = [name for name in owners.unreached if owners.parameters[name].requires_grad]
        reentrant = any(node.name() == "CheckpointFunctionBackward" for one in graphs.values() for node in one.nodes)
        if hidden and any(all_gather_object(reentrant, self._place.group)):
            raise PipelineError(
                f"which ranks need {hidden[0]!r} is not known: torch.utils.checkpoint.checkpoint(..., "
                "use_reentrant=True), torch's default, hides what it uses. Give it use_reentrant=False, call it in a "
                "layer of the list, or freeze what is not used"
            )

    def _check_values(self, edges: dict[int, list[Tensor]], profile: LayerProfile, plan: PipelinePlan) -> None:
        """Raise on all ranks where a stage gives something else than the whole model did."""
        wrong = None
        for stage, tensors in edges.items():
            last = stage + 1 == plan.stages
            whole = [loss_of(profile.output)] if last else profile.given[plan.layers_of(stage + 1)[0]]
            if not all(_near(one, other) for one, other in zip(tensors, whole, strict=True)):
                wrong = wrong or (
                    f"what stands between the layers and around them gives other numbers when stage {stage + 1} runs "
                    f"by itself: {self._skip(profile, plan) or _GOES_PAST}. {_TAKE_ALL}"
                )
        for message in all_gather_object(wrong, self._place.group):
            if message is not None:
                raise PipelineError(message)

    def _skip(self, profile: LayerProfile, plan: PipelinePlan) -> str | None:
        """Skip connection whose tensor a stage does not have, if the whole step's graph shows one."""
        names, stage_of = [*map(repr, self._place.names), "what lies behind the layers"], [*plan.stage_of, plan.stages]
        for one, other in profile.skips:
            if stage_of[one] < stage_of[other]:
                return (
                    f"what {names[one]} gives goes past the next layer to {names[other]}, whose stage does not "
                    "have it (a skip connection, or a loss that a layer keeps on itself)"
                )
        return None

    def _divide(self, spread: PipelineState, reached: dict[int, set[Tensor]]) -> None:
        """Divide the parameters into those that belong to one stage, and those of several."""
        owners, mine = spread.owners, spread.mine
        inside = {p for module in self._layers.modules for p in module.parameters()}
        spread.outside = [name for name, p in owners.parameters.items() if p not in inside]
        shared = {owners.parameters[name] for name in owners.shared}
        twice = {p for a in mine for b in mine if a < b for p in reached[a] & reached[b]}
        ordered = list(owners.parameters.values())
        for stage in mine:
            chosen = reached[stage] - shared - twice
            spread.stage_parameters[stage] = [p for p in ordered if p in chosen]
        late = (shared | twice) & {p for one in reached.values() for p in one}
        spread.late = [p for p in ordered if p in late]


def seeded(step: Callable[[Any], Any], part: Any) -> Any:
    """Run a step on random numbers that are the same on all ranks."""
    seed_all(FIRST_SEED)
    return step(part)


def _next_numbers() -> tuple[float, ...]:
    """Draw from torch's, Python's and NumPy's generators, which tells whether something has drawn before."""
    return float(torch.rand(())), random.random(), float(np.random.random())


def _warn_of_other_values(staged: Any, whole: Any) -> None:
    """Say which values beside the loss are others on the rank of the last stage, which has no other layers' outputs."""
    values = dict(leaves_of(whole, "it"))
    changed = [place for place, one in leaves_of(staged, "it") if not _same(one, values.get(place))]
    names = sorted({name for place in changed for name in re.findall(r"'([^']*)'", place)[-1:]})
    if names:
        warn_difference(
            f"training_step logs or returns {', '.join(map(repr, names))}, which it computes from what layers of other "
            "ranks return: under a pipeline these are NaN or 0 there, and so it is another number. Let the layers hand "
            "on what is logged",
            every_rank=True,
        )


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return _near(one, other)
    return not (isinstance(one, float) and math.isnan(one)) or one is other


def _why_not(graphs: dict[int, Reached], roots: dict[int, list[Tensor]], plan: PipelinePlan) -> str | None:
    """Fault in the graphs of this rank's stages."""
    stages = sorted(graphs)
    for number, later in enumerate(stages):
        for earlier in stages[:number]:
            if graphs[later].nodes & graphs[earlier].nodes:
                return (
                    f"stages {earlier + 1} and {later + 1} lie on one rank and both use a tensor that was computed "
                    "with gradients in front of the layers (a skip connection): use a schedule with one stage a rank, "
                    "such as schedule='ooo1' or '1f1b'"
                )
    last = roots.get(plan.stages - 1)
    if last is not None and not any(root.requires_grad for root in last):
        return _NO_GRADIENT
    return None


def _merged(everyone: Sequence[dict[int, Any]]) -> dict[int, Any]:
    return {stage: one for of_rank in everyone for stage, one in of_rank.items()}


def _equal(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and one.dtype == other.dtype and torch.equal(one, other)


def _near(one: Tensor, other: Tensor) -> bool:
    if not one.dtype.is_floating_point:
        return _equal(one, other)
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    rounding = _ROUNDING.get(one.dtype, _LOW_PRECISION)
    largest = float(other.detach().abs().nan_to_num(0, 0, 0).max()) if other.numel() else 0.0
    return torch.allclose(
        one.detach(), other.detach(), rtol=rounding, atol=rounding * max(largest, _SMALLEST), equal_nan=True
    )


def _leaf(tensor: Tensor) -> Tensor:
    leaf = tensor.detach().clone()
    return leaf.requires_grad_(leaf.dtype.is_floating_point or leaf.dtype.is_complex)
