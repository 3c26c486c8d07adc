"""The table: one row a strategy. Adding a strategy to the contract is adding its line to `STRATEGIES`.

    Row("my_strategy", lambda _: "my_strategy", unfused=frozenset({MANUAL}), report=_of_strategy)

On several ranks: `plain="ddp"`, and a factory that hands on the DDP options a scenario needs.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy, Strategy

from contract.in_parts import SplitsEverything, SplitsEverythingOnAllRanks
from contract.pipelines import PIPELINE, in_stages
from contract.record import Record
from contract.traits import (
    ACCUMULATION_HOOK,
    ALIASES,
    BACKWARD_HOOK,
    COMPILED,
    CUSTOM_OPTIMIZER,
    GRADIENT_HOOK,
    HELD_BACK,
    LBFGS,
    MANUAL,
    NORM_CLIP,
    SCALER,
    SPARSE,
    STATE_DICT,
    STEP_HOOK,
    UNUSED,
)
from retime.callbacks import FuseOptimizer
from retime.foundations.weight_gradients import split_backward as layer_hooks
from retime.mechanisms.cpu_accumulation import HostUpdateReport
from retime.mechanisms.fusion import FusionReport
from retime.mechanisms.memory_budget import BudgetedStep, BudgetOptions
from retime.mechanisms.memory_budget.report import PlannedShape
from retime.mechanisms.memory_budget.search import PlanChoice
from retime.mechanisms.out_of_order import data_parallel as send_plan
from retime.mechanisms.out_of_order import k_search as k_choice
from retime.schedules.budget import OffloadPlan
from retime.strategies import (
    CPUAccumulateStrategy,
    FusedOptimizerDDPStrategy,
    FusedOptimizerStrategy,
    MemoryBudgetDDPStrategy,
    MemoryBudgetStrategy,
    OOODataParallelStrategy,
    OOOSingleDeviceStrategy,
)
from retime.strategies.support.budgeted_steps import Budgeted

REFUSALS = (RuntimeError, ValueError)
"""What a strategy refuses a run with."""


@dataclass(frozen=True)
class Row:
    """A strategy, the plain one it must equal, and when it lets Lightning step plainly.

    Attributes:
        name: how the test is called.
        strategy: what to pass to `Trainer(strategy=)`, from the DDP keyword arguments a scenario needs.
        plain: "auto" for one device, "ddp" for two gloo ranks, or "pipeline" for two gloo ranks that have one device's
            batches and must equal one device.
        callbacks: fresh callbacks for one Trainer.
        tolerance: 0 compares the bits; otherwise the relative and absolute tolerance the docstring promises.
        looser: beginnings of the names of scenarios in which rounding shows more, each with its tolerance.
        whole: scenarios in which a row that splits batches must not, and equals bit by bit, each with a pattern of the
            reason.
        left_out: scenarios of which a documented difference is not compared: what of a fit (`trace`), or "everything".
        unfused: the traits for which the mechanism must be off. Without any of them it must be on.
        warned: traits, or scenarios, with which a part of the mechanism is off, with a warning; the rest is on.
        report: where the mechanism's `report()` is; None when the row has no mechanism.
        refused: traits, or scenarios, that end the run with an error, each with a pattern of its message.
        trainer: further arguments of the row's Trainers.
        cannot: scenarios that cannot apply, each with the reason; they are skipped.
        only: beginnings of the scenarios' names, for a row that shares most of its code with another.
            `make test-all` runs it, but with `soon` `make test` does.
    """

    name: str
    strategy: Callable[[dict[str, Any]], Strategy | str]
    plain: str = "auto"
    callbacks: Callable[[], list[Callback]] = list
    tolerance: float = 0.0
    looser: Mapping[str, float] = field(default_factory=dict)
    whole: Mapping[str, str] = field(default_factory=dict)
    left_out: Mapping[str, str] = field(default_factory=dict)
    unfused: frozenset[str] = frozenset()
    warned: frozenset[str] = frozenset()
    report: Callable[[Trainer], Any] | None = None
    refused: Mapping[str, str] = field(default_factory=dict)
    trainer: Mapping[str, Any] = field(default_factory=dict)
    cannot: Mapping[str, str] = field(default_factory=dict)
    only: tuple[str, ...] = ("",)
    soon: bool = False

    @property
    def reference(self) -> "Row":
        return PLAIN["auto" if self.is_pipeline else self.plain]

    @property
    def on_ranks(self) -> bool:
        """Whether it runs on two ranks."""
        return self.plain != "auto"

    @property
    def is_pipeline(self) -> bool:
        """Whether its ranks are one device to the Trainer."""
        return self.plain == "pipeline"

    def refusal(self, traits: frozenset[str]) -> str | None:
        """The pattern of the error that a scenario with these traits (its name is one) must end with."""
        return next((pattern for trait, pattern in self.refused.items() if trait in traits), None)

    def refuses(self, traits: frozenset[str], error: BaseException) -> bool:
        """Whether a scenario with these traits must end with this error."""
        pattern = self.refusal(traits)
        return pattern is not None and isinstance(error, REFUSALS) and bool(re.search(pattern, str(error)))

    def tolerance_in(self, scenario: str) -> float:
        """How close a scenario's numbers must come to the plain row's."""
        if scenario in self.whole:
            return 0.0
        return next((near for start, near in self.looser.items() if scenario.startswith(start)), self.tolerance)

    def check_whole(self, scenario: str, record: Record) -> None:
        """Raise an AssertionError if a batch was split that must not be, or was not for another reason."""
        assert not any(record.fused_updates), "a batch was split that has to stay whole"
        assert any(re.search(self.whole[scenario], reason) for reason in record.reasons), f"whole by {record.reasons}"

    def expect_fused(self, traits: frozenset[str]) -> bool:
        """Whether the mechanism must have made updates in a scenario with these traits."""
        return self.report is not None and not self.unfused & traits

    def check_activity(self, traits: frozenset[str], record: Record, *, warns: bool = True) -> None:
        """Raise an AssertionError if the mechanism was off where it must be on, or the other way round.

        Args:
            traits: of the scenario.
            record: of one rank.
            warns: it is the rank that must warn where the mechanism is off: the first.
        """
        if self.report is None:
            return
        if self.expect_fused(traits):
            off = [str(number + 1) for number, updates in enumerate(record.fused_updates) if not updates]
            assert not off, f"fusion was off in fit {', '.join(off)}: {record.reasons or 'no reason given'}"
            expected = HELD_BACK in traits or bool(self.warned & traits)
            assert expected or not record.own_warnings, f"warned although fusion was on: {record.own_warnings}"
        else:
            assert not any(record.fused_updates), f"fusion was on with a trait it cannot have: {set(traits)}"
            assert record.reasons, "fusion was off and report() gives no reason"
            assert record.own_warnings or not warns, f"fusion was off ({record.reasons}) and nothing warned"


PLAIN = {"auto": Row("plain", lambda _: "auto"), "ddp": Row("plain_ddp", lambda ddp: DDPStrategy(**ddp), plain="ddp")}

# Backward fusion updates before all gradients exist, so whatever looks at them all makes it step aside.
IN_BACKWARD = frozenset({NORM_CLIP, GRADIENT_HOOK, MANUAL, LBFGS, CUSTOM_OPTIMIZER, SCALER, STEP_HOOK})
# Forward fusion only needs updates that can be taken apart, and reads that it can see coming.
IN_FORWARD = frozenset({LBFGS, CUSTOM_OPTIMIZER, STEP_HOOK, COMPILED})

ON_ONE_DEVICE: dict[str, Any] = {"unfused": IN_BACKWARD | {ACCUMULATION_HOOK, ALIASES, BACKWARD_HOOK}}
FORWARD: dict[str, Any] = {"unfused": IN_FORWARD | {ALIASES}}
DDP_BACKWARD: dict[str, Any] = {"unfused": IN_BACKWARD | {ALIASES, SPARSE, BACKWARD_HOOK}}
OUT_OF_ORDER: dict[str, Any] = {"plain": "ddp", "unfused": IN_FORWARD | {ALIASES}, "refused": {SPARSE: "sparse"}}
# Two streams leave layers in order whose gradients somebody adds to, or reads as they come.
IN_ORDER = frozenset(
    {
        *("compiled_calls_of_a_submodule", "compiled_calls_of_a_module_in_place", "compiled_module"),
        *("compiled_submodule", "optimizer_sparse_adam", "parameters_tied"),  # no layer that is split
        *("module_called_three_times", "two_forwards_one_loss", "weights_in_the_loss", "gradient_penalty"),
        *("activation_checkpointing", "activation_checkpointing_reentrant"),
        *(
            "anomaly_detection",
            "tensor_hooks",
            "accumulation_hooks_before_the_fit",
            "accumulation_hooks_at_train_start",
        ),
    }
)
FEW = (
    *("accumulate_with", "accumulation_changes", "accumulation_hooks_mid", "clip_by_norm", "checkpoints_mid"),
    *("optimizer_sparse", "parameters_get", "parameters_th", "parameters_tied", "parameters_unused_with"),
    *("precision_bf16_mixed", "precision_with_scaler_clipping", "ddp_"),
)
"""For a row that runs another row's code in another place."""
WIRED = (
    *(*FEW, "hook_", "callback_", "fit_", "exception_", "optimizer_built", "network_", "lr_finder", "evaluate_"),
    *("manual_every", "resume_mid"),
)
"""For a row that another class connects to the Trainer: what comes and goes there, beside."""
RANKS = (
    *(*WIRED, "gradient", "module_", "optimizer_custom", "optimizer_l", "optimizer_st", "optimizer_su", "parameter"),
    *("precision_", "tensor_hooks", "two_forwards", "weights_", "zero_grad"),
)
"""For a row on ranks of which a row on one device runs all: what looks at gradients and weights, beside."""
LAYERS = (
    *(*RANKS, "activation_", "attention", "averaging", "batch_norm", "channels_", "compiled_", "ema_", "inference_"),
    *("no_grad", "optimizer_adam", "optimizer_sgd", "recurrent_", "schedule_with", "target_", "template_", "two_"),
)
"""For a row that puts layers' weight gradients off: all kinds of layers and of passes through them, beside."""
STATES = (*RANKS, "checkpoint", "ema_", "groups_", "optimizer_", "ours_", "plain_", "resume", "schedule_", "stochastic")
"""For a row that keeps parts of the optimizer's state: all optimizers and what changes or saves their state, beside."""


