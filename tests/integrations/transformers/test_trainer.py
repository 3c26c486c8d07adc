"""Objects that a ``transformers.Trainer`` is given, beside the plain Trainer: the same bits, habit by habit."""

import copy
import json
from collections.abc import Callable, Iterator
from functools import cache
from inspect import signature
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import IterableDataset

pytest.importorskip("transformers", reason="needs the extra lightning-retime[transformers]")
from transformers import EarlyStoppingCallback, Trainer, TrainerCallback, TrainingArguments

from retime import declare_per_parameter
from retime.foundations.lazy_updates import optimizers
from retime.foundations.messages import DifferenceWarning
from retime.integrations.transformers import FusedOptimizer, MemoryBudget
from support.small_optimizers import Averaging, EightBit, LowRank
from support.transformers_trainers import LENGTH, Left, assert_same, bert, fit, gpt2, left_by, texts, trainer

pytestmark = [
    pytest.mark.filterwarnings("ignore:the log has no grad_norm"),
    pytest.mark.filterwarnings("ignore:.*torch.cpu.amp.autocast.*:FutureWarning"),
]


class Object(NamedTuple):
    """An object, and what its trainer is told beside the habit, plain or not."""

    give: Callable[[Trainer], Any]
    options: dict[str, Any]
    was_on: Callable[[Any], bool]


OBJECTS = {
    "forward": Object(lambda one: FusedOptimizer(one, "forward"), {}, lambda report: report.fused_updates > 0),
    "backward": Object(
        lambda one: FusedOptimizer(one, "backward"), {"max_grad_norm": 0}, lambda report: report.fused_updates > 0
    ),
    "budget": Object(  # of a size at which something has to move
        lambda one: MemoryBudget(one, "420KB", dry_run="off", say=str),
        {"per_device_train_batch_size": 16},
        lambda reports: reports[0].offload.storages > 0,
    ),
}
EACH = pytest.mark.parametrize("name", OBJECTS)


