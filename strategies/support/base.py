"""Strategies for one device, whichever the Trainer chose."""

import inspect
import pickle
import sys
from abc import abstractmethod
from collections.abc import Callable, Mapping
from typing import Annotated, Any, ClassVar, Literal

import lightning
import torch
import torch.distributed as dist
from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment
from lightning.pytorch import Trainer
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.plugins import Precision
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch.nn.parallel import DistributedDataParallel

from retime.foundations.arguments import Above, AtLeast, AtMost, Timeout, checked
from retime.foundations.compatibility import Mechanism, refuse
from retime.foundations.ddp import RankLostError, RankProcesses, Reducer, sparse_layer
from retime.mechanisms.cpu_accumulation import BucketReduction, HostReducer
from retime.strategies.support.lightning_private import (
    DDPMoments,
    Launcher,
    ProcessLauncher,
    end_behind_batch_on_sigterm,
    given_device,
    start_method_of,
    timeout_of,
)

# What a fit over several ranks does where one of them is gone.


class NamesLostRanks(DDPMoments):
    """``ddp`` whose errors name the rank that ended, and which SIGTERM ends on any rank, also where others wait."""

    _processes: RankProcesses | None = None

    def __getstate__(self) -> dict[str, Any]:
        """A copy, made in the middle of a fit too, learns the processes in a fit of its own."""
        return super().__getstate__() | {"_processes": None}

    def setup(self, trainer: Trainer) -> None:
        super().setup(trainer)
        if self.world_size > 1 and dist.is_initialized():
            self._forget_processes()
            self._processes = RankProcesses()
            end_behind_batch_on_sigterm(trainer, self._tells_of_lost_rank)

    def on_exception(self, exception: BaseException) -> None:
        super().on_exception(exception)
        self._tells_of_lost_rank(exception)

    def _tells_of_lost_rank(self, error: BaseException) -> bool:
        """Return whether it says that another rank is gone; it names the rank from here on."""
        text = None if self._processes is None else self._processes.explain(error)
        if text is None:
            return isinstance(error, RankLostError)
        error.args = (text,)
        self._forget_processes()
        return True

    def teardown(self) -> None:
        self._forget_processes()
        super().teardown()

    def _forget_processes(self) -> None:
        processes, self._processes = self._processes, None
        if processes is not None:
            processes.close()


# What strategies hand on to Lightning's ``DDPStrategy``.

StartMethod = Literal["popen", "spawn", "fork", "forkserver"]


def without_none(**arguments: Any) -> dict[str, Any]:
    """Return the arguments that were given: for the others Lightning and torch have defaults of their own."""
    return {name: value for name, value in arguments.items() if value is not None}


# DDP's communication hook: who has it, Lightning's private place for it, and what to say when it is not used.


def refuse_users_hook(owner: Mechanism, ddp: Mapping[str, Any]) -> None:
    """Refuse a communication hook among DDP's arguments beside a mechanism that owns it.

    Raises:
        ValueError: there is one.
    """
    if ddp.get("ddp_comm_hook") is not None or ddp.get("ddp_comm_state") is not None:
        refuse(owner, [Mechanism.USERS_HOOK])


def hook_was_not_asked_for(consequence: str, instead: str) -> str:
    """An error's text: Lightning has wrapped the model without calling ``_register_ddp_hooks``, which we override.

    Args:
        consequence: what would happen without the hook.
        instead: what works all the same.
    """
    return (
        f"lightning {lightning.__version__} has wrapped the model without calling DDPStrategy._register_ddp_hooks, so "
        f"DDP has no communication hook of retime's and {consequence}: install a version of lightning that this "
        f"version of retime was tested with (2.6), or {instead}"
    )


# Say so when the other Lightning package is in use.

_HINT = "retime works with `lightning`: use `from lightning.pytorch import Trainer` in place of `pytorch_lightning`"


class LightningOnly:
    """Mix-in for strategies: ``pytorch_lightning.Trainer`` quotes the strategy's repr when it refuses an instance."""

    def __repr__(self) -> str:
        name = f"{type(self).__module__}.{type(self).__name__}()"
        return f"{name} ({_HINT})" if "pytorch_lightning" in sys.modules else name


def refuse_other_trainer(trainer: object) -> None:
    """Raise TypeError for a Trainer of ``pytorch_lightning``."""
    if type(trainer).__module__.partition(".")[0] == "pytorch_lightning":
        raise TypeError(_HINT)


# Who sums the gradients of a strategy's model.

ReduceOn = Literal["device", "host"]
"""Where gradients are summed."""


class HostReductionMixin(DDPMoments):
    """A DDP strategy that hands its mechanism a reducer; which one is decided here and nowhere else."""

    reduce_on: ReduceOn = "device"
    urgent_sums = False
    """Whether some sums are to overtake others."""
    _reduction: BucketReduction | None = None

    def __getstate__(self) -> dict[str, Any]:
        """A copy, made in the middle of a fit too, sums in a fit of its own."""
        return super().__getstate__() | {"_reduction": None}

    def make_reducer(self, model: DistributedDataParallel) -> Reducer | None:
        """Reducer for this model's gradients; None: all-reduces where they are. All ranks call this before they train.

        Raises:
            ValueError: it has sparse gradients, which the host does not sum.
        """
        if self.reduce_on == "device" or self.world_size < 2:
            return None
        layer = sparse_layer(model.module)
        if layer is not None:
            raise ValueError(
                f"the sparse gradients of {layer!r} cannot be summed on the host, as they cannot go through DDP's "
                "communication hook: use sparse=False, or strategy='ddp' or reduce_on='device'"
            )
        return HostReducer(self.root_device, model.process_group, timeout_of(self), overtakes=self.urgent_sums)

    def end_reduction(self) -> None:
        """Take off what sums beside the mechanism, if anything does."""
        reduction, self._reduction = self._reduction, None
        if reduction is not None:
            reduction.close(failed=sys.exc_info()[0] is not None)

    def teardown(self) -> None:
        super().teardown()
        self.end_reduction()


