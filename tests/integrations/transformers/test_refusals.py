"""What a trainer's objects refuse by name, before the first step and with nothing left behind."""

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="needs the extra lightning-retime[transformers]")
from accelerate.utils import DistributedType
from torch import Tensor, nn
from transformers import Trainer, TrainerCallback

from retime.foundations.messages import NoEffectWarning
from retime.integrations import transformers as face
from retime.integrations.transformers import (
    CPUAccumulate,
    FusedOptimizer,
    MemoryBudget,
    OutOfOrderDataParallel,
    OutOfOrderPipeline,
)
from retime.mechanisms.out_of_order import ALONE
from retime.schedules.budget import BudgetError
from support.transformers_trainers import assert_same, fit, gpt2, trainer


def assert_untouched(one: Trainer) -> None:
    """Nothing of ours is on this trainer."""
    assert "train" not in vars(one)
    assert "compute_loss" not in vars(one)
    assert not [callback for callback in one.callback_handler.callbacks if "retime" in type(callback).__module__]


def test_the_face_shows_the_objects_and_nothing_else() -> None:
    objects = ["CPUAccumulate", "FusedOptimizer", "MemoryBudget", "OutOfOrderDataParallel", "OutOfOrderPipeline"]
    assert face.__all__ == objects


def test_backward_fusion_and_clipping_by_norm(tmp_path: Path) -> None:
    one = trainer(tmp_path)  # transformers' default
    with pytest.raises(ValueError, match=r"max_grad_norm=1\.0, which is transformers' default.*mode='forward'.*=0\)"):
        FusedOptimizer(one)
    assert_untouched(one)
    one.args.max_grad_norm = 0
    FusedOptimizer(one)
    one.args.max_grad_norm = 0.5
    with pytest.raises(ValueError, match=r"max_grad_norm=0\.5"):
        one.train()
    assert one.state.global_step == 0


def test_clipping_of_a_trainers_own(tmp_path: Path) -> None:
    class Clipping(Trainer):
        def training_step(self, model: nn.Module, *args: Any, **kwargs: Any) -> Tensor:
            loss = super().training_step(model, *args, **kwargs)
            self.accelerator.clip_grad_norm_(model.parameters(), 1.0)
            return loss

    one = trainer(tmp_path, cls=Clipping, max_grad_norm=0)
    FusedOptimizer(one, "backward")
    with pytest.raises(RuntimeError, match=r"cannot clip by global norm.*mode='forward'"):
        one.train()
    assert "clip_grad_norm_" not in vars(one.accelerator)


REFUSED: list[tuple[dict[str, Any], Any, str]] = [
    (
        {"max_grad_norm": 0, "auto_find_batch_size": True},
        lambda one: FusedOptimizer(one, "backward"),
        r"auto_find_batch_size.*mode='forward'",
    ),
    ({}, lambda one: FusedOptimizer(one, "forward", clip_value=1.0), r"clip_value=1\.0 is for mode='backward'"),
    ({}, lambda one: FusedOptimizer(one, "both"), "unknown fusion mode 'both'"),
    ({}, lambda one: MemoryBudget(one, "8 bananas"), "'8 bananas'"),
    ({}, lambda one: MemoryBudget(one, "1GiB", batchnorm="gost"), "batchnorm='gost'"),
    ({}, OutOfOrderPipeline, r"a part of the model.*integrations\.accelerate\.OutOfOrderPipeline.*ooo_pip"),
]


@pytest.mark.parametrize(("options", "give", "why"), REFUSED)
def test_what_cannot_be_is_refused_at_once(options: dict[str, Any], give: Any, why: str, tmp_path: Path) -> None:
    one = trainer(tmp_path, **options)
    with pytest.raises(ValueError, match=why):
        give(one)
    with pytest.raises(TypeError, match="trainer"):
        FusedOptimizer(one.model)
    assert_untouched(one)


def test_backward_fusion_and_fp16(tmp_path: Path) -> None:
    one = trainer(tmp_path, max_grad_norm=0)
    FusedOptimizer(one, "backward")
    one.accelerator.scaler = torch.amp.GradScaler("cpu")
    with pytest.raises(ValueError, match=r"GradScaler.*mode='forward'.*TrainingArguments\(bf16=True\)"):
        one.train()
    assert one.state.global_step == 0
    assert one.optimizer.optimizer.__dict__.get("_retime_mechanisms", []) == []


