"""Every argument of every public constructor and function refuses what cannot be meant, before anything is done.

The error names the argument and repeats the value. What an annotation tells is tried without being listed, and so are
numbers that are rarely meant (0, negative, infinite), empty and unknown texts, and times of 0; the table has what makes
a valid call, which of those values are meant all the same, and further ones that cannot be.
"""

import inspect
import math
import typing
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cached_property
from typing import Any

import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from transformers import Trainer, TrainingArguments

import retime
from retime.foundations import arguments, ddp, weight_gradients
from retime.integrations import accelerate as for_accelerate
from retime.integrations import transformers as for_transformers
from retime.mechanisms import cpu_accumulation, fusion, out_of_order, pipeline, scan, two_streams
from retime.mechanisms import memory_budget as memory
from retime.mechanisms.scan import jacobians as jacobian
from retime.schedules.budget import OffloadPlan

pytestmark = [  # with one process, or a chain that is no list of layers
    pytest.mark.filterwarnings("ignore:.* has no effect"),
    pytest.mark.filterwarnings("ignore:out-of-order data parallel has no effect"),
]
ODD: tuple[Any, ...] = (
    object(),
    7,
    1.5,
    math.nan,
    True,
    "nonsense",
    b"bytes",
    [],
    [7],
    {},
    (),
    nn.Linear,
    lambda: None,
)
"""Of most types that somebody may pass by mistake."""
RARELY_MEANT: tuple[Any, ...] = (
    *(0, -1, -(10**9), -0.5, math.inf, -math.inf, math.nan),
    *("", "nonsense"),
    *(timedelta(0), timedelta(seconds=-1)),
)
"""Of a type that an argument may take."""
ANY_TEXT = ("", "nonsense")


@dataclass(frozen=True)
class Case:
    """A public callable, the arguments of a valid call, and values of the right type that cannot be meant.

    Attributes:
        free: arguments that may be anything, each because another library checks it.
        right: rarely meant values that are meant here, each for a reason beside it.
    """

    of: Callable[..., Any]
    valid: Callable[[], dict[str, Any]] = dict
    wrong: dict[str, tuple[Any, ...]] = field(default_factory=dict)
    free: tuple[str, ...] = ()
    right: dict[str, tuple[Any, ...]] = field(default_factory=dict)

    def tried(self, name: str) -> list[Any]:
        """Values to be refused, of this argument."""
        hint = self.hints[name]
        odd = [value for value in ODD if not arguments.accepts(value, hint, bounds=False)]
        rare = [value for value in RARELY_MEANT if arguments.accepts(value, hint, bounds=False)]
        right = [repr(value) for value in self.right.get(name, ())]
        checkable = arguments.is_checkable(hint)
        wrong = [*odd, *(rare if checkable else ()), *self.wrong.get(name, ())]
        return [value for value in wrong if repr(value) not in right]

    @cached_property
    def hints(self) -> dict[str, Any]:
        functions: list[Any] = [self.of]
        if isinstance(self.of, type):  # a strategy hands arguments on to the class that it inherits from
            functions = [vars(one)["__init__"] for one in reversed(self.of.__mro__) if "__init__" in vars(one)]
        hints: dict[str, Any] = {}
        for function in functions:
            if hasattr(function, "__globals__"):
                hints |= typing.get_type_hints(function, include_extras=True)
        names = inspect.signature(self.of).parameters
        return {name: hints[name] for name in names if name in hints and name not in self.free}


def _recurrent() -> dict[str, Any]:
    return {"model": nn.GRU(2, 2)}


def _trained() -> dict[str, Any]:
    model = nn.Linear(2, 2)
    return {"model": model, "optimizer": torch.optim.SGD(model.parameters(), 0.1)}


def _budgeted() -> dict[str, Any]:
    model, optimizer = _trained().values()
    return {"model": model, "optimizers": [optimizer], "budget_bytes": 10**6, "host": memory.HostNull()}


def _offloaded() -> dict[str, Any]:
    return {"plan": OffloadPlan(1), "host": memory.HostNull()}


