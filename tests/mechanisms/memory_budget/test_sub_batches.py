"""Training in sub-batches: the same weights after some steps, the same losses and outputs, one graph at a time."""

import copy
import weakref
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD, Adam
from torchmetrics.classification import MulticlassAccuracy

from retime.foundations.parts.combine import Certificate, NotSeparableError, Weighting, combined, combined_scalar
from retime.foundations.parts.split import loss_of
from retime.mechanisms.memory_budget.separability.certify import certify
from retime.mechanisms.memory_budget.sub_batches import SubBatches
from support.memory_steps import DETERMINISTIC, SEPARABLE, Case, classifier, contrastive, convolutional, language

STEPS = 5  # batches of each size, and the first one again
MEAN = Certificate(Weighting("mean"))


def next_batch(batch: Any, step: int) -> Any:
    """Another batch of the same kind: other samples in another order, and not always as many."""
    order = torch.randperm(11, generator=torch.Generator().manual_seed(step))[: 11 - step % 4]
    if isinstance(batch, dict):
        return {key: value[order] for key, value in batch.items()}
    return batch[order] if isinstance(batch, Tensor) else tuple(value[order] for value in batch)


def relative(one: nn.Module, two: nn.Module, start: nn.Module) -> float:
    """How far the weights are apart, against how far they have moved."""
    flat = [torch.cat([p.detach().double().flatten() for p in m.parameters()]) for m in (one, two, start)]
    return float((flat[0] - flat[1]).norm() / (flat[0] - flat[2]).norm())


@pytest.mark.parametrize("name", DETERMINISTIC)
def test_steps_in_sub_batches_are_steps(name: str) -> None:
    torch.manual_seed(7)
    case: Case = SEPARABLE[name][0]()
    model, step = case.model, case.step
    if "checkpoints" in name:
        model = case.model.apply(lambda module: module.eval() if isinstance(module, nn.Dropout) else None)
        step = quiet_checkpoints(model, reentrant=name.startswith("re"))
    else:
        switch_dropout_off(model)
    start = copy.deepcopy(model)
    found = certify(step, case.batch, model)

    def trained(sub_batch: int | None) -> tuple[nn.Module, list[float]]:
        model.load_state_dict(start.state_dict())
        optimizer = SGD(model.parameters(), 0.05, momentum=0.9)
        certificate, seen = found, []
        for number in range(STEPS):
            batch = next_batch(case.batch, number)
            optimizer.zero_grad()
            if sub_batch is None:
                loss = loss_of(step(batch))
                loss.backward()
            else:
                parts = SubBatches(model, step, batch, sub_batch, certificate)
                certificate = parts.certificate
                assert max(parts.samples) <= sub_batch
                loss = loss_of(parts.run())
            seen.append(float(loss.detach()))
            optimizer.step()
        return copy.deepcopy(model), seen

    plain, losses = trained(None)
    assert relative(plain, start, start) == 1, "nothing was trained"
    for sub_batch in (1, 3, 4):
        ours, seen = trained(sub_batch)
        assert relative(plain, ours, start) <= 1e-5, sub_batch
        assert seen == pytest.approx(losses, rel=1e-5), sub_batch


def switch_dropout_off(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, nn.Dropout | nn.Dropout2d):
            module.eval()
    if hasattr(model, "kind"):
        model.training = False


def quiet_checkpoints(model: nn.Module, reentrant: bool) -> Any:
    from torch.utils.checkpoint import checkpoint

    def step(batch: tuple[Tensor, Tensor]) -> Tensor:
        hidden = model[0](batch[0])
        return F.cross_entropy(checkpoint(model[1:], hidden, use_reentrant=reentrant), batch[1])

    return step


def test_the_output_is_the_whole_batchs() -> None:
    torch.manual_seed(0)
    case = classifier(convolutional())

    def step(batch: Any) -> dict[str, Any]:
        guesses = case.model(batch[0])
        hits = (guesses.argmax(1) == batch[1]).sum()
        return {
            "loss": F.cross_entropy(guesses, batch[1]),
            "right": hits,
            "accuracy": hits / len(batch[1]),
            "guesses": guesses,
            "names": [str(int(label)) for label in batch[1]],
            "samples": len(batch[1]),
            "epoch": "first",
        }

    whole = step(case.batch)
    certificate = certify(step, case.batch, case.model)

    parts = SubBatches(case.model, step, case.batch, 4, certificate).run()

    assert list(parts) == list(whole)
    assert (parts["names"], parts["epoch"], parts["samples"]) == (whole["names"], "first", 11)
    assert parts["right"].dtype == whole["right"].dtype
    assert torch.equal(parts["right"], whole["right"])
    for key in ("loss", "accuracy", "guesses"):
        torch.testing.assert_close(parts[key], whole[key].detach())
        assert not parts[key].requires_grad


def test_a_metric_of_torchmetrics_adds_up() -> None:
    torch.manual_seed(0)
    case = classifier(convolutional())
    once, often = MulticlassAccuracy(num_classes=5), MulticlassAccuracy(num_classes=5)
    once.update(case.model(case.batch[0]), case.batch[1])

    def step(batch: Any) -> Tensor:
        often.update(case.model(batch[0]), batch[1])
        return case.step(batch)

    SubBatches(case.model, step, case.batch, 4, MEAN).run()

    assert torch.equal(once.compute(), often.compute())


