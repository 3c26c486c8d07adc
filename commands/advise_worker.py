"""What `retime advise` runs in processes of their own: the user's model in a Trainer, by one method, in turns.

A process builds the job from its reference again, so that each method has threads, an allocator and a peak of its own.
It is in the middle of a fit while it waits for the next request (:class:`Turns`).
"""

from __future__ import annotations

import argparse
import os
import resource
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from time import perf_counter
from typing import Any

import psutil
import torch
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer, strategies
from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.loggers.logger import DummyLogger
from torch import nn

import retime
from retime.callbacks.support.phases import StrategyPhases
from retime.commands.errors import one_line
from retime.commands.job import Supervised, given_by, job_of, module_of, quiet
from retime.foundations.measure import MemoryProbe, StepTimer, layer_times
from retime.foundations.messages import DifferenceWarning, NoEffectWarning, show_bytes, warn_no_effect
from retime.foundations.parts import samples_in
from retime.foundations.storages import strided_bytes
from retime.foundations.torch_private.engine import tree_leaves, tree_map
from retime.foundations.workers import keep_heap, next_request, touch_libraries
from retime.mechanisms.memory_budget import parse_budget

_MANY = 10**6
"""Batches that the loader says to have; a fit is ended from outside."""
FIRST_STEPS = 2
DDP_BUCKET_MB = 25
"""Of a `ddp` that is told nothing."""


@dataclass(frozen=True)
class Method:
    """One way to train, as it is given to a Trainer and as it is written.

    Args:
        result: what it promises beside the plain step.
        strategy: a registered name, or a class of `retime`.
        arguments: of that class.
        callback: a class of `retime`, or of this file.
        before: what a Lightning user writes before the Trainer, in place of that callback.
        bare: what to write in a bare loop.
        accelerate: what to write with Accelerate; empty where there is nothing.
        ranks: whether it needs several processes.
        over_ddp: whether it is compared with `ddp`, which has as many batches a step.
        warm_steps: after which it has settled.
        own_memory: it brings an allocator of its own, so the process is not told to keep its heap.
        all_cores: it divides them itself.
    """

    result: str
    strategy: str = "auto"
    arguments: dict[str, Any] = field(default_factory=dict)
    callback: str = ""
    before: str = ""
    bare: str = ""
    accelerate: str = ""
    ranks: bool = False
    over_ddp: bool = False
    warm_steps: int = 6
    own_memory: bool = False
    all_cores: bool = False

    def trainer(self, devices: int, more: dict[str, Any]) -> str:
        """The line that gives it to a Trainer, which has more arguments."""
        parts = []
        if self.strategy != "auto":
            named = ", ".join(f"{name}={value!r}" for name, value in self.arguments.items())
            strategy = f"retime.{self.strategy}({named})"
            parts.append(f"strategy={strategy if self.strategy[0].isupper() else repr(self.strategy)}")
        parts += [f"devices={devices}"] if self.ranks else []
        parts += [f"callbacks=[retime.{self.callback}()]"] if self.callback and not self.before else []
        parts += [f"{name}={value!r}" for name, value in more.items()]
        return f"{self.before}Trainer({', '.join(parts)})"

    def options(self) -> dict[str, Any]:
        """The Trainer's arguments."""
        is_class = self.strategy[0].isupper()
        home = strategies if hasattr(strategies, self.strategy) else retime
        kinds = {**vars(retime), ScanChains.__name__: ScanChains}
        return {
            "strategy": getattr(home, self.strategy)(**self.arguments) if is_class else self.strategy,
            "callbacks": [kinds[self.callback]()] if self.callback else [],
        }


_ACCELERATE, _ON_HOST = "retime.integrations.accelerate", "retime.mechanisms.cpu_accumulation"
_BUDGETS = "retime.mechanisms.memory_budget"
_HOST_SUMS = f"{_ON_HOST}.BucketReduction(model, {_ON_HOST}.HostReducer())"
_SAME, _AT_THREADS, _ROUNDING, _LIKE_DDP = "same bits", "bits of n threads", "rounding", "as 2-rank ddp"
_OF_RANKS: dict[str, Any] = {"ranks": True, "over_ddp": True}
_SEARCHED: dict[str, Any] = {"warm_steps": 40, "all_cores": True}
"""Of two streams: a search and its profile take 38 steps, and the next one begins by ending it."""


