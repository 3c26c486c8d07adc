"""Out-of-order pipeline parallel as a Lightning strategy (Oh et al. 2022, section 5.2)."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from datetime import timedelta
from typing import Annotated, Any, Literal

import torch
import torch.distributed as dist
from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment
from lightning.fabric.utilities import move_data_to_device
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.plugins import Precision
from lightning.pytorch.trainer.states import TrainerFn
from lightning_utilities.core.apply_func import apply_to_collection
from lightning_utilities.core.rank_zero import rank_zero_info
from torch import Tensor
from torch.optim import Optimizer

from retime.foundations.arguments import AtLeast, Timeout, checked
from retime.foundations.compatibility import Mechanism
from retime.foundations.messages import parse_bytes, warn_no_effect
from retime.foundations.parts import combined
from retime.mechanisms.pipeline import (
    DeferredInitModel,
    LossWeight,
    Ownership,
    PipelineReport,
    PipelineStep,
    broadcast_state,
    check_optimizer,
    check_schedule,
    find_layers,
    forget_absent,
    is_on_meta,
    load_into_meta,
    make_groups,
    messages_of_group,
    needed_loss,
    refuse_part_of_model,
    sizes_of,
    warn_of_parts,
    whole_loss,
    whole_model_state,
    whole_optimizer_state,
)
from retime.schedules.timeline import Span
from retime.strategies.support.base import LightningOnly, ReportsAcrossProcesses, StartMethod, without_none
from retime.strategies.support.budgeted_steps import WholeBatchResults, muted_logging
from retime.strategies.support.lightning_private import in_the_loaders_order
from retime.strategies.support.parts_log import LOGGED
from retime.strategies.support.pipeline_hooks import (
    KeptAttributes,
    check_pipeline_fit,
    clipped_by_all,
    left_on_meta,
    metrics_of,
    wants_outputs,
    warn_of_gradient_hooks,
)
from retime.strategies.support.pipeline_log import PipelineLog

Auto = Literal["auto"]
_OTHERS = "others"


class OOOPipelineStrategy(LightningOnly, ReportsAcrossProcesses):
    """Pipeline parallel training of an unmodified module: each rank has some of the layers.

    ``training_step`` runs once per micro-batch on every rank and skips the layers of other ranks; its loss
    code runs on the rank of the last stage. Output gradients run before weight gradients (gradient fast-forwarding,
    section 5.2.1), and layers may be dealt out in turn (modulo allocation). ``training_step`` has to call a
    model with one ``Sequential`` or ``ModuleList`` that holds most of the parameters and whose entries run once each,
    in order (an ``nn.Sequential``, transformers' GPT-2, BERT or Llama), or, without such a list, modules that are
    called once each, in the same order in training and evaluation (``self.fc1``, ``self.fc2``).

    The first batch runs whole on each rank, and changes nothing, to see what layers pass to each other. Each rank needs
    memory for the whole model until then, unless the parameters are on the meta device (``configure_model`` under
    ``torch.device("meta")``): there each layer has values only while it runs, from its ``reset_parameters()`` or the
    ``_init_weights(module)`` of a module around it, or all from ``ckpt_path``, and after the fit each rank keeps its
    own layers.

    Gradients equal those of one device up to rounding. Dropout draws other masks and BatchNorm sees micro-batches, with
    a ``DifferenceWarning``. Checkpoints are one file, as of a plain Trainer: all ranks call ``save_checkpoint``.
    Validation during the fit runs over the ranks too. After the fit the module is whole on all ranks, and the
    optimizer's state is each rank's own. During the fit a rank has its own layers: parameters of others are NaN, have
    no gradient, and writes into them are dropped. A training loader without ``shuffle`` keeps its order if
    there is one pipeline.

    Args:
        pipeline_parallel_size: ranks that share one model; ``"auto"``: the number of ranks over ``data_parallel_size``.
        data_parallel_size: pipelines, each with its own batches; ``"auto"``: 1, or the number of ranks over
            ``pipeline_parallel_size``.
        schedule: ``"ooo2"`` (both of the paper's), ``"ooo1"`` (fast-forwarding alone), each also with ``"_flush"`` as
            in the paper's figures, ``"ooo_v"`` (fast-forwarding with ZBV's placement), ``"ooo"`` (of these the
            shortest in simulation, for layers of different lengths and slow links), ``"gpipe"``, ``"1f1b"``,
            ``"zb_h1"``, ``"zbv"``, ``"interleaved"``, ``"interleaved_zero_bubble"``, or one of torch's by its name,
            such as ``"LoopedBFS"`` or ``"ScheduleDualPipeV"``.
        microbatches: of each batch; ``"auto"``: two for each rank of the pipeline.
        layers: path of the list of layers in the module; None: the list is found, and if there is none, the
            modules that ``training_step`` calls are the layers, with a warning; ``"auto"``: without the warning.
        group: layers per stage in schedules that deal them out in turn; ``"auto"``: one or two stages per rank, or with
            ``split="fastest"`` those that give the shortest step, simulated from measured times.
        activation_cap: bytes (or ``"2GiB"``) of activations that a rank may keep, for the ``ooo`` schedules.
        split: how layers become stages: ``"even"``: each rank has as equal a share of the parameters' bytes as whole
            layers allow, the same in every run; ``"fastest"``: by measured times, in as many stages as give the
            shortest simulated step; or the name of each stage's first layer, ``["net.0", "net.4"]``.
        loss_weight: what ``training_step`` divides its sum by, if its operations do not show it: ``"samples"``,
            ``"sum"`` (nothing), or a function from a batch to a number, called with the whole batch and with each
            micro-batch, whose loss is weighted by ``loss_weight(micro_batch) / loss_weight(batch)``.
        timeout: how long a rank waits for a message of another.

    All other arguments are those of :class:`lightning.pytorch.strategies.DDPStrategy`. With one process it trains as
    plain Lightning does, with one ``NoEffectWarning``.

    Raises:
        ValueError: sizes that do not fit the number of processes, or an unknown schedule.
    """

    strategy_name = "ooo_pipeline"
    mechanisms = (Mechanism.PIPELINE,)

    @checked
    def __init__(
        self,
        pipeline_parallel_size: Annotated[int, AtLeast(1)] | Auto = "auto",
        data_parallel_size: Annotated[int, AtLeast(1)] | Auto = "auto",
        schedule: str = "ooo2",
        microbatches: Annotated[int, AtLeast(1)] | Auto = "auto",
        layers: str | None = None,
        group: Annotated[int, AtLeast(1)] | Auto = "auto",
        activation_cap: int | str | None = None,
        split: Literal["even", "fastest"] | list[str] = "even",
        loss_weight: LossWeight | None = None,
        timeout: Timeout = timedelta(seconds=60),
        process_group_backend: str | None = None,
        start_method: StartMethod = "popen",
        accelerator: Accelerator | str | None = None,
        parallel_devices: list[Any] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
    ) -> None:
        check_schedule(schedule)
        super().__init__(
            **without_none(
                process_group_backend=process_group_backend,
                start_method=start_method,
                accelerator=accelerator,
                parallel_devices=parallel_devices,
                cluster_environment=cluster_environment,
                checkpoint_io=checkpoint_io,
                precision_plugin=precision_plugin,
            )
        )
        self._sizes = pipeline_parallel_size, data_parallel_size
        self._wanted: dict[str, Any] = {
            "schedule": schedule,
            "layers": layers,
            "layers_per_stage": group,
            "loss_weight": loss_weight,
            "activation_cap": None if activation_cap is None else parse_bytes("activation_cap", activation_cap),
            "split": split,
        }
        self._microbatches, self._message_timeout = microbatches, timeout
        self._step: PipelineStep | None = None
        self._log: PipelineLog | None = None
        self._kept: KeptAttributes | None = None
        self._wants_outputs = False
        self._results: WholeBatchResults | None = None
        self._now: tuple[tuple[Any, ...], dict[str, Any]] | None = None
        self._data_group: Any = None
        self._without_values: set[Tensor] = set()
        self._whole_outside = ExitStack()
        self._for_fit = ExitStack()
        self._owners_before: Ownership | None = None
        self._last_report: PipelineReport = PipelineReport()

    def __getstate__(self) -> dict[str, Any]:
        """A copy, made in the middle of a fit too, has the report; its pipeline begins with its own fit."""
        gone = ("_step", "_log", "_kept", "_results", "_now", "_data_group", "_owners_before")
        kept = {
            "_last_report": self.report(),
            "_without_values": set(),
            "_whole_outside": ExitStack(),
            "_for_fit": ExitStack(),
        }
        return super().__getstate__() | dict.fromkeys(gone) | kept

    # Setting up

    def setup(self, trainer: Trainer) -> None:
        module = self.lightning_module
        assert module is not None
        fitting = trainer.state.fn == TrainerFn.FITTING
        if fitting and self.world_size > 1:
            check_pipeline_fit(module, trainer, self.precision_plugin)
            pipeline, _ = sizes_of(self.world_size, *self._sizes)
            if pipeline > 1:  # before ranks speak to each other, so that all of them end with the same error
                find_layers(module, self._wanted["layers"], pipeline)
        hollow = self._off_the_meta_device(module, fitting)
        if fitting and self.world_size > 1 and sizes_of(self.world_size, *self._sizes)[1] == 1:
            self._for_fit.enter_context(in_the_loaders_order(trainer))  # before an optimizer asks for the steps to come
        super().setup(trainer)
        if not fitting:
            return
        self._owners_before = None
        pipeline, data = sizes_of(self.world_size, *self._sizes)
        if pipeline == 1:
            warn_no_effect(f"strategy={self.strategy_name!r} has no effect: a pipeline needs two ranks or more")
            if data == 1:
                return
        if pipeline > 1:
            for one in self.optimizers:
                check_optimizer(one, module)
        pipeline_group, self._data_group = make_groups(pipeline, data, self._message_timeout)
        warn_of_parts(module, 2 if self._microbatches == "auto" else self._microbatches)
        if pipeline > 1:
            warn_of_gradient_hooks(module, trainer)
            groups = f", {data} of them," if data > 1 else ""
            how = f"by {self._wanted['schedule']}, micro-batches: {self._microbatches}"
            rank_zero_info(f"retime: pipeline of {pipeline} ranks{groups} {how}")
        self._step = PipelineStep(
            module,
            group=pipeline_group,
            data_group=self._data_group,
            microbatches=self._microbatches,
            quiet=lambda: self._tried_out(trainer),
            hollow=hollow,
            **self._wanted,
        )
        self._log, self._kept = PipelineLog(module), KeptAttributes(module)
        self._wants_outputs = wants_outputs(module, trainer)
        self._results = WholeBatchResults(trainer)
        self._for_fit.enter_context(clipped_by_all(self.precision_plugin, self._step))
        self._for_fit.enter_context(metrics_of(module, self._data_group))

    def _off_the_meta_device(self, module: LightningModule, fitting: bool) -> DeferredInitModel | None:
        """A module that was built there has parameters from now on; on several ranks they have no memory yet."""
        if not is_on_meta(module):
            return None
        if not fitting:
            raise ValueError(
                "parameters are on the meta device, and only a fit gives them values: give a ckpt_path, or build the "
                "module with values"
            )
        hollow = DeferredInitModel(module, self.root_device, self.broadcast(torch.initial_seed() % 2**63))
        pipeline, _ = sizes_of(self.world_size, *self._sizes)
        if pipeline > 1:
            self._without_values = set(hollow.parameters)
            return hollow
        hollow.fill(module)
        return None

    def configure_ddp(self) -> None:
        """No wrapper: all ranks begin with the values of the first."""
        if self.world_size > 1:
            assert self.model is not None
            broadcast_state(self.model, self._without_values)  # those are given the same by all

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        module = self.lightning_module
        if self.world_size < 2 or module is None or module.trainer.state.fn != TrainerFn.FITTING:
            return super().distributed_sampler_kwargs
        pipeline, data = sizes_of(self.world_size, *self._sizes)
        return {"num_replicas": data, "rank": self.global_rank // pipeline}

    # Steps

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        if self._step is None or not torch.is_grad_enabled():
            return super().training_step(*args, **kwargs)
        self._now = args, kwargs
        return torch.zeros((), device=self.root_device, requires_grad=True)  # the loss is known after backward

    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        if self._step is None or self._now is None:
            return super().backward(closure_loss, optimizer, *args, **kwargs)
        (batch, *rest), options = self._now
        self._now = None
        assert self._log is not None
        assert self._results is not None
        module, log, plain = self.lightning_module, self._log, super().training_step
        assert module is not None
        trainer = module.trainer

        def step(part: Any) -> dict[str, Any]:
            with log.micro_batch() as calls, nullcontext() if kept is None else kept.noticing():
                output = plain(part, *rest, **options)
            return {"loss": needed_loss(output), LOGGED: calls, _OTHERS: self._others(output)}

        kept = None if self._step.is_spread else self._kept
        with log.batch():
            results = self._step.train(step, batch, divide_by=trainer.accumulate_grad_batches)
        look = self._step.take_first_look()
        if look is not None:
            log.look(look, self._step.loss_weights)
        outcome = None
        if results:
            calls, weights = [one.output[LOGGED] for one in results], [one.weight for one in results]
            loss = whole_loss(results).to(results[0].output["loss"].dtype).cpu()
            others = combined(
                [one.output[_OTHERS] for one in results], [one.samples for one in results], lambda _: weights
            )
            logged = log.collected(calls, weights, [one.samples for one in results])
            outcome = loss, logged, move_data_to_device(others, torch.device("cpu"))
        whole, logged, others = self._step.tell(outcome)
        loss = whole.to(self.root_device)
        divided: Tensor = loss / trainer.accumulate_grad_batches
        self.pre_backward(divided)
        self.precision_plugin.pre_backward(divided, module)
        self.precision_plugin.post_backward(divided, module)
        self.post_backward(divided)
        log.publish(logged, changed_here=bool(results))
        if kept is not None:
            self._look_at_first(self._step, log, kept)
        self._results.put(move_data_to_device(others, self.root_device), loss, trainer.accumulate_grad_batches)
        return divided

    def _others(self, output: Any) -> dict[str, Any]:
        """Values that a step returns beside its loss, if a hook may look at them."""
        if not self._wants_outputs or not isinstance(output, Mapping):
            return {}
        others = {key: value for key, value in output.items() if key != "loss"}
        return apply_to_collection(others, Tensor, Tensor.detach)  # type: ignore[no-any-return]

    @contextmanager
    def _tried_out(self, trainer: Trainer) -> Iterator[None]:
        """Context in which a run logs nothing, and says what it would have."""
        assert self._log is not None
        assert self._kept is not None
        with muted_logging(trainer, self._kept.note_logger), self._log.batch():
            yield

    def _look_at_first(self, step: PipelineStep, log: PipelineLog, kept: KeptAttributes) -> None:
        """Say behind the first batch what micro-batches change, as far as it was seen."""
        for one in self.optimizers:
            forget_absent(one, step.owners)
        kept.warn()
        if step.microbatches > 1:
            log.warn_of_aggregates()

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        with nullcontext() if self._step is None else self._step.evaluating():
            return super().validation_step(*args, **kwargs)

    def on_validation_start(self) -> None:
        super().on_validation_start()
        if self._step is not None:
            self._whole_outside.enter_context(self._step.outside_whole())

    def on_validation_end(self) -> None:
        self._whole_outside.close()
        super().on_validation_end()

    # Between ranks

    def reduce(self, tensor: Tensor, group: Any | None = None, reduce_op: Any = "mean") -> Tensor:
        """Over the data parallel ranks: those of a pipeline have the same values."""
        if self._step is None or group is not None:
            return super().reduce(tensor, group, reduce_op)
        return tensor if self._data_group is None else super().reduce(tensor, self._data_group, reduce_op)

    def all_gather(self, tensor: Tensor, group: Any | None = None, sync_grads: bool = False) -> Tensor:
        """Gather from the data parallel ranks."""
        if self._step is None or group is not None:
            return super().all_gather(tensor, group, sync_grads)
        return tensor if self._data_group is None else super().all_gather(tensor, self._data_group, sync_grads)

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Reduce a decision over all ranks."""
        counted = torch.tensor(int(decision), device=self.root_device)
        if dist.is_initialized():
            dist.all_reduce(counted)
        return int(counted) == self.world_size if all else int(counted) > 0

    def barrier(self, *args: Any, **kwargs: Any) -> None:
        """Wait for all ranks, as behind a checkpoint that the first one writes."""
        with nullcontext() if self._step is None else messages_of_group(None):
            super().barrier(*args, **kwargs)

    # Checkpoints

    def lightning_module_state_dict(self) -> dict[str, Any]:
        if self._step is not None and not self._step.is_spread:
            with self._step.whole():  # layers may have values only while they run
                return super().lightning_module_state_dict()
        module, owners, state = self.lightning_module, self._owners, super().lightning_module_state_dict()
        if module is None:
            return state
        if owners is None:
            refuse_part_of_model(module)
            return state
        return whole_model_state(module, state, owners)

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        state = super().optimizer_state(optimizer)
        if self._owners is None:
            return state
        return whole_optimizer_state(getattr(optimizer, "optimizer", optimizer), state, self._owners)

    @property
    def _owners(self) -> Ownership | None:
        """Owner of each parameter, in a fit, or in the last one; None: all ranks have the whole."""
        if self._step is None:
            return self._owners_before
        return self._step.owners if self._step.is_spread else None

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Load in the middle of a fit too, as tuners do; meta parameters become those of the checkpoint."""
        assert self.lightning_module is not None
        if is_on_meta(self.lightning_module):
            load_into_meta(self.lightning_module, checkpoint["state_dict"], strict)
            return
        if self._step is not None and not self._step.is_spread and self._without_values:
            raise ValueError("a model built on the meta device is loaded before training: use fit(ckpt_path=...)")
        with nullcontext() if self._step is None else self._step.whole():
            super().load_model_state_dict(checkpoint, strict)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        super().load_optimizer_state_dict(checkpoint)
        if self._step is not None and self._step.is_spread:
            for one in self.optimizers:
                forget_absent(one, self._step.owners)

    def teardown(self) -> None:
        step, self._step = self._step, None
        self._whole_outside.close()
        self._for_fit.close()
        if self._results is not None:
            self._results.remove()
            self._results = None
        if step is not None:
            self._last_report = step.report()
            if sys.exc_info()[0] is None or self._ended_by_tuner():
                self._owners_before = step.owners if step.is_spread else None
                step.restore()
            else:
                step.remove()
            if self._last_report.steps:
                rank_zero_info(f"retime: {self._last_report.headline}")
        self._log = self._kept = self._data_group = None
        self._without_values = set()
        with left_on_meta(self.lightning_module):
            super().teardown()

    def _ended_by_tuner(self) -> bool:
        """Lightning's tuners leave a fit by an exception, on all ranks at once, and no other leaves it running."""
        module = self.lightning_module
        return module is not None and not module.trainer.interrupted

    def timeline(self) -> list[Span] | None:
        """Spans of all ranks of this rank's pipeline in the last step, on its first rank; all ranks call this."""
        return None if self._step is None else self._step.timeline()

    def report(self) -> PipelineReport:
        """Report of what this rank did so far."""
        return self._last_report if self._step is None else self._step.report()
