"""Every argument of every public constructor refuses what cannot be meant, by name, before anything is done.

What an annotation tells is tried without being listed; the table has what makes a valid call, and values of the right
type that cannot be meant.
"""

import inspect
import math
import typing
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from torch import nn

import retime
from retime.integrations import accelerate as for_accelerate
from retime.mechanisms import arguments, fusion, memory, out_of_order
from retime.schedules.budget import OffloadPlan

pytestmark = pytest.mark.filterwarnings("ignore:OutOfOrderPipeline has no effect")  # with one process
NEGATIVE = (-1, -(10**9))
NOT_POSITIVE = (0, *NEGATIVE)
NO_CHOICE = ("nonsense", "")
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


@dataclass(frozen=True)
class Case:
    """A public callable, the arguments of a valid call, and values of the right type that cannot be meant.

    Attributes:
        free: arguments that may be anything, each because another library checks it.
    """

    of: Callable[..., Any]
    valid: Callable[[], dict[str, Any]] = dict
    wrong: dict[str, tuple[Any, ...]] = field(default_factory=dict)
    free: tuple[str, ...] = ()

    @property
    def hints(self) -> dict[str, Any]:
        function: Any = self.of.__init__ if isinstance(self.of, type) else self.of
        hints = typing.get_type_hints(function, include_extras=True)
        return {name: hints[name] for name in inspect.signature(self.of).parameters if name not in self.free}


def _recurrent() -> dict[str, Any]:
    return {"model": nn.GRU(2, 2)}


def _trained() -> dict[str, Any]:
    model = nn.Linear(2, 2)
    return {"model": model, "optimizer": torch.optim.SGD(model.parameters(), 0.1)}


def _optimizer() -> dict[str, Any]:
    return {"optimizer": _trained()["optimizer"]}


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


def _sizes() -> dict[str, Any]:
    return {"input_size": 2, "hidden_size": 2}


SCAN = {"solver": NO_CHOICE, "dropout": (-0.5, 1.5), "hidden_size": NOT_POSITIVE, "num_layers": NOT_POSITIVE}
NO_BYTES = (*NOT_POSITIVE, *NO_CHOICE, "-1MiB", "8 bananas")
NO_HOST = (None, 7, "memory", "disk:folder")
NO_SIZE = (*NOT_POSITIVE, math.nan)
FUSED = {"mode": NO_CHOICE, "bucket_bytes": NO_BYTES}
OFFLOAD = {"in_flight_bytes": NEGATIVE, "planned_bytes": NEGATIVE, "host": NO_HOST}
OUT_OF_ORDER = {"k": (*NEGATIVE, *NO_CHOICE), "max_memory": NO_BYTES}
BUDGET = {
    "budget": (*NO_BYTES, "0%", "101%"),
    "host": (*NO_CHOICE, "disk:"),
    "batchnorm": NO_CHOICE,
    "on_shape_change": NO_CHOICE,
}
DDP = {"bucket_cap_mb": NO_SIZE, "start_method": NO_CHOICE}
REDUCING = DDP | {"reduce_on": NO_CHOICE}
PIPELINE = {
    "pipeline_parallel_size": (*NOT_POSITIVE, *NO_CHOICE),
    "data_parallel_size": (*NOT_POSITIVE, *NO_CHOICE),
    "microbatches": (*NOT_POSITIVE, *NO_CHOICE),
    "group": (*NOT_POSITIVE, *NO_CHOICE),
    "schedule": NO_CHOICE,
    "activation_cap": NO_BYTES,
    "start_method": NO_CHOICE,
}
LIGHTNINGS = ("ddp_comm_state", "ddp_kwargs", "kwargs")
MEASURING = {"every_n_steps": NOT_POSITIVE, "warm_up": NEGATIVE}