def _fused(result: str, strategy: str, mode: str, **more: Any) -> Method:
    accelerate = f'{_ACCELERATE}.FusedOptimizer(accelerator, model, optimizer, mode="{mode}")'
    bare = f'retime.fuse_optimizer(model, optimizer, mode="{mode}")'
    bare += "  # model in DistributedDataParallel" if more else ""
    return Method(result, strategy, bare=bare, accelerate=accelerate, **more)


def _alike(text: str, **more: Any) -> Method:
    """A callback whose line is the same in a bare loop and with Accelerate."""
    return Method(bare=text, accelerate=text, **more)


METHODS: dict[str, Method] = {
    "fused_optimizer": _fused(_SAME, "fused_optimizer", "backward"),
    "fused_optimizer_forward": _fused(_SAME, "fused_optimizer_forward", "forward"),
    "ooo_single_device": Method(
        _AT_THREADS,
        "ooo_single_device",
        bare="retime.mechanisms.two_streams.TwoStreamBackward(model)",
        accelerate=f"{_ACCELERATE}.TwoStreams(accelerator, model)",
        **_SEARCHED,
    ),
    "ooo_single_device + updates": Method(
        _AT_THREADS,
        "OOOSingleDeviceStrategy",
        {"fuse_updates": True},
        bare="retime.mechanisms.two_streams.TwoStreamBackward(model, optimizer=optimizer)",
        **_SEARCHED,
    ),
    "CPUMemoryPool": _alike(
        "with retime.CPUMemoryPool():  # around the loop", result=_SAME, callback="CPUMemoryPool", own_memory=True
    ),
    "convert (scan modules)": _alike("retime.convert(model)", result=_ROUNDING, callback="ParallelScanBackward"),
    "ooo_pipeline": Method(
        _ROUNDING,
        "ooo_pipeline",
        bare="retime.mechanisms.pipeline.PipelineStep(model, microbatches=4)",
        accelerate=f"{_ACCELERATE}.OutOfOrderPipeline(accelerator, model, optimizer)",
        ranks=True,
        warm_steps=10,
    ),
    "fused_optimizer_ddp": _fused("as ddp", "fused_optimizer_ddp", "backward", **_OF_RANKS),
    "cpu_accumulate_ddp": Method(
        _LIKE_DDP,
        "cpu_accumulate_ddp",
        bare=_HOST_SUMS,
        accelerate=f"{_ACCELERATE}.CPUAccumulate(accelerator, model)",
        **_OF_RANKS,
    ),
    "cpu_accumulate_ddp + updates": Method(
        _LIKE_DDP,
        "CPUAccumulateStrategy",
        {"update_on_host": True},
        bare=f"reduction = {_HOST_SUMS}; {_ON_HOST}.HostUpdate(optimizer, reduction.parameters)",
        **_OF_RANKS,
    ),
    "ooo_ddp": Method(
        _LIKE_DDP,
        "ooo_ddp",
        bare="retime.mechanisms.out_of_order.OutOfOrderDataParallel(model, optimizer)",
        accelerate=f"{_ACCELERATE}.OutOfOrderDataParallel(accelerator, model, optimizer)",
        **_OF_RANKS,
        warm_steps=64,
    ),
}
PLAIN, DDP = Method(_SAME), Method("more batches", "ddp", ranks=True)


def ddp(bucket_cap_mb: int) -> Method:
    """`ddp` with buckets of so many MiB, and of which gradients are views, as those of `ooo_ddp` are."""
    arguments = {"bucket_cap_mb": bucket_cap_mb, "gradient_as_bucket_view": True}
    return replace(DDP, strategy="DDPStrategy", arguments=arguments)


def memory_budget(budget_bytes: int) -> Method:
    """The method for so many bytes."""
    return Method(
        "rounding if split",
        "MemoryBudgetStrategy",
        {"budget": budget_bytes},
        bare=f'{_BUDGETS}.BudgetedStep(model, [optimizer], {budget_bytes}, {_BUDGETS}.parse_host(None, "cpu"))',
        accelerate=f"{_ACCELERATE}.MemoryBudget(accelerator, model, optimizer, {budget_bytes})",
        own_memory=True,
    )


def memory_budget_ddp(budget_bytes: int) -> Method:
    """The method for so many bytes of each rank."""
    one = memory_budget(budget_bytes)
    bare = one.bare.replace("BudgetedStep", "BudgetedDataParallelStep")
    return replace(one, strategy="MemoryBudgetDDPStrategy", bare=bare, **_OF_RANKS)