def _of_strategy(trainer: Trainer) -> Any:
    return trainer.strategy.report()


def _of_callback(trainer: Trainer) -> Any:
    return next(callback for callback in trainer.callbacks if isinstance(callback, FuseOptimizer)).report()


def _one_block(ddp: dict[str, Any]) -> OOODataParallelStrategy:
    return OOODataParallelStrategy(k=1, **ddp)


def _all_blocks(ddp: dict[str, Any]) -> OOODataParallelStrategy:
    """Defers every weight gradient, also those so small that they would only be held back.

    Rows on several ranks have processes of their own, so the changes reach no other row.
    """
    layer_hooks.SMALL_BYTES = 0
    send_plan.SMALLEST_MESSAGE_BYTES = 1
    k_choice.KChoice.check_range = lambda self, k=None: None
    return OOODataParallelStrategy(k=99, **ddp)


class _AddsUpOnHost(CPUAccumulateStrategy):
    """Fails a fit of which no gradients were added up in shared memory."""

    def teardown(self) -> None:
        super().teardown()
        report = self.report()
        assert not self._trains or report.buckets, "no gradients were added up on the host"
        assert not report.buckets or "in shared memory" in report.how, report.how

    @property
    def _trains(self) -> bool:
        module = self.lightning_module
        return module is not None and module.trainer.global_step > 0


