"""What a step returns is held until the batch is over, and of parts joined as they come; dry runs count it."""

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from retime.foundations.parts.combine import Certificate, Weighting, WholeOutput
from retime.mechanisms.memory_budget.dry_run.run import TrainingStep, profile_step, replay
from retime.mechanisms.memory_budget.dry_run.trace import Tracer
from retime.mechanisms.memory_budget.offload.tier import HostNull
from retime.mechanisms.memory_budget.search import part_sizes
from retime.mechanisms.memory_budget.step import BudgetedStep
from retime.mechanisms.memory_budget.step_memory import StepMemory
from retime.mechanisms.memory_budget.sub_batches import SubBatches
from retime.schedules.budget import BlockKind, BudgetError, OffloadPlan

SAMPLES, CLASSES = 64, 1000
LOGITS = SAMPLES * CLASSES * 4
FEW_BYTES = 2000  # losses and their weights

Step = Callable[[Any], Any]


def classifier() -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, CLASSES))
    return model, (torch.randn(SAMPLES, 16), torch.randint(CLASSES, (SAMPLES,)))


def returning(model: nn.Module, what: str) -> Step:
    def step(part: tuple[Tensor, Tensor]) -> Any:
        logits = model(part[0])
        loss = F.cross_entropy(logits, part[1])
        if what == "fixed":  # a matrix that has nothing to do with the number of samples
            return {"loss": loss, "between classes": logits.detach()[:, :200].t() @ logits.detach()[:, :200]}
        return {"loss": loss, "logits": logits} if what == "logits" else loss

    return step


def measured(model: nn.Module, batch: Any, run: Callable[[], Any]) -> int:
    """The most that storages hold while it runs, with the model, its gradients and the batch."""
    gc.collect()
    tracer = Tracer(model)
    tracer.add([list(model.parameters()), batch], BlockKind.WEIGHT)
    tracer.add([p.grad for p in model.parameters()], BlockKind.WEIGHT_GRADIENT)
    with tracer:
        run()
    return tracer.trace.peak_bytes


@pytest.mark.parametrize("what", ["loss", "logits", "fixed"])
@pytest.mark.parametrize("sub_batch", [64, 32, 16, 8])
def test_dry_runs_hold_what_training_holds(what: str, sub_batch: int) -> None:
    model, batch = classifier()
    step = returning(model, what)

    def train() -> Any:
        """As under Lightning, which holds what training_step returned for the first part."""
        parts = SubBatches(model, step, batch, sub_batch, Certificate(Weighting("mean")))
        output = parts.forward(0)
        loss = output["loss"] if isinstance(output, dict) else output
        parts.weighted(0, loss).backward()
        return parts.run(start=1) if len(parts) > 1 else parts.result()

    dry = replay(TrainingStep(model, batch, SAMPLES, step), OffloadPlan(sub_batch))

    assert measured(model, batch, train) == pytest.approx(dry.peak_bytes, abs=FEW_BYTES)


def test_a_whole_batchs_outputs_are_there_while_weights_are_updated() -> None:
    model, batch = classifier()
    optimizer = torch.optim.Adam(model.parameters())
    steps = (TrainingStep(model, batch, SAMPLES, returning(model, what), [optimizer]) for what in ("loss", "logits"))
    loss, logits = (profile_step(step).trace.update_peak_bytes for step in steps)
    assert logits == loss + LOGITS


def test_parts_are_joined_in_one_tensor() -> None:
    """Half of what all parts' tensors and a joined one would need."""
    model, batch = classifier()
    peaks = {
        what: measured(
            model, batch, SubBatches(model, returning(model, what), batch, 2, Certificate(Weighting("mean"))).run
        )
        for what in ("loss", "logits")
    }
    part = LOGITS * 2 // SAMPLES
    assert LOGITS <= peaks["logits"] - peaks["loss"] <= LOGITS + 2 * part


def test_what_is_saved_and_returned_is_one_storage() -> None:
    model, batch = classifier()

    def step(part: Any, returned: bool) -> Any:
        hidden = model(part[0]).sigmoid()  # saved by sigmoid and by square
        loss = hidden.square().sum()
        return {"loss": loss, "hidden": hidden, "same": hidden[:, :3]} if returned else loss

    with_it, without = (
        profile_step(TrainingStep(model, batch, SAMPLES, lambda part, how=how: step(part, how)))
        for how in (True, False)
    )
    assert sum(s.nbytes for s in with_it.trace.storages) == sum(s.nbytes for s in without.trace.storages)
    assert with_it.peak_bytes - without.peak_bytes in (0, LOGITS)