# Reports of fits that run in processes of their own: rank 0 returns its report with the weights.

_KEY = "retime_report"


class ReportsAcrossProcesses(NamesLostRanks):
    """``ddp`` whose ``report()`` tells of the fit after spawned and forked processes have ended, too."""

    @abstractmethod
    def report(self) -> Any:
        """Report of what was done so far."""

    def take_report(self, report: Any) -> None:
        """Let :meth:`report` return rank 0's report from now on, until the next fit."""
        self._last_report = report

    def choose_launcher(self, launcher: Launcher | None) -> Launcher | None:
        if isinstance(launcher, ProcessLauncher):
            return _ReportingLauncher(self, start_method=start_method_of(self))
        return launcher


class DDPArguments(ReportsAcrossProcesses):
    """``ddp`` with its arguments and those of ``DistributedDataParallel`` spelled out, for command lines to see.

    A strategy takes its own arguments and hands the others on: ``super().__init__(**ddp)``.
    """

    __signature__: ClassVar[inspect.Signature]

    @checked
    def __init__(
        self,
        *,
        ddp_comm_state: object | None = None,
        ddp_comm_hook: Callable[..., Any] | None = None,
        ddp_comm_wrapper: Callable[..., Any] | None = None,
        model_averaging_period: Annotated[int, AtLeast(1)] | None = None,
        process_group_backend: str | None = None,
        timeout: Timeout | None = None,
        start_method: StartMethod = "popen",
        bucket_cap_mb: Annotated[float, Above(0), AtMost(2**20)] | None = None,
        find_unused_parameters: bool = False,
        static_graph: bool = False,
        gradient_as_bucket_view: bool = False,
        broadcast_buffers: bool | None = None,
        accelerator: Accelerator | str | None = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
        **ddp_kwargs: Any,
    ) -> None:
        given = {**locals()}  # must stay first: the arguments, and no other local names
        named = {name: one for name, one in given.items() if name not in ("self", "ddp_kwargs", "__class__")}
        super().__init__(**without_none(**named), **ddp_kwargs)

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Let ``inspect.signature``, and so ``help``, show what is behind ``**ddp`` too."""
        super().__init_subclass__(**kwargs)
        own = inspect.signature(cls.__init__).parameters
        parameters = [one for one in own.values() if one.kind is not one.VAR_KEYWORD]
        if len(parameters) < len(own):
            parent = next(one for one in cls.__mro__[1:] if issubclass(one, DDPArguments))
            taken = [one for one in inspect.signature(parent).parameters.values() if one.name not in own]
            parameters += [one if one.kind is one.VAR_KEYWORD else one.replace(kind=one.KEYWORD_ONLY) for one in taken]
        cls.__signature__ = inspect.Signature(parameters[1:])


class _ReportingLauncher(ProcessLauncher):
    """Lightning's launcher, with one more thing among its results."""

    def get_extra_results(self, trainer: Trainer) -> dict[str, Any]:
        strategy = trainer.strategy
        assert isinstance(strategy, ReportsAcrossProcesses)
        # as bytes: Lightning would look for tensors inside of it, to move them to the CPU
        return super().get_extra_results(trainer) | {_KEY: pickle.dumps(strategy.report())}

    def update_main_process_results(self, trainer: Trainer, extra: dict[str, Any]) -> None:
        super().update_main_process_results(trainer, extra)
        strategy = trainer.strategy
        assert isinstance(strategy, ReportsAcrossProcesses)
        strategy.take_report(pickle.loads(extra[_KEY]))


class SingleDevice(SingleDeviceStrategy):
    """Takes its device from the Trainer, unless it is given one, and refuses several.

    Lightning's own needs a ``device`` from the start, so its registry can only make it for a CPU.
    """

    instead = ""
    """What to say to those who have several devices."""

    @checked
    def __init__(
        self,
        device: str | int | torch.device | None = None,
        accelerator: Accelerator | str | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
    ) -> None:
        chosen: Any = accelerator  # the Trainer takes names too, which Lightning's annotations do not say
        super().__init__("cpu" if device is None else device, chosen, checkpoint_io, precision_plugin)
        self.parallel_devices: list[torch.device] | None = None if device is None else [given_device(self)]

    @property
    def root_device(self) -> torch.device:
        devices = self.parallel_devices
        if not devices:
            return given_device(self)
        if len(devices) > 1:
            raise ValueError(
                f"strategy={self.strategy_name!r} runs on one device, got devices={len(devices)}: use devices=1"
                + (f", or strategy={self.instead!r} for several" if self.instead else "")
            )
        return devices[0]

    def setup_environment(self) -> None:
        _ = self.root_device  # several devices are refused before anything is set up
        super().setup_environment()
