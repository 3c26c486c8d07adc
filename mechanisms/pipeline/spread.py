"""A model that is spread over ranks: what one rank knows of it after the first batch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from retime.foundations.weight_gradients import Layer, SplitBackward
from retime.mechanisms.pipeline.errors import messages_of_group
from retime.mechanisms.pipeline.losses import FirstLook, LossWeights
from retime.mechanisms.pipeline.measured_times import MeasuredTimes
from retime.mechanisms.pipeline.ownership import Ownership
from retime.mechanisms.pipeline.plan import PipelinePlan, Planner
from retime.mechanisms.pipeline.relay import Relay
from retime.mechanisms.pipeline.survey import Shapes
from retime.mechanisms.pipeline.training_call import TrainingCall
from retime.mechanisms.pipeline.values import TensorKind, ValueKind

__all__ = ["Place", "Spread", "Whole"]


@dataclass(frozen=True)
class Place:
    """Where this process stands.

    Attributes:
        group: the ranks of the pipeline.
        data_group: the ranks with the same stages in other pipelines; None: there are none.
        device: of the model.
        names: of the layers.
    """

    group: Any
    data_group: Any
    device: torch.device
    names: list[str]

    @property
    def rank(self) -> int:
        """In the group."""
        return dist.get_rank(self.group)

    @property
    def ranks(self) -> int:
        """Of the group."""
        return dist.get_world_size(self.group)

    def world_rank(self, rank: int) -> int:
        """Of a rank of the group."""
        return dist.get_global_rank(self.group, rank)

    def all_gather(self, mine: Any) -> list[Any]:
        """What each rank gives, on all of them."""
        everyone: list[Any] = [None] * self.ranks
        with messages_of_group(self.group):
            dist.all_gather_object(everyone, mine, group=self.group)
        return everyone

    def agreed(self, mine: Any) -> Any:
        """What the first rank of the first pipeline gives, on all ranks of all pipelines."""
        if self.data_group is not None and self.rank == 0:
            told = [mine]
            with messages_of_group(self.data_group):
                dist.broadcast_object_list(told, dist.get_global_rank(self.data_group, 0), group=self.data_group)
            mine = told[0]
        return self.broadcast(mine, 0)

    def broadcast(self, mine: Any, rank: int) -> Any:
        """What one rank gives, on all of them."""
        told = [mine]
        with messages_of_group(self.group):
            dist.broadcast_object_list(told, self.world_rank(rank), group=self.group)
        return told[0]


class Whole(nn.Module):
    """Runs a stretch of a step, as if it were a module's forward pass."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.splits = True
        """Whether weight gradients of what runs next are to wait."""
        self.waits: set[Layer] = set()
        """Those of these layers, then."""

    def forward(self, stretch: Callable[[], Any]) -> Any:
        """Run it."""
        return stretch()


@dataclass
class Spread:
    """What the first batch has shown.

    Attributes:
        place: of this process.
        planner: for other numbers of micro-batches.
        plan: the one in use.
        whole: runs stretches of a step for ``split``.
        split: of this rank's stages.
        owners: of the parameters.
        weights: of micro-batches' losses.
        outputs: kinds of what layers return, by layer and shapes of their arguments.
        positions: by stage, which tensors of its first layer's arguments come from the stage before.
        needs_gradient: of those.
        writes: layers that write into what they are given.
        reads: kinds of those, by stage and shapes of a micro-batch.
        stage_parameters: by stage, the trainable parameters that only it uses.
        late: this rank's parameters that several stages use.
        outside: names of the parameters in front of the layers and behind them.
        look: what the first batch has shown of its losses, until somebody has looked at it.
        with_messages: the plan's orders with all messages, as the runtime found them.
    """

    place: Place
    planner: Planner
    plan: PipelinePlan
    whole: Whole
    split: SplitBackward
    owners: Ownership
    weights: LossWeights
    outputs: dict[tuple[int, Shapes], ValueKind]
    positions: dict[int, list[int]]
    needs_gradient: dict[int, list[bool]]
    writes: set[int]
    reads: dict[tuple[int, Shapes], list[TensorKind]] = field(default_factory=dict)
    stage_parameters: dict[int, list[Tensor]] = field(default_factory=dict)
    late: list[Tensor] = field(default_factory=list)
    outside: list[str] = field(default_factory=list)
    look: FirstLook | None = None
    with_messages: Any = None
    times: MeasuredTimes = field(default_factory=MeasuredTimes)

    def use(self, plan: PipelinePlan) -> None:
        """Another one, of as many stages."""
        self.plan, self.with_messages = plan, None

    def plan_from_steps(self) -> None:
        """Order the tasks anew, by what they took in the steps so far; all ranks call this."""
        shares = {stage: self.planner.weight_share(stage) for stage in self.mine}
        everyone = self.place.all_gather(self.times.by_stage(shares))
        self.planner.know(self.place.agreed({stage: took for one in everyone for stage, took in one.items()}))
        self.use(self.planner.plan(self.plan.micro_batches))

    @property
    def mine(self) -> list[int]:
        """This rank's stages."""
        return [stage for stage, rank in enumerate(self.plan.rank_of) if rank == self.place.rank]

    @cached_property
    def training_call(self) -> TrainingCall:
        """The layers of training steps."""
        return TrainingCall(self.plan, self.place.rank, self.place.device, self.outputs, self.place.names, self.writes)

    def relay(self) -> Relay:
        """The layers of steps without gradients."""
        return Relay(self.plan, self.place.group, self.place.device, self.outputs)