def _prepared() -> dict[str, Any]:
    AcceleratorState._reset_state(True)  # what other tests asked for
    accelerator = Accelerator(cpu=True)
    model, optimizer = accelerator.prepare(*_trained().values())
    return {"accelerator": accelerator, "model": model, "optimizer": optimizer}


def _given() -> dict[str, Any]:
    args = TrainingArguments("outputs", use_cpu=True, report_to="none", max_grad_norm=0)
    return {"trainer": Trainer(model=nn.Linear(2, 2), args=args)}


def _wrapped() -> dict[str, Any]:
    return {"model": DistributedDataParallel(nn.Linear(2, 2), gradient_as_bucket_view=True)}


def _reduced() -> dict[str, Any]:
    return {**_wrapped(), "reducer": ddp.DeviceReducer()}


def _wrapped_optimizer() -> dict[str, Any]:
    model = _wrapped()["model"]
    return {"model": model, "optimizers": torch.optim.SGD(model.parameters(), 0.1)}


def _updated() -> dict[str, Any]:
    model, optimizer = _trained().values()
    return {"optimizer": optimizer, "parameters": list(model.parameters())}


def _staged() -> dict[str, Any]:
    return {"model": nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), "microbatches": 2}


def _batch() -> dict[str, Any]:
    step = pipeline.PipelineStep(**_staged())
    return {"self": step, "step": lambda part: step._model(part).square().mean(), "batch": torch.ones(4, 2)}


def _joined() -> dict[str, Any]:
    """One rank of a DDP fusion."""
    model = _wrapped()["model"]
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    return {"optimizer": optimizer, "reduction": fusion.reduction_of(model)}


def _examined() -> dict[str, Any]:
    model = nn.Linear(2, 2)
    return {"step": lambda batch: model(batch).square().mean(), "batch": torch.ones(4, 2), "model": model}


def _planned() -> dict[str, Any]:
    model, optimizer = _trained().values()
    loss = lambda batch: model(batch).square().mean()  # noqa: E731
    return {"step": memory.TrainingStep(model, torch.ones(4, 2), 4, loss, [optimizer])}


def _clipped() -> dict[str, Any]:
    return {"self": for_accelerate.OutOfOrderPipeline(**_prepared()), "max_norm": 1.0}


def _sizes() -> dict[str, Any]:
    return {"input_size": 2, "hidden_size": 2}


SCAN = {"dropout": (1.5,)}
NO_BYTES = ("-1MiB", "8 bananas")
NO_HOST = (None, 7, "memory", "disk:folder")
NO_THREADS = ((0, 1), (1, 0), (1,), (1, 1, 1), (1, 1.5), (True, 1), [1, 1], 2)
FUSED = {"bucket_bytes": NO_BYTES}
OUT_OF_ORDER = {"max_memory": NO_BYTES}
TWO_STREAMS = {"threads": NO_THREADS, "max_memory": NO_BYTES}
BUDGET = {"budget": (*NO_BYTES, "0%", "101%"), "host": ("disk:",)}
PIPELINE = {"activation_cap": NO_BYTES}
LIGHTNINGS = ("ddp_comm_state", "ddp_kwargs", "kwargs", "device")
LIGHTNING_TAKES = {"accelerator": ANY_TEXT, "process_group_backend": ANY_TEXT}  # and says more before a fit
MEASURES = {"warm_up": (0,), "dirpath": ANY_TEXT}
SOME_K = {"k": (0,)}  # nothing is deferred
LAYERS_LATER = {"layers": ANY_TEXT}  # the module is not there yet
MEANT = {retime.OOODataParallelStrategy: SOME_K, retime.OOOPipelineStrategy: LAYERS_LATER}
NO_CLIPPING = {"clip_value": (math.inf,)}
OF_STRATEGIES = FUSED | OUT_OF_ORDER | TWO_STREAMS | BUDGET | PIPELINE