CASES = [
    Case(retime.FuseOptimizer, wrong={"mode": NO_CHOICE, "bucket_bytes": NOT_POSITIVE}),
    Case(retime.MemoryTimeline, wrong=MEASURING),
    Case(retime.ParallelScanBackward, wrong={"solver": NO_CHOICE}),
    Case(retime.CPUMemoryPool, wrong={"slack": (0.9, -1.0, float("nan"))}),
    Case(retime.PeakMemory, wrong={"every_n_steps": NOT_POSITIVE}),
    Case(retime.ReverseFirstK, wrong={"k": (*NEGATIVE, *NO_CHOICE), "search_every_n_epochs": NOT_POSITIVE}),
    Case(retime.PipelineTimeline, wrong={"every_n_steps": NOT_POSITIVE}),
    Case(retime.StepTimeline, wrong=MEASURING),
    Case(retime.ScanRNN, _sizes, wrong={**SCAN, "nonlinearity": NO_CHOICE}, free=("device", "dtype")),
    Case(retime.ScanGRU, _sizes, wrong=SCAN, free=("device", "dtype")),
    Case(retime.ScanLSTM, _sizes, wrong={**SCAN, "proj_size": (1,)}, free=("device", "dtype")),
    Case(retime.ScanSequential, wrong={"levels": NEGATIVE}, free=("args",)),
    Case(retime.convert, _recurrent, wrong={"solver": NO_CHOICE, "names": (["absent"],)}),
    Case(retime.convert_back, _recurrent, wrong={"names": (["absent"],)}),
    Case(retime.FusedOptimizerStrategy, wrong=FUSED, free=("device",)),
    Case(retime.FusedOptimizerDDPStrategy, wrong=FUSED | REDUCING, free=LIGHTNINGS),
    Case(retime.OOODataParallelStrategy, wrong=OUT_OF_ORDER | REDUCING, free=LIGHTNINGS),
    Case(retime.CPUAccumulateStrategy, wrong=DDP, free=LIGHTNINGS),
    Case(retime.OOOPipelineStrategy, wrong=PIPELINE, free=LIGHTNINGS),
    Case(retime.MemoryBudgetStrategy, wrong=BUDGET, free=("device",)),
    Case(retime.MemoryBudgetDDPStrategy, wrong=BUDGET | REDUCING, free=LIGHTNINGS),
    Case(retime.fuse_optimizer, _trained, wrong=FUSED | {"clip_value": NO_SIZE, "backward_passes": NOT_POSITIVE}),
    Case(retime.declare_per_parameter, lambda: {"optimizer_class": torch.optim.SGD}),
    Case(fusion.BackwardFusion, _optimizer, wrong=FUSED | {"clip_value": NO_SIZE, "backward_passes": NOT_POSITIVE}),
    Case(fusion.ForwardFusion, _optimizer, wrong=FUSED),
    Case(out_of_order.WeightGradientDeferral, _recurrent, wrong={"k": NEGATIVE}),
    Case(memory.BudgetedStep, _budgeted, wrong=BUDGET | {"budget_bytes": NO_BYTES, "host": NO_HOST}),
    Case(
        memory.OffloadSavedTensors,
        _offloaded,
        wrong={"in_flight_bytes": NEGATIVE, "planned_bytes": NEGATIVE, "host": NO_HOST},
    ),
    Case(for_accelerate.FusedOptimizer, _prepared, wrong=FUSED | {"clip_value": NO_SIZE}),
    Case(for_accelerate.MemoryBudget, _prepared, wrong=BUDGET, free=("options",)),
    Case(for_accelerate.OutOfOrderPipeline, _prepared, wrong=PIPELINE),
]


@pytest.mark.parametrize(
    ("case", "name"),
    [pytest.param(case, name, id=f"{case.of.__name__}-{name}") for case in CASES for name in case.hints],
)
def test_what_cannot_be_meant_is_refused_by_name(case: Case, name: str) -> None:
    other_types = [odd for odd in ODD if not arguments.accepts(odd, case.hints[name], bounds=False)]
    for value in (*other_types, *case.wrong.get(name, ())):
        with pytest.raises((TypeError, ValueError), match=name):  # fails with what was taken without a word
            pytest.fail(f"{name}={value!r} was taken: {case.of(**{**case.valid(), name: value})}")


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.of.__name__)
def test_the_call_that_everything_else_is_a_change_of_is_valid(case: Case) -> None:
    case.of(**case.valid())


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.of.__name__)
def test_every_argument_can_be_judged_or_says_who_does(case: Case) -> None:
    for name, hint in case.hints.items():
        assert arguments.is_checkable(hint) or name in case.wrong, f"{name}: {hint} tells nothing"


def test_every_public_constructor_is_in_the_table() -> None:
    tested = {case.of for case in CASES}
    public = {getattr(retime, name) for name in retime.__all__} - {retime.DifferenceWarning, retime.NoEffectWarning}
    assert public <= tested, f"without a case: {sorted(one.__name__ for one in public - tested)}"
