"""Strategies spell their arguments out, for command lines, and refuse wrong ones when they are made."""

import inspect
import math
from collections.abc import Callable
from typing import Any

import pytest
from lightning.pytorch import Trainer
from lightning.pytorch.accelerators import CPUAccelerator
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy, Strategy
from torch import nn

import retime
from retime.foundations.weight_gradients import WeightGradientDeferral
from retime.strategies.support.base import DDPArguments

OURS = dict.fromkeys(strategy for _, strategy, *_ in retime.strategies.STRATEGIES)
DDP = [one for one in OURS if issubclass(one, DDPArguments)]
ONE = [one for one in OURS if issubclass(one, SingleDeviceStrategy)]
OF_THE_WRAPPER = {
    *("bucket_cap_mb", "broadcast_buffers", "find_unused_parameters", "gradient_as_bucket_view", "static_graph")
}


def names(made: Any) -> set[str]:
    kinds = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    return {name for name, one in inspect.signature(made).parameters.items() if one.kind not in kinds}


def test_a_strategy_of_ones_own_shows_them_too() -> None:
    class Own(retime.OOODataParallelStrategy):
        def __init__(self, more: int = 0, **options: Any) -> None:
            super().__init__(**options)

    assert names(Own) == {"more"} | names(retime.OOODataParallelStrategy)


@pytest.mark.parametrize("strategy", [*DDP, *ONE])
def test_arguments_of_lightnings_own_are_in_the_signature(strategy: type[Strategy]) -> None:
    own = names(DDPStrategy) | OF_THE_WRAPPER if strategy in DDP else names(SingleDeviceStrategy)
    assert own <= names(strategy)


@pytest.mark.parametrize("strategy", DDP)
def test_arguments_reach_lightning_and_the_wrapper(strategy: Callable[..., Any]) -> None:
    built = strategy(
        start_method="fork", process_group_backend="gloo", static_graph=True, bucket_cap_mb=3, check_reduction=True
    )
    assert (built._start_method, built._process_group_backend) == ("fork", "gloo")
    wanted = {"static_graph": True, "bucket_cap_mb": 3, "check_reduction": True, "find_unused_parameters": False}
    assert wanted.items() <= built._ddp_kwargs.items()
    assert "bucket_cap_mb" not in strategy()._ddp_kwargs  # torch's own default, or ours


def from_command_line(strategy: type[Strategy], given: dict[str, Any]) -> Any:
    pytest.importorskip("jsonargparse", reason="LightningCLI needs jsonargparse")
    from jsonargparse import ArgumentParser

    parser = ArgumentParser(exit_on_error=False)
    parser.add_subclass_arguments(strategy, "strategy")
    path = f"{strategy.__module__}.{strategy.__qualname__}"
    config = parser.parse_object({"strategy": {"class_path": path, "init_args": given}})
    instantiate = getattr(parser, "instantiate", None) or parser.instantiate_classes  # its name in old versions
    return instantiate(config).strategy


@pytest.mark.parametrize("strategy", [*DDP, *ONE])
@pytest.mark.parametrize("accelerator", ["cpu", {"class_path": "lightning.pytorch.accelerators.CPUAccelerator"}])
def test_from_a_command_line(strategy: type[Strategy], accelerator: Any) -> None:
    given = {"static_graph": True, "start_method": "spawn", "process_group_backend": "gloo"} if strategy in DDP else {}
    made = from_command_line(strategy, {"accelerator": accelerator, **given})
    assert isinstance(made, strategy)
    taken = made._accelerator
    assert taken == "cpu" if isinstance(accelerator, str) else isinstance(taken, CPUAccelerator)


@pytest.mark.parametrize("strategy", [*DDP, *ONE])
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # Lightning calls methods that jsonargparse renamed
def test_the_cli_reads_every_argument(strategy: type[Strategy], monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("jsonargparse", reason="LightningCLI needs jsonargparse")
    from lightning.pytorch.cli import LightningCLI
    from lightning.pytorch.demos.boring_classes import BoringDataModule, BoringModel

    path = f"{strategy.__module__}.{strategy.__qualname__}"
    parameters = inspect.signature(strategy).parameters
    given = {name: parameters[name].default for name in names(strategy)}
    trainer = {"strategy": {"class_path": path, "init_args": given}, "logger": False, "accelerator": "cpu"}
    monkeypatch.setattr("sys.argv", ["train.py"])  # it warns of others beside args
    options: dict[str, Any] = {"run": False, "save_config_callback": None, "seed_everything_default": False}
    cli = LightningCLI(BoringModel, BoringDataModule, args={"trainer": trainer}, **options)
    assert isinstance(cli.trainer.strategy, strategy)
    assert names(strategy) <= vars(cli.config.trainer.strategy.init_args).keys()


@pytest.mark.parametrize("strategy", [*DDP, *ONE, DDPStrategy, SingleDeviceStrategy])
@pytest.mark.parametrize("accelerator", ["cpu", CPUAccelerator(), None])
def test_accelerators_are_taken_by_name_as_lightnings_own_take_them(strategy: Any, accelerator: Any) -> None:
    chosen = "auto" if accelerator is not None else "cpu"  # the Trainer takes one of the two
    options = {"devices": 1, "logger": False, "enable_checkpointing": False}
    trainer = Trainer(accelerator=chosen, strategy=strategy(accelerator=accelerator), **options)
    assert isinstance(trainer.accelerator, CPUAccelerator)
    assert trainer.strategy.accelerator is trainer.accelerator


def deferral(**options: Any) -> WeightGradientDeferral:
    return WeightGradientDeferral(nn.Linear(2, 2), **options)


Wrong = tuple[Callable[..., Any], dict[str, Any], str]
OOO = retime.OOODataParallelStrategy
WRONG: list[Wrong] = [  # of each kind; tests/test_public_arguments.py tries all arguments
    (deferral, {"blocks": "layer1"}, r"\(blocks='layer1'\): give texts in a list"),
    (OOO, {"k": -1}, r"\(k=-1\): give a whole number of 0 or more or 'auto'"),
    (OOO, {"max_memory": "much"}, r"max_memory='much' cannot be read: write bytes, '8GiB'"),
    (OOO, {"bucket_cap_mb": math.nan}, r"\(bucket_cap_mb=nan\): give a number above 0"),
    (OOO, {"start_method": "thread"}, r"\(start_method='thread'\): give 'popen' or 'spawn'"),
    (OOO, {"ddp_comm_hook": print}, r"communication hook itself"),
    (retime.FusedOptimizerStrategy, {"mode": "forward", "side_stream": True}, "side_stream"),
    (retime.OOOPipelineStrategy, {"schedule": "2f2b"}, r"schedule='2f2b' is unknown: choose from ooo2,"),
]


@pytest.mark.parametrize(("make", "options", "text"), WRONG, ids=lambda value: value if isinstance(value, str) else "")
def test_wrong_arguments_are_named(make: Callable[..., Any], options: dict[str, Any], text: str) -> None:
    with pytest.raises((TypeError, ValueError), match=text):
        make(**options)


def test_numbers_set_later_are_checked_too() -> None:
    one = deferral()
    with pytest.raises(ValueError, match=r"k=-1"):
        one.k = -1
    with pytest.raises(ValueError, match=r"k=-1"):
        OOO().set_k(-1)


def test_bytes_may_be_written_out() -> None:
    assert OOO(max_memory="1GiB")._max_memory == 2**30