CASES = [
    Case(retime.FuseOptimizer),
    Case(retime.MemoryTimeline, right=MEASURES),
    Case(retime.ParallelScanBackward, right={"names": ANY_TEXT}),
    Case(retime.CPUMemoryPool, wrong={"slack": (0.9,)}),
    Case(retime.PeakMemory),
    Case(retime.ReverseFirstK, right={"k": (0,)}),
    Case(retime.PipelineTimeline, right={"dirpath": ANY_TEXT}),
    Case(retime.StepTimeline, right=MEASURES),
    Case(retime.ScanRNN, _sizes, SCAN, ("device", "dtype"), {"dropout": (0,)}),
    Case(retime.ScanGRU, _sizes, SCAN, ("device", "dtype"), {"dropout": (0,)}),
    Case(
        retime.ScanLSTM, _sizes, SCAN | {"proj_size": (1,)}, ("device", "dtype"), {"dropout": (0,), "proj_size": (0,)}
    ),
    Case(retime.ScanSequential, free=("args",), right={"levels": (0,)}),
    Case(retime.convert, _recurrent, wrong={"names": (["absent"],)}, right={"names": ("",)}),
    Case(retime.convert_back, _recurrent, wrong={"names": (["absent"],)}),
    *(
        Case(one, wrong=OF_STRATEGIES, free=LIGHTNINGS, right=LIGHTNING_TAKES | MEANT.get(one, {}))
        for one in dict.fromkeys(strategy for _, strategy, *_ in retime.strategies.STRATEGIES)
    ),
    Case(retime.fuse_optimizer, _trained, FUSED, right=NO_CLIPPING),
    Case(retime.declare_per_parameter, lambda: {"optimizer_class": torch.optim.SGD}),
    Case(fusion.BackwardFusion, lambda: {"optimizer": _trained()["optimizer"]}, FUSED, right=NO_CLIPPING),
    Case(fusion.ForwardFusion, lambda: {"optimizer": _trained()["optimizer"]}, FUSED),
    Case(fusion.ReductionHook, _wrapped, free=("state",)),
    Case(fusion.DataParallelFusion, _joined, free=("options",)),
    Case(out_of_order.WeightGradientDeferral, _recurrent, right={"k": (0,)}),
    Case(out_of_order.OutOfOrderDataParallel, _wrapped_optimizer, OUT_OF_ORDER, right=SOME_K),
    Case(two_streams.TwoStreamBackward, lambda: {"model": nn.Linear(2, 2)}, TWO_STREAMS),
    Case(weight_gradients.SplitBackward, _recurrent),
    Case(cpu_accumulation.BucketReduction, _reduced, right={"name": ANY_TEXT, "instead": ANY_TEXT}),
    Case(cpu_accumulation.HostUpdate, _updated),
    Case(cpu_accumulation.HostReducer, free=("device",)),
    Case(ddp.DeviceReducer),
    Case(ddp.OwnGroupsReducer),
    Case(pipeline.PipelineStep, _staged, right={"layers": ("",)}),
    Case(pipeline.PipelineStep.train, _batch, free=("batch",)),
    Case(
        memory.BudgetedStep,
        _budgeted,
        wrong=BUDGET | {"budget_bytes": NO_BYTES, "host": NO_HOST},
        right={"reduction_bytes": (0,), "hidden_bytes": (0,), "whole_because": ANY_TEXT, "buckets": ("",)},
    ),
    Case(memory.OffloadSavedTensors, _offloaded, wrong={"host": NO_HOST}, right={"in_flight_bytes": (0,)}),
    Case(memory.certify, _examined, free=("batch", "split", "loss_weight")),
    Case(memory.part_sizes, lambda: {"samples": 8}),
    Case(memory.profile_step, _planned),
    Case(memory.replay, lambda: {**_planned(), "plan": OffloadPlan(4)}, right={"in_flight_bytes": (0,)}),
    Case(memory.search_plan, lambda: {**_planned(), "budget_bytes": 10**6}),
    Case(scan.calibrate, lambda: {"cells": ("RNN",), "repeats": 1}, free=("device",)),
    Case(jacobian.full_levels, lambda: {"matrices": 3}, right={"matrices": (0,)}),
    Case(jacobian.scan_plan, lambda: {"matrices": 3}, right={"matrices": (0,), "levels": (0,)}),
    Case(jacobian.prune_class_blind, lambda: {"model": nn.Linear(2, 2), "share": 0.5}, right={"share": (0,)}),
    Case(jacobian.prune_class_uniform, lambda: {"model": nn.Linear(2, 2), "share": 0.5}, right={"share": (0,)}),
    Case(for_accelerate.CPUAccumulate, lambda: {k: v for k, v in _prepared().items() if k != "optimizer"}),
    Case(for_accelerate.FusedOptimizer, _prepared, FUSED, right=NO_CLIPPING),
    Case(for_accelerate.MemoryBudget, _prepared, wrong=BUDGET, free=("options",)),
    Case(for_accelerate.OutOfOrderDataParallel, _prepared, OUT_OF_ORDER, right=SOME_K),
    Case(for_accelerate.OutOfOrderPipeline, _prepared, wrong=PIPELINE, right=LAYERS_LATER),
    Case(for_accelerate.TwoStreams, lambda: {k: v for k, v in _prepared().items() if k != "optimizer"}, TWO_STREAMS),
    Case(for_accelerate.OutOfOrderPipeline.clip_grad_norm_, _clipped, right={"max_norm": (0, math.inf)}),
    Case(for_transformers.CPUAccumulate, _given),
    Case(for_transformers.FusedOptimizer, _given, FUSED, right=NO_CLIPPING),
    Case(for_transformers.MemoryBudget, _given, wrong=BUDGET, free=("options",)),
    Case(for_transformers.OutOfOrderDataParallel, _given, OUT_OF_ORDER, right=SOME_K),
]


