"""What the table asks of pipelines: where one refuses, what is told to differ, and which scenarios cannot apply."""

from datetime import timedelta
from typing import Any

from contract.in_stages import InStages, OneRankIsWrong
from contract.traits import CUSTOM_OPTIMIZER, LBFGS, MANUAL, SCALER, SPARSE
from support.time_limits import limit_s

NO_LIST = "no Sequential or ModuleList of 2 layers"
TWICE = "a second time: a pipeline needs each layer once"
BEFORE = "before 'net.*: a pipeline needs each layer once, in the order of the list"
AVERAGES = "averages all weights on each rank"
KEEPS_STATE = "training_step keeps a state of its own"
ON_GRADIENTS = "has a hook that runs when a gradient has been accumulated"
FROZEN = "were frozen or thawed, or have joined, while training goes on"

READS_ALL = "between two batches it reads weights of all layers at once; each rank has its own, and NaN for others"
OTHER_ORDER = "the second epoch's order is drawn from random numbers of which micro-batches have had others"

SEE_GRADIENTS = (
    "hook_before_optimizer_step",
    "hook_after_backward",
    "hook_before_zero_grad",
    "hook_clip_gradients",
    "hook_configure_gradient_clipping",
    "callback_after_backward",
    "callback_before_optimizer_step",
    "tensor_hooks",
)
"""Scenarios whose hooks see the gradients of one rank's layers, or of a micro-batch, as a warning says."""

CUT_UNASKED = ("parameters_tied", "recurrent_network", "channels_last", "attention")
"""Scenarios whose models have no list of layers, and are cut between their calls, as a warning says."""

REFUSED = {
    MANUAL: "needs automatic optimization",
    SCALER: "does not scale losses",
    SPARSE: NO_LIST,
    LBFGS: "LBFGS needs all parameters and gradients at once",
    "ema_of_lightning": AVERAGES,
    "averaging_of_lightning": AVERAGES,
    "stochastic_weight_averaging": AVERAGES,
    "target_network": KEEPS_STATE,
    "compiled_calls_of_a_submodule": "a compiled model cannot be cut",
    "compiled_calls_of_a_module_in_place": "a compiled model cannot be cut",
    "compiled_module": "a compiled model cannot be cut",
    "compiled_submodule": "a compiled model cannot be cut",
    "constants_are_class_weights": "is a mean by class weights",
    "constants_that_steps_count_in": KEEPS_STATE,
    "inference_between_batches": "was called outside of the step",
    "inference_in_training_step": TWICE,
    "no_grad_forward_in_training_step": TWICE,
    "hook_backward": r"cannot call the module's own backward\(\)",
    "fit_after_an_exception": "lies on another rank, since training over ranks that ended with an exception",
    "groups_added_later": FROZEN,
    "network_grows": FROZEN,
    "parameters_thawed_late": FROZEN,
    "parameters_unused": NO_LIST,
    "parameters_unused_with_accumulation": NO_LIST,
    "module_called_three_times": NO_LIST,
    "activation_checkpointing": TWICE,
    "weights_in_the_loss": BEFORE,
    "weight_read_late_in_backward": BEFORE,
    "gradient_penalty": "training_step differentiates by itself",
    "two_forwards_one_loss": TWICE,
    "accumulation_hooks_before_the_fit": ON_GRADIENTS,
    "accumulation_hooks_at_train_start": ON_GRADIENTS,
    "accumulation_hooks_mid_run": ON_GRADIENTS,
    "template_segmentation": "what 'net.first' gives goes past the next layer to 'net.merge'",
    "template_finetuning": FROZEN,
}
LEFT_OUT = {
    # What shares memory with a parameter before the first batch is what it was then, where others have the parameter.
    "weights_copied_at_epoch_end": "copies",
    "ema_through_aliases": "average",
    "weights_shared_with_numpy": "trace",
    # The optimizer has each rank's own state after the fit.
    "bare_loop_after_fit": "stepped",
    "compiled_calls_of_a_loss_function": "compiled",  # once a micro-batch, on the rank of the last stage
    # training_step runs in the backward pass, behind zero_grad, which checkpoints count.
    "hook_before_zero_grad": "trace",
    "exception_in_training_step": "checkpoint",
}
CANNOT = {
    "weight_norm_logged_each_batch": READS_ALL,
    "weight_norm_logged_each_epoch": READS_ALL,
    "shuffled_data": OTHER_ORDER,
    "batch_norm_dropout_weight_norm": "BatchNorm sees micro-batches and dropout draws other masks; two warnings tell",
    "optimizer_subclass_with_own_step": "its updates depend on each other; a warning tells that nobody can know",
}

PIPELINE: dict[str, Any] = {
    "plain": "pipeline",
    "report": lambda trainer: trainer.strategy.activity(),
    "tolerance": 1e-6,
    "looser": {
        "attention": 1e-2,  # its LayerNorms have two features, so gradients are rounding, which Adam scales up
        "optimizer_rmsprop": 1e-4,
        "optimizer_muon": 3e-3,  # computes in bfloat16
        "precision_64_true": 1e-5,
        "precision_bf16_true": 1e-2,
        "precision_": 3e-3,
    },
    # Lightning's sampler for several processes shuffles what trains; so all ranks see the loader's own order.
    "trainer": {"use_distributed_sampler": False},
    "refused": REFUSED,
    "left_out": LEFT_OUT,
    "cannot": CANNOT,
    "warned": frozenset({CUSTOM_OPTIMIZER, "deterministic_twice", *SEE_GRADIENTS, *CUT_UNASKED}),
}


def in_stages(**options: Any) -> Any:
    """For `Row.strategy`."""
    return lambda _: InStages(timeout=timedelta(seconds=limit_s(25)), **options)


def wrong_on_one_rank(_: Any) -> OneRankIsWrong:
    """For a row that has to fail."""
    return OneRankIsWrong(timeout=timedelta(seconds=limit_s(25)), microbatches=2)
