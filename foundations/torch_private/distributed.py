"""The runtime of ``torch.distributed.pipelining``, private in torch, and the orders of its own schedules.

All of them were seen to do this in torch 2.13. The module takes a second to import and is loaded at first use.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from operator import attrgetter
from typing import Any, Literal

import torch
from torch.nn.parallel import DistributedDataParallel

from retime.foundations.torch_private import needed_by, read_private

# Private names of ``DistributedDataParallel``: attributes that only a wrapped model has, so they are asked for in use.
#
# All of them were seen to do this in torch 2.11, 2.13 and 2.14 (2.11 is the oldest that is supported).

with needed_by("fusion, out-of-order data parallel and memory budgets under DDP, which reduce its buckets,"):
    from torch._C._distributed_c10d import GradBucket
"""What a communication hook of DDP gets: gradients of one bucket, flat, and its number. Its public name has no type."""

with needed_by("memory budgets under DDP, which refuse collectives that a training step calls itself,"):
    torch.ops._c10d_functional.all_reduce  # noqa: B018
COLLECTIVE_NAMESPACES = ("c10d", "_c10d_functional", "c10d_functional")
"""Namespaces of collective operations, as a dispatch mode meets them."""


def has_rebuilt_buckets(model: DistributedDataParallel) -> bool:
    """Return whether DDP has put its buckets in the order in which gradients arrived, which it does after one step.

    Raises:
        PrivateNameError: this torch's DDP has no such attribute.
    """
    feature = "out-of-order data parallel and memory budgets under DDP, to know when gradient buckets are final,"
    return bool(read_private(model, "_has_rebuilt_buckets", feature))


def joins_uneven_inputs(model: DistributedDataParallel) -> bool:
    """Return whether the model is inside of its ``join()`` context: ranks may run out of batches before others.

    Raises:
        PrivateNameError: this torch's DDP has no such attribute.
    """
    return bool(join_reader(model)(model))


def join_reader(model: DistributedDataParallel) -> Callable[[DistributedDataParallel], bool]:
    """A function that says the same of this model, in C: for those who ask for each bucket.

    Raises:
        PrivateNameError: this torch's DDP has no such attribute.
    """
    feature = "out-of-order data parallel, to keep DDP's own order where ranks join early,"
    read_private(read_private(model, "_join_config", feature), "enable", feature)
    return attrgetter("_join_config.enable")


def divides_by_ranks_left(model: DistributedDataParallel) -> bool:
    """Return whether gradients are divided by the count of ranks with batches: in ``join()``, if the user asked for it.

    A wrapper that is not the first in a ``Join`` of several objects does not count ranks, and divides by all.

    Raises:
        PrivateNameError: this torch's DDP has no such attribute.
    """
    if not joins_uneven_inputs(model):
        return False
    feature = "communication hooks, to divide gradients by the ranks that have batches,"
    first = read_private(read_private(model, "_join_config", feature), "is_first_joinable", feature)
    return bool(first) and not read_private(model, "_divide_by_initial_world_size", feature)


def timeout_of(group: Any, device: torch.device) -> timedelta:
    """Time that a group's operations on tensors of a device wait for other ranks.

    Raises:
        PrivateNameError: this torch's groups have no such attribute.
    """
    feature = "ooo_pipeline, whose ranks wait as long for the gradients of weights that some of them share,"
    options = read_private(read_private(group, "_get_backend", feature)(device), "options", feature)
    return timedelta(seconds=read_private(options, "_timeout", feature).total_seconds())


PipelineAction = tuple[Literal["F", "O", "W", "B"], int, int]
"""What a rank does: forward, output gradient, weight gradient, or both gradients, of a stage and a micro-batch, both
counted from 0."""

_FEATURE = "ooo_pipeline, which runs its schedules on torch.distributed.pipelining,"


def pipeline_runtime(
    stages: Sequence[Any],
    micro_batches: int,
    orders: Mapping[int, Sequence[PipelineAction]],
    with_messages: Any = None,
    *,
    ask_ahead: int = 0,
) -> Any:
    """A runtime for this rank's stages, whose ``run()`` does what ``orders`` say, with all messages between ranks.

    Where these belong is found once: the runtime's ``with_messages`` can be given to those of later steps.

    Args:
        stages: of this rank; what the runtime calls of a ``PipelineStage`` they have to have.
        micro_batches: how many.
        orders: by rank of the pipeline, what it computes.
        with_messages: of an earlier runtime of the same orders.
        ask_ahead: by how many tasks a message is asked for before torch would ask, which is when it is sent. Messages
            of a rank that wait for nobody (gloo's, which travel once both sides have asked) are there sooner then.

    Raises:
        PrivateNameError: this torch has no such runtime.
    """
    runtime_of, action_of, kinds = _torchs_runtime()
    runtime: Any = runtime_of(list(stages), micro_batches, loss_fn=None, scale_grads=False)
    if with_messages is None:
        actions = {
            rank: [action_of(stage, kinds[kind], batch) for kind, stage, batch in order]
            for rank, order in orders.items()
        }
        runtime._prepare_schedule_with_comms(actions)
        runtime.pipeline_order_with_comms = {
            rank: _asked_ahead(order, ask_ahead) for rank, order in runtime.pipeline_order_with_comms.items()
        }
    else:
        runtime.pipeline_order_with_comms = with_messages
        rank_of = {stage: rank for rank, order in orders.items() for _, stage, _ in order}
        for one in stages:  # a new runtime has dealt them out in turn
            one.stage_index_to_group_rank = rank_of
    return runtime


@functools.cache
def _torchs_runtime() -> tuple[Any, Any, dict[str, Any]]:
    """The runtime's class, that of an action, and what an action can be by our letters."""
    with needed_by(_FEATURE):
        from torch.distributed.pipelining.schedules import _Action, _ComputationType, _PipelineScheduleRuntime

        own = attrgetter("_prepare_schedule_with_comms", "_step_microbatches", "_initialize_stages")
        own(_PipelineScheduleRuntime)

    class Runtime(_PipelineScheduleRuntime):
        """Stages know what they send and receive: nothing is tried out."""

        def _initialize_stages(self, *args: Any, **kwargs: Any) -> None:
            """Nothing to do."""

        def run(self) -> None:
            """One step."""
            self._step_microbatches()

        @property
        def with_messages(self) -> Any:
            """Actions of each rank, messages included."""
            return self.pipeline_order_with_comms

    kinds = {"F": "FORWARD", "O": "BACKWARD_INPUT", "W": "BACKWARD_WEIGHT", "B": "FULL_BACKWARD"}
    return Runtime, _Action, {letter: getattr(_ComputationType, name) for letter, name in kinds.items()}


def _asked_ahead(order: Sequence[Any], ahead: int) -> list[Any]:
    """The order with receives up to ``ahead`` computations earlier; they stay behind each other."""
    actions: list[Any] = []
    for action in order:
        place = len(actions)
        if _is_receive(action):
            passed = 0
            while place and not _is_receive(actions[place - 1]) and passed + actions[place - 1].is_compute_op <= ahead:
                place -= 1
                passed += actions[place].is_compute_op
        actions.insert(place, action)
    return actions


def _is_receive(action: Any) -> bool:
    return str(action.computation_type.name).startswith("RECV")


def torch_pipeline_orders(
    name: str, ranks: int, micro_batches: int, chunks: int
) -> tuple[dict[int, list[PipelineAction]], tuple[int, ...]]:
    """Orders of a schedule of torch's own, by rank, and the rank of each stage.

    Args:
        name: as torch has it, such as ``"Interleaved1F1B"``.
        ranks: of the pipeline.
        micro_batches: how many.
        chunks: stages a rank.

    Raises:
        PrivateNameError: this torch does not show its schedules' orders.
        ValueError: it has none of that name, or these numbers do not fit it.
    """
    with needed_by("schedules of torch's own in ooo_pipeline"):
        from torch.distributed.pipelining._schedule_visualizer import get_schedule_ops
    letters: dict[str, Literal["F", "O", "W", "B"]] = {"F": "F", "I": "O", "W": "W", "B": "B"}
    orders: dict[int, list[PipelineAction]] = {}
    where: dict[int, int] = {}
    for rank, actions in enumerate(get_schedule_ops(name, ranks, micro_batches, chunks)):
        orders[rank] = []
        for action in actions:
            for one in (action.sub_actions or (action,)) if action is not None else ():
                kind = letters.get(one.computation_type.value)
                if kind is not None and one.microbatch_index is not None:
                    where[one.stage_index] = rank
                    orders[rank].append((kind, one.stage_index, one.microbatch_index))
    return orders, tuple(where[stage] for stage in range(len(where)))