def test_an_optimizer_that_nobody_has_declared(tmp_path: Path) -> None:
    class Own(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            super().step(closure)

    def build() -> Trainer:
        net = gpt2()
        return trainer(tmp_path, net=net, optimizers=(Own(net.parameters(), lr=0.1), None))

    plain, one = build(), build()
    fused = FusedOptimizer(one, "forward")
    with pytest.raises(ValueError, match=r"cannot fuse this optimizer.*declare_per_parameter\(Own\)"):
        one.train()
    assert one.state.global_step == 0
    fused.remove()
    assert_untouched(one)
    assert_same(fit(plain), fit(one))


@pytest.mark.parametrize("optim", ["lomo", "adalomo", "galore_adamw_layerwise", "apollo_adamw_layerwise"])
@pytest.mark.parametrize("mode", ["backward", "forward"])
def test_optimizers_that_update_in_the_backward_pass_by_themselves(optim: str, mode: str, tmp_path: Path) -> None:
    one = trainer(tmp_path, optim=optim, max_grad_norm=0, optim_target_modules="all-linear")
    with pytest.raises(ValueError, match=rf"optim='{optim}' updates inside of the backward pass by itself"):
        FusedOptimizer(one, mode)
    assert_untouched(one)


OBJECTS = [lambda one: FusedOptimizer(one, "forward"), MemoryBudget, OutOfOrderDataParallel, CPUAccumulate]


@pytest.mark.parametrize("give", OBJECTS)
def test_engines_that_own_the_step(give: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = trainer(tmp_path)
    with monkeypatch.context() as patched:
        patched.setattr(one.accelerator.state, "distributed_type", DistributedType.FSDP)
        with pytest.raises(ValueError, match=r"one device or under DistributedDataParallel.*FSDP"):
            give(one)
    one.args._n_gpu = 2
    with pytest.raises(ValueError, match=r"2 GPUs the Trainer uses DataParallel.*torchrun"):
        give(one)
    assert_untouched(one)


def test_two_that_do_not_go_together(tmp_path: Path) -> None:
    one = trainer(tmp_path, max_grad_norm=0)
    FusedOptimizer(one, "forward")
    with pytest.raises(ValueError, match="backward fusion cannot join forward fusion"):
        FusedOptimizer(one, "backward")
    MemoryBudget(one, "1GiB")
    with pytest.raises(ValueError, match="a memory budget"):
        MemoryBudget(one, "1GiB")
    other = trainer(tmp_path, max_grad_norm=0)
    MemoryBudget(other, "1GiB")
    with pytest.raises(ValueError, match=r"a memory budget.*FusedOptimizer\(trainer, mode='forward'\)"):
        FusedOptimizer(other, "backward")


def test_a_budget_below_the_floor(tmp_path: Path) -> None:
    one = trainer(tmp_path, per_device_train_batch_size=16)
    MemoryBudget(one, "300KB", say=str)
    with pytest.raises(BudgetError, match="is below this step's floor") as refused:
        one.train()
    assert "per_device_train_batch_size" in refused.value.__notes__[0]
    assert one.state.global_step == 0


def test_a_loss_that_dry_runs_would_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class OwnLoss(Trainer):
        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            return super().compute_loss(*args, **kwargs)

    one = trainer(tmp_path, cls=OwnLoss)
    monkeypatch.setattr(type(one.accelerator), "num_processes", 2)
    with pytest.raises(ValueError, match=r"with 2 processes.*OwnLoss has one of its own \(.*dry_run='auto'"):
        MemoryBudget(one, "1GiB")
    assert_untouched(one)
    MemoryBudget(one, "1GiB", dry_run="auto")


@pytest.mark.parametrize(
    ("give", "why"), [(OutOfOrderDataParallel, ALONE), (CPUAccumulate, "there are no gradients to add up")]
)
def test_one_process_has_no_communication(give: Any, why: str, tmp_path: Path) -> None:
    plain, ours = (trainer(tmp_path, max_steps=2) for _ in range(2))
    one = give(ours)
    with pytest.warns(NoEffectWarning) as warned:
        assert_same(fit(plain), fit(ours))
    assert [why in str(each.message) for each in warned] == [True]
    assert str(one.report())
    one.remove()
    assert_untouched(ours)


def test_an_object_that_comes_too_late(tmp_path: Path) -> None:
    class Late(TrainerCallback):
        def on_train_begin(self, *_: Any, **__: Any) -> None:
            given.append(FusedOptimizer(one, "forward"))

    given: list[FusedOptimizer] = []
    late = Late()
    plain, one = trainer(tmp_path), trainer(tmp_path, callbacks=[late])
    with pytest.warns(NoEffectWarning, match=r"which had already begun: give it before train\(\)"):
        assert_same(fit(plain), fit(one))
    assert given[0].report().steps == 0
    one.remove_callback(late)
    assert_same(fit(plain), fit(one))
    assert given[0].report().steps > 0


def test_trainers_with_a_loop_of_their_own(tmp_path: Path) -> None:
    class OwnLoop(Trainer):
        def train(self, *_: Any, **__: Any) -> None:
            """Tells nobody."""

    one = trainer(tmp_path, cls=OwnLoop)
    FusedOptimizer(one, "forward")
    with pytest.warns(NoEffectWarning, match="the train.. of OwnLoop does not call on_train_begin"):
        one.train()


def test_a_training_step_without_compute_loss(tmp_path: Path) -> None:
    class OwnStep(Trainer):
        def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
            loss = model(**inputs)["loss"]
            self.accelerator.backward(loss)
            return loss.detach()

    one = trainer(tmp_path, cls=OwnStep, max_steps=2)
    MemoryBudget(one, "1GiB")
    with pytest.warns(NoEffectWarning, match="training_step of OwnStep did not call compute_loss"):
        one.train()