class OwnLoss(Trainer):
    """A loss of its own: outputs asked for, weighted, counted and logged."""

    calls = 0

    def compute_loss(self, model: nn.Module, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        loss, outputs = super().compute_loss(model, inputs, return_outputs=True, **kwargs)
        self.calls += 1
        loss = loss + 1e-3 * outputs["logits"].square().mean()
        return (loss, outputs) if return_outputs else loss

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        super().log({**logs, "calls": self.calls}, *args, **kwargs)


class TwoLosses(Trainer):
    """A ``training_step`` of its own, with a backward pass for each of two losses."""

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        model.train()
        loss = self.compute_loss(model, self._prepare_inputs(inputs), num_items_in_batch=num_items_in_batch)
        again = 1e-3 * sum(parameter.square().sum() for parameter in model.parameters())
        self.accelerator.backward(loss)
        self.accelerator.backward(again)
        return loss.detach()


class LikeSFT(Trainer):
    """As TRL's SFTTrainer: outputs are measured in ``compute_loss``, by mode, and logged as means."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.hits: dict[bool, list[float]] = {True: [], False: []}

    def compute_loss(self, model: nn.Module, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        labels = inputs["labels"]
        loss, outputs = super().compute_loss(model, inputs, return_outputs=True, **kwargs)
        with torch.no_grad():
            hits = (outputs["logits"][:, :-1].argmax(-1) == labels[:, 1:]).sum()
            self.hits[model.training].append(self.accelerator.gather_for_metrics(hits).float().mean().item())
        return (loss, outputs) if return_outputs else loss

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        hits = self.hits[self.model.training]
        mean = sum(hits) / max(1, len(hits))
        hits.clear()
        super().log({**logs, "hits": mean}, *args, **kwargs)


class LikeDPO(Trainer):
    """As TRL's DPOTrainer: ``compute_loss`` runs a frozen copy of the model too, without gradients."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.reference = copy.deepcopy(self.model).requires_grad_(False).eval()

    def compute_loss(self, model: nn.Module, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        ids = inputs["input_ids"]
        with torch.no_grad():
            before = self.reference(input_ids=ids)["logits"].log_softmax(-1)
        outputs = model(input_ids=ids)
        chosen, rejected = (outputs["logits"].log_softmax(-1) - before).mean((1, 2)).chunk(2)
        loss = -nn.functional.logsigmoid(chosen - rejected).mean()
        return (loss, outputs) if return_outputs else loss


def cut(rows: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """A batch of one of four lengths."""
    length = LENGTH - int(rows[0]["input_ids"].sum()) % 4
    return {name: torch.stack([row[name] for row in rows])[:, :length] for name in rows[0]}


def frozen() -> dict[str, Any]:
    net = gpt2()
    net.transformer.wte.requires_grad_(False)
    return {"net": net}


def given() -> dict[str, Any]:
    net = gpt2()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    return {"net": net, "optimizers": (optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5))}


def half_precision() -> dict[str, Any]:
    return {"net": gpt2().to(torch.bfloat16)}


RECOMPUTE = next(
    name
    for name in ("activation_checkpointing", "gradient_checkpointing")
    if name in signature(TrainingArguments).parameters
)
"""Its name before transformers 5."""
HABITS: dict[str, Callable[[], dict[str, Any]]] = {
    "plain": dict,
    "accumulation of a classifier": lambda: {"gradient_accumulation_steps": 3, "model": "bert"},
    "clipping": lambda: {"max_grad_norm": 0.01, "gradient_accumulation_steps": 3},
    "bf16": lambda: {"bf16": True, "gradient_accumulation_steps": 3},
    "weights in bf16, sums over a window": lambda: (
        half_precision() | {"logging_steps": 4, "max_steps": 9, "logging_first_step": True}
    ),
    "label smoothing": lambda: {"label_smoothing_factor": 0.1, "gradient_accumulation_steps": 2},
    "label smoothing of a classifier, another optimizer": lambda: {
        **{"label_smoothing_factor": 0.1, "model": "bert"},
        **{"optim": "adamw_torch", "lr_scheduler_type": "cosine", "warmup_steps": 3},
    },
    "loss of its own": lambda: {"cls": OwnLoss, "gradient_accumulation_steps": 3},
    "loss function": lambda: {
        "compute_loss_func": lambda outputs, labels, num_items_in_batch: (
            outputs["logits"].square().sum() / num_items_in_batch
        )
    },
    "training step of its own": lambda: {"cls": TwoLosses},
    "optimizer given": given,
    "frozen, recomputation": lambda: frozen() | {RECOMPUTE: True},
    "noise in embeddings, adafactor": lambda: {"neftune_noise_alpha": 5.0, "optim": "adafactor"},
    "as TRL's SFTTrainer": lambda: {
        **{"cls": LikeSFT, "gradient_accumulation_steps": 3},
        **{"eval_strategy": "steps", "eval_steps": 2, "eval_on_start": True},
    },
    "as TRL's DPOTrainer": lambda: {"cls": LikeDPO, "gradient_accumulation_steps": 2},
    "batches of unlike lengths": lambda: {"data_collator": cut, "gradient_accumulation_steps": 3},
    "a model made in train(), metrics": lambda: {
        "model_init": gpt2,
        "eval_strategy": "epoch",
        "compute_metrics": lambda shown: {"sum": float(shown.predictions.argmax(-1).sum())},
    },
}
LONG = {"label smoothing", "loss of its own"}
"""Other habits run the same code."""
CLIPS = {"clipping"}
"""Refused in backward mode."""


@cache
def plain_fit(habit: str, options: tuple[tuple[str, Any], ...], folder: Path) -> Left:
    one = trainer(folder, **HABITS[habit]() | dict(options))
    return fit(one)


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("plain")


@EACH
@pytest.mark.parametrize("habit", [pytest.param(one, marks=[pytest.mark.long] * (one in LONG)) for one in HABITS])
def test_a_fit_has_the_bits_of_the_plain_trainers(name: str, habit: str, scratch: Path, tmp_path: Path) -> None:
    if name == "backward" and habit in CLIPS:
        pytest.skip("refused, see test_refusals.py")
    give, options, was_on = OBJECTS[name]
    plain = plain_fit(habit, tuple(options.items()), scratch)
    ours = trainer(tmp_path, **HABITS[habit]() | options)
    one = give(ours)
    assert_same(plain, fit(ours), norms=name != "backward")
    assert was_on(one.report()), one.report()
    assert len(ours.optimizer.param_groups) == (1 if habit == "optimizer given" else 2)


@EACH
def test_checkpoints_resume_in_both_directions(name: str, tmp_path: Path) -> None:
    give, options, was_on = OBJECTS[name]
    saving = options | {"save_strategy": "steps", "save_steps": 5, "gradient_accumulation_steps": 2}

    def run(folder: str, on: bool, resume: str | None = None) -> Left:
        one = trainer(tmp_path / folder, **saving)
        put = give(one) if on else None
        left = fit(one, resume_from_checkpoint=None if resume is None else str(tmp_path / resume / "checkpoint-5"))
        assert put is None or was_on(put.report())
        return left

    plain, ours = run("plain", on=False), run("ours", on=True)
    assert_same(plain, ours, norms=name != "backward")
    files = [sorted(path.name for path in (tmp_path / run / "checkpoint-5").iterdir()) for run in ("plain", "ours")]
    assert files[0] == files[1]
    states = [json.loads((tmp_path / run / "checkpoint-5/trainer_state.json").read_text()) for run in ("plain", "ours")]
    assert states[0]["stateful_callbacks"] == states[1]["stateful_callbacks"]
    resumed = run("resumed", False, "plain")
    assert all(torch.equal(value, resumed.tensors[name]) for name, value in plain.tensors.items())
    for folder, on, resume in (("a", False, "ours"), ("b", True, "plain"), ("c", True, "ours")):
        assert_same(resumed, run(folder, on, resume), norms=name != "backward")


@EACH
def test_the_best_model_is_loaded_at_the_end(name: str, tmp_path: Path) -> None:
    give, options, _ = OBJECTS[name]
    saving = {"save_strategy": "steps", "save_steps": 2, "eval_strategy": "steps", "eval_steps": 2}

    def made(folder: str) -> Trainer:
        stop = EarlyStoppingCallback(early_stopping_patience=2)
        best = {"load_best_model_at_end": True, "metric_for_best_model": "loss", "callbacks": [stop]}
        return trainer(tmp_path / folder, learning_rate=0.1, **options | saving | best)

    plain, ours = made("plain"), made("ours")
    give(ours)
    assert_same(fit(plain), fit(ours), norms=name != "backward")
    assert ours.state.best_global_step < ours.state.global_step


@EACH
def test_a_second_training_goes_on_alike(name: str, tmp_path: Path) -> None:
    give, options, was_on = OBJECTS[name]
    plain, ours = (trainer(tmp_path, **options) for _ in range(2))
    one = give(ours)
    for _ in range(2):
        assert_same(fit(plain), fit(ours), norms=name != "backward")
        assert was_on(one.report())
    one.remove()
    one.remove()
    before = str(one.report())
    assert_same(fit(plain), fit(ours))
    assert str(one.report()) == before
    assert "train" not in vars(ours)
    assert [type(one) for one in ours.callback_handler.callbacks] == [
        type(one) for one in plain.callback_handler.callbacks
    ]


class Failing(Trainer):
    """Fails in the forward pass of the fifth batch, and in the backward pass of the tenth."""

    batches = 0

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        loss = super().compute_loss(*args, **kwargs)
        self.batches += 1
        if self.batches == 5:
            raise KeyError("a broken sample")
        if self.batches == 10:
            loss.register_hook(self.fail)
        return loss

    def fail(self, gradient: Tensor) -> None:
        raise KeyError("a broken gradient")


@EACH
def test_a_failing_step_leaves_nothing_behind(name: str, tmp_path: Path) -> None:
    give, options, _ = OBJECTS[name]
    plain, ours = (trainer(tmp_path, cls=Failing, **options) for _ in range(2))
    one = give(ours)
    hooks = {name: len(module._forward_pre_hooks) for name, module in ours.model.named_modules()}
    for broken in ("sample", "gradient"):
        for failing in (plain, ours):
            with pytest.raises(KeyError, match=f"a broken {broken}"):
                fit(failing)
        assert_same(left_by(plain), left_by(ours), norms=name != "backward")
        assert "compute_loss" not in vars(ours)
        assert "clip_grad_norm_" not in vars(ours.accelerator)
        assert "zero_grad" not in vars(ours.optimizer.optimizer)
        assert hooks == {name: len(module._forward_pre_hooks) for name, module in ours.model.named_modules()}
        assert not any(parameter._post_accumulate_grad_hooks for parameter in ours.model.parameters())
    assert_same(fit(plain), fit(ours), norms=name != "backward")  # they go on, past their failures
    one.remove()


class OutOfMemory(Trainer):
    """Runs out of memory once, in the fourth batch."""

    batches = 0

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        self.batches += 1
        if self.batches == 4:
            raise RuntimeError("CUDA out of memory. Tried to allocate")
        return super().compute_loss(*args, **kwargs)


def test_a_smaller_batch_is_found_in_forward_mode(tmp_path: Path) -> None:
    options = {"cls": OutOfMemory, "auto_find_batch_size": True, "per_device_train_batch_size": 4}
    plain, ours = (trainer(tmp_path, **options) for _ in range(2))
    one = FusedOptimizer(ours, "forward")
    assert_same(fit(plain), fit(ours))
    assert ours.state.train_batch_size < 4
    assert one.report().steps == ours.state.global_step


def test_a_budget_that_cannot_be_kept_is_memory_that_is_out(tmp_path: Path) -> None:
    ours = trainer(tmp_path, per_device_train_batch_size=16, auto_find_batch_size=True)
    one = MemoryBudget(ours, "300KB", dry_run="off", say=str)
    ours.train()
    assert ours.state.train_batch_size < 16
    assert len(one.report()) == 1


def test_forward_fusion_and_a_budget_go_together(scratch: Path, tmp_path: Path) -> None:
    options = OBJECTS["budget"].options
    ours = trainer(tmp_path, **options)
    fused, budget = FusedOptimizer(ours, "forward"), MemoryBudget(ours, "450KB", dry_run="off", say=str)
    assert_same(plain_fit("plain", tuple(options.items()), scratch), fit(ours))
    assert fused.report().fused_updates > 0
    assert budget.report()[0].offload.storages > 0


def test_a_scaler_goes_with_forward_mode(tmp_path: Path) -> None:
    def run(on: bool) -> Left:
        one = trainer(tmp_path, max_grad_norm=0.1)
        one.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127, growth_interval=3)  # overflows first
        fused = FusedOptimizer(one, "forward") if on else None
        left = fit(one)
        assert fused is None or fused.report().fused_updates > 0
        return left

    assert_same(run(on=False), run(on=True))


def test_plans_of_dry_runs_leave_no_trace_and_are_kept(tmp_path: Path) -> None:
    """A dry run calls the ``compute_loss`` of transformers more often than training does."""
    saved = tmp_path / "plan.json"

    class Saving(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            one.save_plan(saved)

    options = {"model": "bert", "per_device_train_batch_size": 16, "label_smoothing_factor": 0.1, "max_steps": 4}
    plain, ours = trainer(tmp_path, **options), trainer(tmp_path, **options, callbacks=[Saving()])
    said: list[str] = []
    one = MemoryBudget(ours, "1GiB", say=said.append)
    with pytest.raises(ValueError, match="while train"):
        one.save_plan(saved)
    assert_same(fit(plain), fit(ours))
    assert "Dry runs" in said[0]
    assert [shape.source for shape in one.report()[0].shapes] == [""]
    assert_same(fit(plain), fit(ours))
    assert [shape.source for shape in one.report()[0].shapes] == ["plan of an earlier run"]
    again = trainer(tmp_path, **options)
    other = MemoryBudget(again, "1GiB", plan=str(saved), say=said.append)
    again.train()
    assert other.report()[0].shapes[0].source


def test_a_loss_of_ones_own_is_called_once_a_batch(tmp_path: Path) -> None:
    plain, ours = (trainer(tmp_path, cls=OwnLoss) for _ in range(2))
    one = MemoryBudget(ours, "1GiB", say=str)
    assert_same(fit(plain), fit(ours))
    assert (plain.calls, ours.calls) == (14, 14)
    assert one.report()[0].steps == 14


def test_a_function_for_the_loss_is_called_once_a_batch(tmp_path: Path) -> None:
    calls: list[int] = []

    def growing(outputs: Any, labels: Tensor, **_: Any) -> Tensor:
        calls.append(1)
        loss = torch.nn.functional.cross_entropy(outputs.logits.flatten(0, 1), labels.flatten())
        return loss * min(1, len(calls) / 8)

    plain, ours = (trainer(tmp_path, compute_loss_func=growing) for _ in range(2))
    left = fit(plain)
    count = len(calls)
    calls.clear()
    MemoryBudget(ours, "1GiB", say=str)
    assert_same(left, fit(ours))
    assert len(calls) == count


def test_resuming_what_has_ended(tmp_path: Path) -> None:
    ours = trainer(tmp_path, save_strategy="epoch")
    ours.train()
    MemoryBudget(ours, "1GiB", say=str)
    ours.train(resume_from_checkpoint=True)  # a NoEffectWarning would be an error


def test_batches_without_a_length(tmp_path: Path) -> None:
    """The Trainer cannot know then which window is the last one."""

    class Endless(IterableDataset[Any]):
        def __iter__(self) -> Iterator[Any]:
            yield from texts(7 * 16)  # whole windows and, in the larger batches, a batch that is left for the next

    def made(**options: Any) -> Trainer:
        one = trainer(tmp_path, max_steps=5, gradient_accumulation_steps=3, **options)
        one.train_dataset = Endless()
        return one

    for name, (give, options, was_on) in OBJECTS.items():
        plain, ours = made(**options), made(**options)
        one = give(ours)
        assert_same(fit(plain), fit(ours), norms=name != "backward")
        assert was_on(one.report())


def test_the_log_of_backward_mode_has_no_norms_and_says_so_once(tmp_path: Path) -> None:
    ours = trainer(tmp_path, max_grad_norm=0)
    FusedOptimizer(ours, "backward")
    with pytest.warns(DifferenceWarning, match="no grad_norm.*mode='forward'") as warned:
        ours.train()
    assert len([one for one in warned if one.category is DifferenceWarning]) == 1
    assert not any("grad_norm" in line for line in ours.state.log_history)


def test_elements_are_clipped_in_backward_mode(tmp_path: Path) -> None:
    class Clipping(TrainerCallback):
        def on_pre_optimizer_step(self, *_: Any, model: nn.Module, **__: Any) -> None:
            torch.nn.utils.clip_grad_value_(model.parameters(), 1e-3)

    plain, ours = (trainer(tmp_path, max_grad_norm=0, model="bert", net=bert()) for _ in range(2))
    plain.add_callback(Clipping())
    FusedOptimizer(ours, "backward", clip_value=1e-3)
    assert_same(fit(plain), fit(ours), norms=False)


@pytest.mark.parametrize("kind", [Averaging, LowRank, EightBit])
@pytest.mark.parametrize("mode", ["backward", "forward"])
def test_optimizers_that_update_as_other_libraries_do(
    mode: str, kind: type[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Schedule-free, GaLore and 8-bit states; BERT has embeddings, gradients are accumulated, and it evaluates."""
    monkeypatch.setattr(optimizers, "_declared", set())
    declare_per_parameter(kind)
    left = []
    for fused in (False, True):
        net = bert()
        given = {"net": net, "optimizers": (kind(net.parameters()), None), "eval_strategy": "epoch"}
        one = trainer(tmp_path, "bert", **given, max_grad_norm=0, gradient_accumulation_steps=3)
        report = FusedOptimizer(one, mode).report if fused else None
        left.append(fit(one))
    assert_same(*left, norms=mode == "forward")
    assert report().fused_updates > 0