def test_what_the_model_keeps_is_not_counted_for_each_part() -> None:
    model, batch = classifier()
    weight = model[2].weight

    def step(part: Any) -> Any:
        return {"loss": F.cross_entropy(model(part[0]), part[1]), "weight": model[2].weight}

    peaks = [replay(TrainingStep(model, batch, SAMPLES, run), OffloadPlan(4)).peak_bytes
             for run in (step, returning(model, "loss"))]  # fmt: skip
    assert peaks[0] - peaks[1] < weight.nbytes


@pytest.mark.parametrize("what", ["logits", "fixed"])
def test_peaks_for_other_sizes_know_outputs(what: str) -> None:
    model, batch = classifier()
    memory = StepMemory(TrainingStep(model, batch, SAMPLES, returning(model, what)), part_sizes(SAMPLES, 2))
    for sub_batch in memory.sub_batches:
        for plan in (memory.plan(sub_batch), memory.plan(sub_batch, all_of=True)):
            exact, _ = memory.exact_bytes(plan)
            # What has no entry a sample grows with the number of parts, which is no line over the size of one.
            assert memory.peak_bytes(plan) >= 0.99 * exact
            if what == "logits":
                assert memory.peak_bytes(plan) <= 1.02 * exact
    whole, _ = memory.exact_bytes(memory.plan(SAMPLES))
    assert memory.floor.bytes > LOGITS if what == "logits" else memory.floor.bytes == whole  # parts would need more


def test_real_runs_of_few_samples_know_the_whole_batchs_outputs() -> None:
    """Where a step reads values, parts of small batches say what parts of the batch need."""
    model, batch = classifier()

    def reads(part: Any) -> Any:
        output = returning(model, "logits")(part)
        float(output["loss"])
        return output

    memory = StepMemory(TrainingStep(model, batch, SAMPLES, reads), (64, 8, 4))
    exact = replay(TrainingStep(model, batch, SAMPLES, returning(model, "logits")), OffloadPlan(8)).peak_bytes
    assert memory.plain is None
    assert memory.peak_bytes(memory.plan(8)) == pytest.approx(exact, rel=0.05)


def test_a_budget_that_outputs_alone_would_break_is_refused(splits: None) -> None:
    budget = 3 * LOGITS  # sub-batches need less than half of that beside the outputs
    for what, room in (("loss", budget), ("logits", budget), ("logits", LOGITS)):
        model, batch = classifier()
        budgeted = BudgetedStep(model, [], room, HostNull())
        step = returning(model, what)
        if room == LOGITS:
            with pytest.raises(BudgetError):
                budgeted.run(step, batch)
        else:
            budgeted.run(step, batch)
            model.zero_grad()
            choice = budgeted.report().shapes[-1].choice
            peak = measured(model, batch, lambda budgeted=budgeted, step=step, batch=batch: budgeted.run(step, batch))
            assert peak <= choice.peak_bytes + FEW_BYTES
            assert choice.peak_bytes <= room
            assert choice.plan.sub_batch < SAMPLES
        budgeted.remove()


def test_outputs_that_change_their_shape_are_as_before() -> None:
    ragged = WholeOutput([2, 2])
    ragged.add({"entries": torch.ones(2, 3), "same": torch.ones(2)})
    ragged.add({"entries": torch.ones(3, 3), "same": torch.zeros(2, dtype=torch.int64)})
    whole = ragged.result(lambda _: [0.5, 0.5])
    assert [tuple(value.shape) for value in whole["entries"]] == [(2, 3), (3, 3)]
    assert torch.equal(whole["same"], torch.tensor([1.0, 1.0, 0.0, 0.0]))

    missing = WholeOutput([2, 2])
    missing.add({"entries": torch.ones(2)})
    missing.add({})
    with pytest.raises(ValueError, match=r"output\['entries'\] for one sub-batch and not for another"):
        missing.result(lambda _: [0.5, 0.5])


def test_entries_are_copied_as_they_are() -> None:
    values = torch.randn(5, 2, requires_grad=True)
    outputs = WholeOutput([3, 2])
    outputs.add({"values": values[:3], "view": values[:3, :1]})
    outputs.add({"values": values[3:], "view": values[3:, :1]})
    whole = outputs.result(lambda _: [0.6, 0.4])
    assert torch.equal(whole["values"], values)
    assert torch.equal(whole["view"], values[:, :1])
    assert not whole["values"].requires_grad
    assert whole["values"].untyped_storage().nbytes() == values.nbytes


def test_a_step_that_returns_no_loss_is_told_so() -> None:
    model, batch = classifier()
    with pytest.raises(ValueError, match="must return its loss"):
        profile_step(TrainingStep(model, batch, SAMPLES, lambda part: {"logits": model(part[0])}))