def test_parts_one_at_a_time_as_a_strategy_needs_them() -> None:
    """The first part's forward pass, then zero_grad, then everything else."""
    torch.manual_seed(0)
    case = classifier(convolutional())
    case.step(case.batch).backward()
    expected = [p.grad.clone() for p in case.model.parameters()]
    scaled: list[float] = []

    parts = SubBatches(case.model, case.step, case.batch, 4, MEAN)
    first = parts.forward(0)
    case.model.zero_grad()
    parts.weighted(0, first).backward()

    def backward(loss: Tensor) -> None:
        scaled.append(float(loss.detach()))
        loss.backward()

    result = parts.run(backward, start=1)

    assert len(scaled) == len(parts) - 1 == 2
    torch.testing.assert_close([p.grad for p in case.model.parameters()], expected)
    torch.testing.assert_close(result, case.step(case.batch).detach())


def test_only_one_parts_graph_is_alive() -> None:
    case = classifier(convolutional())
    alive: list[weakref.ref[Tensor]] = []
    most = 0

    def watch(_: nn.Module, __: Any, output: Tensor) -> None:
        nonlocal most
        alive.append(weakref.ref(output))
        most = max(most, sum(reference() is not None for reference in alive))

    case.model[0].register_forward_hook(watch)

    SubBatches(case.model, case.step, case.batch, 2, MEAN).run()

    assert len(alive) == 6
    assert most == 1


def test_a_part_with_nothing_to_learn_from_is_left_out() -> None:
    torch.manual_seed(0)
    case = language()
    switch_dropout_off(case.model)
    case.batch["labels"][4:8] = -100
    loss_of(case.step(case.batch)).backward()
    expected = [p.grad.clone() for p in case.model.parameters()]
    case.model.zero_grad()
    certificate = certify(case.step, case.batch, case.model)

    parts = SubBatches(case.model, case.step, case.batch, 4, certificate)
    result = parts.run()

    assert parts.weights[1] == 0
    torch.testing.assert_close([p.grad for p in case.model.parameters()], expected)
    torch.testing.assert_close(result["loss"], case.step(case.batch)["loss"].detach())


def test_what_is_not_separable_is_refused_unless_it_fits_whole() -> None:
    case = contrastive()
    certificate = certify(case.step, case.batch, case.model)

    with pytest.raises(NotSeparableError, match="samples of a batch influence one another"):
        SubBatches(case.model, case.step, case.batch, 4, certificate)
    whole = SubBatches(case.model, case.step, case.batch, 11, certificate)

    assert whole.weights == [1.0]
    torch.testing.assert_close(whole.run(), case.step(case.batch).detach())


def test_parts_run_in_order_and_once() -> None:
    case = classifier(convolutional())
    parts = SubBatches(case.model, case.step, case.batch, 4, MEAN)

    with pytest.raises(RuntimeError, match="sub-batch 1 is not next: run 0 of 3 first"):
        parts.forward(1)
    with pytest.raises(RuntimeError, match="only 0 of 3"):
        parts.result()


def test_a_hook_that_cuts_otherwise_is_refused() -> None:
    def into_two(batch: Tensor, sub_batch: int) -> list[Tensor]:
        return list(batch.split(1 if sub_batch == 1 else 6))

    with pytest.raises(ValueError, match=r"parts of 6, 5 samples for sub_batch=8 of a batch of 11"):
        SubBatches(nn.Identity(), torch.sum, torch.ones(11), 4, MEAN, split=into_two)


def test_the_optimizer_sees_one_step() -> None:
    torch.manual_seed(0)
    case = classifier(convolutional())
    state = copy.deepcopy(case.model.state_dict())
    ends = []
    for sub_batch in (11, 2):
        case.model.load_state_dict(state)
        optimizer = Adam(case.model.parameters(), 1e-3)
        for number in range(STEPS):
            optimizer.zero_grad()
            SubBatches(case.model, case.step, next_batch(case.batch, number), sub_batch, MEAN).run()
            norm = nn.utils.clip_grad_norm_(case.model.parameters(), 0.1)
            assert float(norm) > 0.1, "nothing to clip"
            optimizer.step()
        assert {int(s["step"]) for s in optimizer.state.values()} == {STEPS}
        ends.append(torch.cat([p.detach().flatten() for p in case.model.parameters()]))

    torch.testing.assert_close(ends[0], ends[1], rtol=1e-4, atol=1e-6)


def test_scalars_are_combined_without_losing_digits() -> None:
    half = [torch.tensor(1.0, dtype=torch.bfloat16)] + [torch.tensor(0.002, dtype=torch.bfloat16)] * 100

    assert combined_scalar([1, 2, 3], [1.0, 1.0, 1.0]) == 6
    assert isinstance(combined_scalar([1, 2, 3], [1.0, 1.0, 1.0]), int)
    assert isinstance(combined_scalar([3, 3], [0.75, 0.25]), int)
    assert combined_scalar([1.0, 4.0], [0.75, 0.25]) == 1.75
    assert combined_scalar([1.0, float("nan")], [1.0, 0.0]) == 1.0
    assert combined_scalar([torch.tensor(2), torch.tensor(5)], [1.0, 1.0]).dtype == torch.int64
    assert float(combined_scalar(half, [1.0] * 101)) == pytest.approx(1.2, abs=0.01)
    assert combined_scalar([torch.tensor(3), torch.tensor(4)], [0.5, 0.5]) == torch.tensor(3.5)


def test_outputs_of_different_structure_are_refused() -> None:
    with pytest.raises(ValueError, match=r"output\['b'\] for one sub-batch and not for another"):
        combined([{"a": 1, "b": 2}, {"a": 1}], [1, 1], lambda _: [0.5, 0.5])
    assert combined([{"a": None, "m": {1: 2}}] * 2, [1, 1], lambda _: [0.5, 0.5]) == {"a": None, "m": {1: 2.0}}
    odd = combined([torch.ones(3), torch.ones(2)], [4, 4], lambda _: [0.5, 0.5])
    assert [len(value) for value in odd] == [3, 2]