def _of_update(trainer: Trainer) -> Any:
    """What `Row.report` reads of the update on the host: its steps, and why there were none."""
    update = trainer.strategy.report().update or HostUpdateReport()
    return SimpleNamespace(fused_updates=update.steps, plain_steps=dict.fromkeys(update.reasons, 1))


def _of_two_streams(trainer: Trainer) -> Any:
    """What `Row.report` reads of two streams: weight gradients that ran beside, and layers that stay in order."""
    report = trainer.strategy.report()
    return SimpleNamespace(fused_updates=report.sub_stream + report.main_stream, plain_steps=report.in_order)


def _of_updates(trainer: Trainer) -> Any:
    """What `Row.report` reads of two streams with updates: those of backward fusion, wherever they ran."""
    return trainer.strategy.report().fusion or FusionReport("backward")


class _Everything(Budgeted):
    """Moves every saved storage of every step, as no budget of these small models would ask for."""

    def _make_step(self, module: LightningModule, options: BudgetOptions) -> BudgetedStep:
        return super()._make_step(module, replace(options, make_plan=self._all))  # type: ignore[safe-super]

    def teardown(self) -> None:
        super().teardown()
        report = self.report()
        if report is not None and report.steps:
            assert report.offload.storages, f"nothing was offloaded: {report}"

    @staticmethod
    def _all(planner: Any, step: Any, batch: Any, samples: int) -> PlannedShape:
        return PlannedShape(samples, PlanChoice(OffloadPlan(samples, frozenset(range(999)), 2, 999), 0, 0, 1, 1, 0, 0))