def scan_sequential(names: Sequence[str]) -> Method:
    """The method for chains of these names, of which the model itself is ""."""
    swap = "model.set_submodule({0!r}, retime.ScanSequential.of(model.get_submodule({0!r})))"
    bare = "; ".join(swap.format(one) if one else "model = retime.ScanSequential.of(model)" for one in names)
    return _alike(bare, result=_ROUNDING, callback="ScanChains", before=f"{bare}; ")


NAMES = (*METHODS, "ScanSequential", "memory_budget", "memory_budget_ddp")
"""Of all methods; those of budgets are tried with some."""


def methods_for(peak_bytes: int, memory_bytes: int | None, chains: Sequence[str]) -> dict[str, Method]:
    """Return all methods by name: budgets are shares of the plain step's peak, or the memory that there is."""
    budgets = {f"{share} % of peak": max(1, peak_bytes * share // 100) for share in (50, 25)}
    budgets = budgets if memory_bytes is None else {"--memory": memory_bytes}
    name, size = next(iter(budgets.items()))
    return {
        **METHODS,
        "ScanSequential": scan_sequential(chains),
        **{f"memory_budget, {name}": memory_budget(size) for name, size in budgets.items()},
        f"memory_budget_ddp, {name.removesuffix(' of peak')}": memory_budget_ddp(size),
    }


def chains_in(model: nn.Module) -> dict[str, nn.Sequential]:
    """Each torch.nn.Sequential that is no layer of another one, by name."""
    found = {name: one for name, one in model.named_modules() if type(one) is nn.Sequential}
    return {name: one for name, one in found.items() if not name or name.rpartition(".")[0] not in found}


class ScanChains(Callback):
    """Lets all chains of a module run as a `ScanSequential`, in half of the memory that is free. Cannot be undone."""

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._scans = [retime.ScanSequential.of(chain) for chain in chains_in(pl_module).values()]
        for chain, scan in zip(chains_in(pl_module).values(), self._scans, strict=True):
            chain.forward = scan.forward  # type: ignore[method-assign]  # it stays who it is, for those that call it
        self._free = min(parse_budget("50%", "cpu"), psutil.virtual_memory().available // 2)
        most = resource.getrlimit(resource.RLIMIT_DATA)[1]
        resource.setrlimit(resource.RLIMIT_DATA, (psutil.Process().memory_info().data + self._free, most))

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if batch_idx == 0 and not any(scan.report().scanned for scan in self._scans):
            plain = [f"{layer} {why}" for scan in self._scans for layer, why in scan.report().plain.items()]
            why = plain[0] if plain else "no torch.nn.Sequential is called as a whole"
            warn_no_effect(f"ScanSequential has no effect on these steps: {why}")

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        if isinstance(exception, MemoryError) or "can't allocate memory" in str(exception):
            raise MemoryError(
                f"its layers' Jacobians need more than {show_bytes(self._free)}, half of what is free"
            ) from exception

    def report(self) -> str:
        """Return the chains' reports, in one line."""
        return "; ".join(scan.report().one_line for scan in self._scans)


class Turns(Callback):
    """Stops a fit between two steps until the next request comes, and answers with what the steps since took.

    A step is the time from one optimizer step's end to the next one's, so that what a method moves into the next
    forward pass counts.

    `before_bytes` are resident before training, without the model and the batch. `record` is filled with the package's
    warnings meanwhile. The first of the method's callbacks has its report, else the strategy.
    """

    def __init__(
        self,
        before_bytes: int,
        record: list[tuple[str, str]],
        facts: dict[str, Any],
        callbacks: list[Any],
        of_report: Callable[[Any], dict[str, Any]],
    ) -> None:
        self._before_bytes, self._said, self._facts, self._callbacks = before_bytes, record, facts, callbacks
        self._of_report = of_report
        self._steps, self._ms, self._began = FIRST_STEPS, list[float](), 0.0
        self._spans: list[Any] = []
        self._wants_weights = False
        self._timer: StepTimer | None = None
        self._kernels: list[tuple[dict[str, Any], dict[str, Any]]] = []

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        groups = [group for optimizer in trainer.optimizers for group in optimizer.param_groups]
        self._kernels = [(group, {key: group[key] for key in _FUSED if key in group}) for group in groups]
        for schedule in trainer.lr_scheduler_configs:
            schedule.frequency = _MANY + 1  # it may be for fewer steps
        self._watch()
        self._began = perf_counter()

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if self._timer is not None and batch_idx % trainer.accumulate_grad_batches == 0:
            self._timer = StepTimer(pl_module.device)
            self._phases = StrategyPhases(trainer.strategy, self._timer)
        if self._timer is not None:
            self._timer.start()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._timer is not None:
            self._timer.stop()
        if (batch_idx + 1) % trainer.accumulate_grad_batches:
            return
        self._ms.append((perf_counter() - self._began) * 1e3)
        if self._timer is not None:
            self._phases.detach()
            self._spans.append([(one.name, one.start_ms, one.duration_ms) for one in self._timer.timing().spans])
        if len(self._ms) >= self._steps:
            self._turn(trainer)
        self._began = perf_counter()

    def _turn(self, trainer: Trainer) -> None:
        self._probe.stop()
        report = getattr([*self._callbacks, trainer.strategy][0], "report", str)()
        if self._facts:
            names = [type(optimizer).__name__ for optimizer in trainer.optimizers]
            # what torch asks for where an optimizer is made with fused=True
            is_real = all(p.is_floating_point() for group, _ in self._kernels for p in group["params"])
            kinds = [group for group, _ in self._kernels if not group.get("differentiable")]
            has_fused = is_real and any("fused" in group and not group["fused"] for group in kinds)
            self._facts |= {"optimizers": names, "has_fused": has_fused}
        weights = {"weights": _weights(trainer)} if self._wants_weights else {}
        request = next_request(
            {
                "ms": self._ms,
                "peak_bytes": max(0, self._probe.peaks()["batch"] - self._before_bytes),
                "said": list(self._said),
                "report": str(report or ""),
                "spans": self._spans,
                **self._of_report(report),
                **weights,
                **self._facts,
            }
        )
        if request is None:
            os._exit(0)  # the other side has what it wants; nothing of a fit outlives its process
        self._facts = {}
        self._steps, self._ms, self._spans = request["steps"], [], []
        self._wants_weights = request.get("weights", False)
        self._timer = StepTimer(trainer.strategy.root_device) if request.get("spans") else None
        if "threads" in request:
            torch.set_num_threads(request["threads"])
            for group, before in self._kernels:
                group.update(_FUSED if request["fused"] and "fused" in group else before)
        self._watch()

    def _watch(self) -> None:
        self._probe = MemoryProbe("cpu")
        self._probe.start()


_FUSED = {"fused": True, "foreach": False}


def _weights(trainer: Trainer) -> Any:
    """All weights and buffers in one array, as a checkpoint would have them now; float64 holds each value exactly."""
    state = trainer.strategy.lightning_module_state_dict()  # on all ranks, which may have a part each
    if not trainer.is_global_zero:
        return None
    values = [one.detach().reshape(-1).double() for one in state.values() if isinstance(one, torch.Tensor)]
    return torch.cat(values).numpy()


class _Batches:
    """Batches, over and over. (A list would mean several loaders to Lightning.)"""

    def __init__(self, batches: Sequence[Any]) -> None:
        self._batches = batches

    def __iter__(self) -> Any:
        while True:
            yield from (tree_map(lambda leaf: leaf, batch) for batch in self._batches)  # hooks may change a dict

    def __len__(self) -> int:
        return _MANY


def fit_in_turns(
    module: LightningModule,
    batches: Sequence[Any],
    method: Method,
    *,
    devices: int,
    trainer: dict[str, Any],
    facts: dict[str, Any],
    of_report: Callable[[Any], dict[str, Any]] = lambda report: {},
    data: LightningDataModule | None = None,
) -> None:
    """Train by a method, on the batches over and over; a :class:`Turns` answers from inside.

    Args:
        module: of which nothing was trained yet.
        batches: as a loader gives them.
        method: how to train.
        devices: ranks, of which this process is one.
        trainer: more arguments of the Trainer.
        facts: go with the first answer.
        of_report: what else of the method's report goes with each answer.
        data: where the batches are from, for its hooks.

    Raises:
        RuntimeError: the fit ended by itself.
    """
    tensors = [one for one in tree_leaves(list(batches)) if isinstance(one, torch.Tensor)]
    own_bytes = strided_bytes([*module.parameters(), *module.buffers(), *tensors])
    record: list[tuple[str, str]] = []
    with warnings.catch_warnings():
        _listen(record)
        options = {**method.options(), **trainer}
        turns = Turns(psutil.Process().memory_info().rss - own_bytes, record, facts, [*options["callbacks"]], of_report)
        options["callbacks"].append(turns)
        fit = Trainer(
            accelerator="cpu", devices=devices, max_epochs=1, logger=DummyLogger(), limit_val_batches=0,
            num_sanity_val_steps=0, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
            **options,
        )  # fmt: skip
        loader = _Batches(batches)
        if data is not None:
            data.train_dataloader = lambda: loader  # type: ignore[method-assign]
        fit.fit(module, loader if data is None else None, datamodule=data)
    raise RuntimeError("training ended by itself: the module stops it, by max_steps or trainer.should_stop")


def _fit(request: dict[str, Any]) -> None:
    """Train by `request["method"]`; it answers from inside of the fit, which does not return."""
    if request["keep_heap"]:
        keep_heap()
    touch_libraries()
    torch.set_num_threads(request["threads"])
    torch.manual_seed(0)
    given = given_by(argparse.Namespace(**request["job"]), request["words"])
    module = module_of(given)
    torch.set_num_threads(request["threads"])  # the user's code may have set another number
    configure, callbacks = module.configure_optimizers, module.configure_callbacks

    def with_kernels() -> Any:
        made = configure()
        optimizers = (one for one in tree_leaves(made) if isinstance(one, torch.optim.Optimizer))
        for group in (group for one in optimizers for group in one.param_groups):
            group.update(_FUSED if request["fused"] and "fused" in group else {})
        return made

    def without_checkpoints() -> list[Callback]:
        given = callbacks()
        return [one for one in ([given] if isinstance(given, Callback) else given) if not isinstance(one, Checkpoint)]

    module.configure_optimizers = with_kernels  # type: ignore[method-assign]
    module.configure_callbacks = without_checkpoints  # type: ignore[method-assign]
    facts = _facts(given.model, given.batch) if request.get("facts") else {}
    how = {"devices": request["devices"], "trainer": request["trainer"], "facts": facts, "data": given.data}
    with quiet():
        fit_in_turns(module, [given.batch], request["method"], **how)


def _listen(record: list[tuple[str, str]]) -> None:
    """Keep the package's own warnings; others are the user's business in training."""

    def keep(message: Warning | str, category: type[Warning], *_: Any, **__: Any) -> None:
        if issubclass(category, NoEffectWarning | DifferenceWarning):
            record.append((category.__name__, " ".join(str(message).split())))

    warnings.simplefilter("ignore")
    for category in (NoEffectWarning, DifferenceWarning):
        warnings.simplefilter("always", category)
    warnings.showwarning = keep


def _facts(model: nn.Module, batch: Any) -> dict[str, Any]:
    """Facts that the first process tells about the job; it measures no method."""
    record: list[tuple[str, str]] = []
    with warnings.catch_warnings():
        _listen(record)
        if retime.convert(model).swapped:
            retime.convert_back(model)
    kind, chains = type(model).__name__, [*chains_in(model)]
    try:
        samples = samples_in(batch)
    except (TypeError, ValueError):  # a batch of the user's own kind
        samples = 0
    return {
        "model": kind,
        "is_lightning": isinstance(model, LightningModule),
        "parameters": sum(one.numel() for one in model.parameters()),
        "samples": samples,
        "no_scan": record[0][1] if record else "",
        "chains": chains,
        "no_chain": "" if chains else f"{kind} has no torch.nn.Sequential, so there is no chain of layers to scan",
    }


def serve(request: dict[str, Any]) -> Any:
    """For :class:`Worker`."""
    try:
        if "layers" not in request:
            return _fit(request)
        # milliseconds of F, O and W of each layer, timed alone, and its gradient's bytes
        torch.set_num_threads(request["threads"])
        job = job_of(argparse.Namespace(**request["job"], accumulate=1), request["words"])
        times = layer_times(Supervised(job), job.batch)
        return {"layers": [(one.forward_ms, one.output_ms, one.weight_ms, one.bytes) for one in times]}
    except Exception as error:  # whatever it was, it is the reason why this method does not apply
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        return {"error": one_line(error) or type(error).__name__, "missing": missing}