@pytest.fixture(scope="module", autouse=True)
def one_rank() -> Iterator[None]:
    """For what asks a process group for its ranks."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize(
    ("case", "name"),
    [pytest.param(case, name, id=f"{case.of.__name__}-{name}") for case in CASES for name in case.hints],
)
def test_what_cannot_be_meant_is_refused_by_name(case: Case, name: str) -> None:
    problems, valid = [], case.valid()
    for value in case.tried(name):
        try:
            problems.append(f"{name}={value!r} was taken: {case.of(**{**valid, name: value})}")
        except (TypeError, ValueError, OSError) as error:
            if name not in str(error) or repr(value)[:60] not in str(error):
                problems.append(f"{name}={value!r} is not named: {error}")
    assert not problems, "\n".join(problems)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.of.__name__)
def test_the_call_that_everything_else_is_a_change_of_is_valid(case: Case) -> None:
    case.of(**case.valid())


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.of.__name__)
def test_every_argument_can_be_judged_or_says_who_does(case: Case) -> None:
    for name, hint in case.hints.items():
        assert arguments.is_checkable(hint) or name in case.wrong, f"{name}: {hint} tells nothing"


FACES = (retime, for_accelerate, for_transformers, cpu_accumulation)
RESULTS = {"HostReductionReport", "HostUpdateReport", "SumTimes", "TimedSum", "RankLostError"}
NOT_CALLED_BY_USERS = {
    retime.DifferenceWarning,
    retime.NoEffectWarning,
    for_transformers.OutOfOrderPipeline,  # refuses every call
    *(value for name, value in vars(cpu_accumulation).items() if name in RESULTS),
}


def test_every_public_constructor_is_in_the_table() -> None:
    tested = {case.of for case in CASES}
    public = {getattr(face, name) for face in FACES for name in face.__all__} - NOT_CALLED_BY_USERS
    assert public <= tested, f"without a case: {sorted(one.__name__ for one in public - tested)}"


@pytest.mark.parametrize("value", [timedelta(0), timedelta(seconds=-1), 3, None, "3"])
def test_a_time_is_above_0(value: Any) -> None:
    assert not arguments.accepts(value, arguments.Timeout)
    assert arguments.accepts(timedelta(seconds=1), arguments.Timeout)