class _OffloadsEverything(_Everything, MemoryBudgetStrategy):
    """On one device."""


class _OffloadsEverythingOnAllRanks(_Everything, MemoryBudgetDDPStrategy):
    """With DDP."""


# Steps that a budget offloads or splits run compiled code uncompiled, and say so.
UNCOMPILED = {
    "compiled_calls_of_a_submodule": "calls",
    "compiled_calls_of_a_module_in_place": "calls",
    "compiled_calls_of_a_loss_function": "calls",
}

# What training_step leaves in lists of its own is noted once a part: contract.in_parts makes one entry of these.
IN_PARTS: dict[str, Any] = {
    "report": lambda trainer: trainer.strategy.activity(),
    "tolerance": 1e-5,
    # In double precision all of these agree within 1e-10.
    "looser": {
        "attention": 1e-2,  # its LayerNorms have two features, so gradients are rounding, which Adam scales up
        "optimizer_muon": 3e-3,  # computes in bfloat16
        "optimizer_rmsprop": 1e-4,
        "optimizer_lbfgs": 5e-2,  # divides by differences of gradients
        "precision_bf16_true": 1e-2,
        "precision_": 3e-3,
    },
    "whole": {
        "target_network": "each forward pass changes target",
        "parameters_unused": "the step keeps a state between calls",
        "parameters_unused_with_accumulation": "the step keeps a state between calls",
        "batch_norm_dropout_weight_norm": "BatchNorm in train mode",
        "accumulation_hooks_before_the_fit": "hooks that run when a gradient has been accumulated",
        "accumulation_hooks_at_train_start": "hooks that run when a gradient has been accumulated",
        "constants_are_class_weights": "is a mean by class weights",
        "constants_that_steps_count_in": "differs by",
        "ddp_own_buffers_on_each_rank": "BatchNorm in train mode",
        "ddp_static_graph": "static_graph=True",
        "template_deep_q_learning": "differs by",  # each call plays on and remembers more
        "template_finetuning": "BatchNorm in train mode",
    },
    "warned": frozenset({COMPILED}),
    "left_out": {
        **UNCOMPILED,
        # Their traces hold sums over the samples that training_step was given.
        "inference_in_training_step": "trace",
        "no_grad_forward_in_training_step": "trace",
        # Its trace holds means over pixels that count, of which parts have different numbers.
        "template_segmentation": "trace",
        # A part's gradients in float16 are smaller and overflow later; the scale then takes another way.
        "precision_with_scaler": "everything",
        "precision_with_scaler_clipping_and_accumulation": "everything",
    },
}

BUDGET_DDP: dict[str, Any] = {"plain": "ddp", "refused": {MANUAL: "needs automatic optimization"}}

STRATEGIES = [
    # Whatever differs in this row is the table's own doing.
    Row("plain_again", lambda _: SingleDeviceStrategy("cpu"), only=FEW),
    Row("fused_optimizer", lambda _: "fused_optimizer", report=_of_strategy, **ON_ONE_DEVICE),
    Row("fused_optimizer_forward", lambda _: "fused_optimizer_forward", report=_of_strategy, **FORWARD),
    Row(
        "small_buckets",
        lambda _: FusedOptimizerStrategy(bucket_bytes=1),
        report=_of_strategy,
        only=("optimizer_", *FEW),
        **ON_ONE_DEVICE,
    ),
    Row(
        "callback_backward",
        lambda _: "auto",
        callbacks=lambda: [FuseOptimizer("backward")],
        report=_of_callback,
        only=WIRED,
        **ON_ONE_DEVICE,
    ),
    Row(
        "callback_forward",
        lambda _: "auto",
        callbacks=lambda: [FuseOptimizer("forward")],
        **FORWARD,
        report=_of_callback,
        only=WIRED,
    ),
    Row(
        "fused_optimizer_ddp",
        lambda ddp: FusedOptimizerDDPStrategy(**ddp) if ddp else "fused_optimizer_ddp",
        plain="ddp",
        only=RANKS,
        soon=True,
        **DDP_BACKWARD,
        report=_of_strategy,
    ),
    Row(
        "ddp_forward",
        lambda ddp: FusedOptimizerDDPStrategy(mode="forward", **ddp),
        plain="ddp",
        **FORWARD,
        report=_of_strategy,
        only=WIRED,
    ),
    Row(
        "ddp_callback",
        lambda ddp: DDPStrategy(**ddp),
        plain="ddp",
        callbacks=lambda: [FuseOptimizer("backward")],
        **DDP_BACKWARD,
        report=_of_callback,
        only=FEW,
    ),
    Row(
        "ooo_single_device",
        lambda _: OOOSingleDeviceStrategy(threads=(torch.get_num_threads(),) * 2),
        unfused=IN_ORDER,
        report=_of_two_streams,
    ),
    Row(
        "ooo_single_device_updates",
        lambda _: OOOSingleDeviceStrategy(threads=(torch.get_num_threads(),) * 2, fuse_updates=True),
        warned=IN_ORDER,  # those layers update as in backward fusion
        only=(*LAYERS, "clip_by", "groups_", "none_"),  # where updates meet weight gradients; two rows have the rest
        soon=True,
        report=_of_updates,
        **ON_ONE_DEVICE,
    ),
    # Roomy budgets train plainly: what holds in the next rows holds here.
    Row("memory_budget", lambda _: "memory_budget", refused={MANUAL: "needs automatic optimization"}, only=FEW),
    Row(
        "memory_budget_offload",
        lambda _: _OffloadsEverything(),
        left_out=UNCOMPILED,
        refused={MANUAL: "needs automatic optimization"},
    ),
    Row(
        "memory_budget_parts",
        lambda _: SplitsEverything(),
        refused={MANUAL: "needs automatic optimization"},
        **IN_PARTS,
    ),
    Row(
        "memory_budget_ddp",
        lambda ddp: MemoryBudgetDDPStrategy(**ddp) if ddp else "memory_budget_ddp",
        only=FEW,
        **BUDGET_DDP,
    ),
    Row(
        "memory_budget_ddp_offload",
        lambda ddp: _OffloadsEverythingOnAllRanks(**ddp),
        only=WIRED,
        soon=True,
        **BUDGET_DDP,
    ),
    Row("memory_budget_ddp_parts", lambda ddp: SplitsEverythingOnAllRanks(**ddp), only=FEW, **BUDGET_DDP, **IN_PARTS),
    Row(
        "ooo_ddp",
        lambda ddp: OOODataParallelStrategy(**ddp) if ddp else "ooo_ddp",
        only=WIRED,
        **OUT_OF_ORDER,
        report=_of_strategy,
    ),
    Row(
        "ooo_ddp_one_block",
        _one_block,
        warned=frozenset({MANUAL, UNUSED}),
        only=FEW,
        **OUT_OF_ORDER,
        report=_of_strategy,
    ),
    Row(
        "ooo_ddp_all_blocks",
        _all_blocks,
        warned=frozenset({MANUAL, UNUSED}),
        only=LAYERS,
        soon=True,
        **OUT_OF_ORDER,
        report=_of_strategy,
    ),
    Row(
        "ooo_ddp_waiting",
        lambda ddp: OOODataParallelStrategy(k=1, cross_iteration=False, **ddp),
        plain="ddp",
        refused={SPARSE: "sparse"},
        only=FEW,
    ),
    Row(
        "cpu_accumulate_ddp",
        lambda ddp: _AddsUpOnHost(**ddp),
        plain="ddp",
        refused={SPARSE: "sparse"},
        only=(*FEW, "fit_", "exception_", "evaluate_", "resume_mid"),
    ),
    Row(
        "cpu_accumulate_ddp_update_on_host",
        lambda ddp: _AddsUpOnHost(update_on_host=True, **ddp),
        plain="ddp",
        only=STATES,
        soon=True,
        unfused=frozenset({LBFGS, CUSTOM_OPTIMIZER, STEP_HOOK}),
        refused={SPARSE: "sparse", STATE_DICT: "a part of the optimizer's state only"},
        left_out={
            "optimizer_state_logged": "trace",  # of each rank's part
            # What a callback sees that makes a checkpoint on all ranks: only the first has the state, to write it.
            "exception_in_training_step": "checkpoint",
            "exception_inside_a_window": "checkpoint",
            "exception_after_a_batch": "checkpoint",
            "exception_in_validation": "checkpoint",
        },
        report=_of_update,
    ),
    Row(
        "fused_optimizer_ddp_on_host",
        lambda ddp: FusedOptimizerDDPStrategy(reduce_on="host", **ddp),
        plain="ddp",
        **(DDP_BACKWARD | {"unfused": IN_BACKWARD | {ALIASES, BACKWARD_HOOK}}),
        refused={SPARSE: "sparse"},
        report=_of_strategy,
        only=FEW,
    ),
    Row(
        "ddp_forward_on_host",
        lambda ddp: FusedOptimizerDDPStrategy(mode="forward", reduce_on="host", **ddp),
        plain="ddp",
        **FORWARD,
        refused={SPARSE: "sparse"},
        report=_of_strategy,
        only=FEW,
    ),
    Row(
        "memory_budget_ddp_on_host",
        lambda ddp: MemoryBudgetDDPStrategy(reduce_on="host", **ddp),
        plain="ddp",
        refused={**BUDGET_DDP["refused"], SPARSE: "sparse"},
        only=FEW,
    ),
    Row("ooo_pipeline", in_stages(microbatches=2), **PIPELINE),
    Row(
        "ooo_pipeline_of_single_samples",
        in_stages(schedule="1f1b"),
        only=("clip_by", "checkpoint_", "optimizer_adam", "precision_b"),
        **PIPELINE,
    ),
    Row(
        "ooo_ddp_on_host",
        lambda ddp: OOODataParallelStrategy(k=1, reduce_on="host", **ddp),
        **OUT_OF_ORDER,
        warned=frozenset({MANUAL, UNUSED}),
        report=_of_strategy,
        only=FEW,
    ),
]
