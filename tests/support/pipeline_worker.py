"""One rank of the tests of mechanisms/pipeline: `python pipeline_worker.py CASE...`.

A case is a function of this file and its arguments, with a `|` between: `gradients|tied,frozen|ooo2|1`.
"""

import copy
import itertools
import os
import pickle
import random
import signal
import sys
import warnings
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from functools import cache, partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils import prune
from torch.utils.checkpoint import checkpoint

from retime.foundations.messages import DifferenceWarning, NoEffectWarning
from retime.foundations.parts import balanced_parts, samples_in
from retime.foundations.preserve_state import seed_all
from retime.mechanisms.pipeline import DeferredInitModel, PipelineError, PipelineStep, RankLostError, broadcast_state
from retime.mechanisms.pipeline.checks import all_gather_object
from retime.mechanisms.pipeline.stage import Stage
from support.pipeline_models import MODELS, WIDTH, Checkpointed, UNet, classified, made, sequential
from support.ranks import run_cases
from support.time_limits import limit_s

ALSO = {"ooo": ("ooo1", "ooo2", "ooo_v")}
"""What a schedule may be reported as, beside its own name."""
CONVENTIONAL = ("gpipe", "1f1b", "interleaved", "GPipe", "1F1B", "Interleaved1F1B", "LoopedBFS")
STEPS, MICRO_BATCHES = 2, 4
NEAR = {torch.float64: 1e-12, torch.float32: 3e-6}
"""How far a gradient may be off, in its 2-norm; one that cancels out counts as `LEAST` of the largest."""
LEAST = 1e-3
RANK, RANKS = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


def gradients(names: str, schedules: str, data: str, types: str = "float64") -> None:
    """Gradients of two steps are those of one device, with any schedule, and the model is whole afterwards.

    In float64 they are held against those of the whole batch. Of float32 a whole batch's own rounding is larger than
    what is looked for, so there one device adds up the same micro-batches.
    """
    replicas = int(data)
    stages = RANKS // replicas
    group = [dist.new_group(list(range(first, first + stages))) for first in range(0, RANKS, stages)][RANK // stages]
    others = [dist.new_group(list(range(first, RANKS, stages))) for first in range(stages)][RANK % stages]
    cases = itertools.product(names.split(","), schedules.split(","), types.split(","))
    for name, schedule, dtype in cases:
        peers = others if replicas > 1 else None
        worst = _compare(name, schedule, group, peers, RANK // stages, replicas, getattr(torch, dtype))
        print(f"{name} {schedule} {dtype} {worst:.1e}", file=sys.stderr)
    print("same")


def _compare(
    name: str, schedule: str, group: Any, others: Any, replica: int, replicas: int, dtype: torch.dtype
) -> float:
    """The largest error, relative in the 2-norm."""
    expected = [_plain(name, replica_of, replicas, dtype) for replica_of in range(replicas)]
    model, step, batch = made(name, dtype)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    pipeline = PipelineStep(
        model, group=group, data_group=others, microbatches=MICRO_BATCHES, schedule=schedule, layers="auto"
    )
    worst = 0.0
    losses = []
    for number in range(STEPS):
        results = pipeline.train(step, _shifted(batch, number + STEPS * replica), divide_by=2)
        losses += [sum(one.weight * _loss(one.output) for one in results)] if results else []
        everything = [one[number][0] for one in expected]
        largest = max(float(gradient.norm()) for gradient in everything[0].values() if gradient is not None)
        whole_norm = torch.stack([mean.norm() for mean in _means(everything)]).norm()
        error = float((pipeline.total_norm(model.parameters()) - whole_norm).abs() / whole_norm)
        assert error <= NEAR[dtype], (name, schedule, dtype, number, "norm", error)
        for parameter_name, parameter in model.named_parameters():
            if RANK % dist.get_world_size(group) not in pipeline.owners.ranks[parameter_name]:
                assert parameter.grad is None, parameter_name
                continue
            means = [one[parameter_name] for one in everything]
            if means[0] is None:
                assert parameter.grad is None, (name, schedule, parameter_name)
                continue
            mean = torch.stack(means).mean(0)  # type: ignore[arg-type]
            assert parameter.grad is not None, (name, schedule, parameter_name)
            error = float((parameter.grad - mean).norm()) / max(float(mean.norm()), LEAST * largest)
            assert error <= NEAR[dtype], (name, schedule, dtype, number, parameter_name, error)
            worst = max(worst, error)
            parameter.grad = mean.clone()  # so that errors do not add up over steps
        optimizer.step()
        optimizer.zero_grad()
    if losses:
        torch.testing.assert_close(torch.tensor(losses), torch.tensor([one[1] for one in expected[replica]]))
    report = pipeline.report()
    assert report.steps == STEPS
    assert report.schedule.lower() in ALSO.get(schedule, (schedule.lower(), schedule))
    spread = pipeline._known
    if dist.get_world_size(group) > 1:  # alone, a rank may have nothing to put off
        assert bool(spread.plan.waiting) == (schedule not in CONVENTIONAL)
    if name == "sequential":  # one backward pass where nothing waits
        waits = any(stage in spread.mine for stage, _ in spread.plan.waiting)
        assert (spread.split.passes.deferred_gradients > 0) == waits
    pipeline.restore()
    whole = dict(model.named_parameters())
    for parameter_name, value in expected[0][-1][2].items():
        torch.testing.assert_close(whole[parameter_name].detach(), value, rtol=1e-4, atol=1e-6)
    assert "forward" not in {key for module in model.modules() for key in vars(module)}
    loss = step(batch)
    (loss if isinstance(loss, Tensor) else loss["loss"]).backward()  # as ever
    return worst


def _means(everything: list[dict[str, Tensor | None]]) -> list[Tensor]:
    """The gradients of all parameters that have one, over replicas."""
    each = [[one for one in found.values() if one is not None] for found in everything]
    return [torch.stack(alike).mean(0) for alike in zip(*each, strict=True)]


@cache
def _plain(
    name: str, replica: int, replicas: int, dtype: torch.dtype
) -> list[tuple[dict[str, Tensor | None], float, dict[str, Tensor]]]:
    """Gradients, losses and weights of one device; with several replicas, of one of them, on the others' weights."""
    models = [made(name, dtype) for _ in range(replicas)]
    trained = []
    optimizers = [torch.optim.SGD(model.parameters(), 0.1) for model, _, _ in models]
    for number in range(STEPS):
        losses = []
        for index, (_, step, batch) in enumerate(models):
            whole = _shifted(batch, number + STEPS * index)
            samples = samples_in(whole)
            parts = [whole] if dtype == torch.float64 else balanced_parts(whole, -(-samples // MICRO_BATCHES))
            total = 0.0
            for part in parts:
                output = step(part)
                loss = output if isinstance(output, Tensor) else output["loss"]
                weight = 1.0 if name == "summed" else samples_in(part) / samples
                (loss * (weight / 2)).backward()
                total += weight * loss.item()
            losses.append(total)
        mine = {key: None if p.grad is None else p.grad.clone() for key, p in models[replica][0].named_parameters()}
        for tensors in zip(*(model.parameters() for model, _, _ in models), strict=True):
            if tensors[0].grad is not None:
                mean = torch.stack([one.grad for one in tensors]).mean(0)
                for one in tensors:
                    one.grad = mean.clone()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        weights = {key: p.detach().clone() for key, p in models[0][0].named_parameters()}
        trained.append((mine, losses[replica], weights))
    return trained


def _shifted(batch: Any, number: int) -> Any:
    if isinstance(batch, dict):
        return {key: _shifted(value, number) for key, value in batch.items()}
    return batch.roll(number, 0) if isinstance(batch, Tensor) else tuple(_shifted(one, number) for one in batch)


def _loss(output: Any) -> float:
    return float(output["loss"] if isinstance(output, dict) else output)


def memory() -> None:
    """Each rank keeps its share of parameters, gradients and states."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(512, 512) for _ in range(8)))
    batch = (torch.randn(512, 512),)
    step = lambda part: model(part[0]).square().mean()  # noqa: E731
    optimizer = torch.optim.AdamW(model.parameters())
    pipeline = PipelineStep(model, microbatches=4, layers_per_stage=1)  # not by measured times
    pipeline.train(step, batch)
    optimizer.step()
    sizes = {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in model.parameters()}
    states = [v for state in optimizer.state.values() for v in state.values()]
    tensors = [*states, *(p.grad for p in model.parameters() if p.grad is not None)]
    mine = sum(sizes.values()) + sum(tensor.nbytes for tensor in tensors)
    assert mine <= 0.3 * 4 * pipeline.report().parameter_bytes_of_all, mine
    print(pipeline.report())


def _assert_own_gradients(
    pipeline: PipelineStep, model: nn.Module, reference: nn.Module, rtol: float = 1e-4, atol: float = 1e-6, **more: Any
) -> None:
    """Those of this rank's layers are one device's."""
    for (name, parameter), other in zip(model.named_parameters(), reference.parameters(), strict=True):
        if RANK in pipeline.owners.ranks[name]:
            torch.testing.assert_close(parameter.grad, other.grad, rtol=rtol, atol=atol, **more)


class Beside:
    """A model over the ranks of a pipeline, and the same model on one device."""

    def __init__(self, name: str, **options: Any) -> None:
        self.model, self.step, self.batch = made(name)
        self.pipeline = PipelineStep(self.model, **{"microbatches": MICRO_BATCHES, **options})
        self.reference, self.plain, _ = made(name)

    def train(self, batch: Any, **near: Any) -> None:
        """Both, on this batch: gradients of this rank's layers are one device's."""
        self.pipeline.train(self.step, batch)
        self.plain(batch).backward()
        _assert_own_gradients(self.pipeline, self.model, self.reference, **near)


def shapes() -> None:
    """Batches of other sizes, smaller than the number of micro-batches, and longer sequences."""
    for name in ("in_place_between", "in_place_alone"):  # parts of 3 and of 2
        both = Beside(name, schedule="ooo2")
        both.train(tuple(one[:10] for one in both.batch))
        both.pipeline.remove()
    both = Beside("gpt2", schedule="ooo2")
    for samples, length in ((8, 12), (5, 12), (3, 12), (8, 9), (8, 12), (1, 4)):
        both.train({"tokens": torch.randint(0, 101, (samples, length))})
    assert both.pipeline.report().micro_batches == 1
    print("same")


def padded(names: str, schedules: str) -> None:
    """A mean over labels that are not padding, of which micro-batches have unlike numbers behind the first batch."""
    for name, schedule in itertools.product(names.split(","), schedules.split(",")):
        model, _, batch = made(name, torch.float64)
        reference, _, _ = made(name, torch.float64)
        tokens = batch[0] if name == "between" else batch["tokens"]
        pipeline = PipelineStep(model, microbatches=MICRO_BATCHES, schedule=schedule)
        for nothing in ((), (0, 1, 2), (0, 4, 5), (0, 1, 2, 3, 4, 5)):  # micro-batches have two samples, or three
            labels = tokens.clone()
            labels[list(nothing)] = -100
            if labels.dim() > 1 and nothing:
                labels[6, 3:] = -100
            results = pipeline.train(lambda part, model=model: _labelled(model, part), (tokens, labels))
            expected = _labelled(reference, (tokens, labels))
            expected.backward()
            if results:
                torch.testing.assert_close(sum(one.weight * one.output for one in results if one.weight), expected)
                assert [one.weight for one in results].count(0.0) == sum(
                    bool(one[1].eq(-100).all()) for one in balanced_parts((tokens, labels), len(tokens) // 4)
                )
            near = 1e-13 if name == "between" else 1e-7  # transformers compute losses in float32
            _assert_own_gradients(pipeline, model, reference, rtol=1e-12, atol=near)
        pipeline.remove()
    print("same")


def _labelled(model: nn.Module, part: Any) -> Tensor:
    tokens, labels = part
    if tokens.dim() > 1:
        return model(input_ids=tokens, labels=labels).loss  # type: ignore[no-any-return]
    return nn.functional.cross_entropy(model(tokens), labels)


def counted() -> None:
    """RetinaNet's loss: a sum by the number of positives, which run out in later batches and micro-batches."""
    inputs = torch.randn(8, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    positives = [[1.0, 0.0] * 4, [1.0, 1.0] + [0.0] * 6, [0.0] * 8]
    batches = [(inputs, torch.tensor(one, dtype=torch.float64)) for one in positives]

    def loss_of(model: nn.Module, part: Any) -> Tensor:
        each = nn.functional.binary_cross_entropy_with_logits(model(part[0])[:, 0], part[1], reduction="none")
        return each.sum() / (part[1] > 0).sum().clamp(min=1)

    model, _, _ = made("sequential", torch.float64)
    pipeline = PipelineStep(model, microbatches=MICRO_BATCHES)
    try:
        pipeline.train(lambda part: loss_of(model, part), batches[0])
    except PipelineError as error:
        print(error)
    assert all(parameter.grad is None for parameter in model.parameters())
    pipeline.remove()
    model, _, _ = made("sequential", torch.float64)
    reference, _, _ = made("sequential", torch.float64)
    pipeline = PipelineStep(
        model, microbatches=MICRO_BATCHES, loss_weight=lambda part: (part[1] > 0).sum().clamp(min=1)
    )
    for batch in batches:
        results = pipeline.train(lambda part: loss_of(model, part), batch)
        expected = loss_of(reference, batch)
        expected.backward()
        if results:
            torch.testing.assert_close(sum(one.weight * one.output for one in results), expected.detach())
        _assert_own_gradients(pipeline, model, reference, rtol=1e-12, atol=1e-13)
    pipeline.remove()
    print("same")


def replanned() -> None:
    """Behind the fourth step the order fits what tasks took; stages stay, and gradients are the same bits."""
    for schedule in ("ooo2", "ooo_v"):
        model, step, batch = made("sequential")
        pipeline = PipelineStep(model, microbatches=MICRO_BATCHES, schedule=schedule, layers_per_stage=1)
        pipeline.train(step, batch)
        spread = pipeline._known
        spread.planner._costs = replace(spread.planner._costs, hop_ms=0.0, message_ms=0.0)
        spread.planner.know(dict.fromkeys(range(spread.plan.stages), (1.0, 1.0, 1.0)))
        spread.planner._found.clear()
        spread.use(spread.planner.plan(MICRO_BATCHES))
        first, gradients = spread.plan, []
        for _ in range(5):
            for stage in spread.mine:  # as if output gradients took long
                took = {"F": 1.0, "O": 5.0, "W": 2.0}
                spread.times._took_ms |= {(stage, kind): [ms] * 10**4 for kind, ms in took.items()}
            model.zero_grad()
            pipeline.train(step, batch)
            gradients.append([p.grad for p in model.parameters() if p.grad is not None])
            assert (spread.plan is first) == (len(gradients) < 3)
        assert (spread.plan.stage_of, spread.plan.rank_of) == (first.stage_of, first.rank_of)
        assert spread.plan.orders != first.orders
        for one in gradients:
            assert all(map(torch.equal, one, gradients[0]))
        assert len(set(map(str, all_gather_object(spread.plan.orders, spread.place.group)))) == 1
        pipeline.remove()
    print("same")


def hollow(name: str) -> None:
    """Models on the meta device begin and train as the same model with all of its values on one device."""
    with torch.device("meta"):
        whole, _, _ = MODELS[name]()
    DeferredInitModel(whole, torch.device("cpu"), 3).fill(whole)
    _, _, batch = made(name)
    first = {key: p.detach().clone() for key, p in whole.named_parameters()}
    for part in balanced_parts(batch, -(-samples_in(batch) // MICRO_BATCHES)):
        (_with(whole, name)(part) * (samples_in(part) / samples_in(batch))).backward()
    with torch.device("meta"):
        model, _, _ = MODELS[name]()
    values = DeferredInitModel(model, torch.device("cpu"), 3)
    optimizer = torch.optim.AdamW(model.parameters())
    pipeline = PipelineStep(  # one layer a stage: stages are not cut by measured times
        model, microbatches=MICRO_BATCHES, hollow=values, layers_per_stage=1
    )
    most, fill = 0, values._fill

    def counted(modules: list[nn.Module]) -> None:
        nonlocal most
        fill(modules)
        most = max(most, sum(p.nbytes for p in values._filled))

    values._fill = counted  # type: ignore[method-assign]
    with torch.no_grad():
        before = float(_with(model, name)(batch))
    assert before == float(_with(whole, name)(batch))  # a layer has values while it runs
    pipeline.train(_with(model, name), batch)
    here = 0
    for (key, parameter), other in zip(model.named_parameters(), whole.parameters(), strict=True):
        if RANK not in pipeline.owners.ranks[key]:
            assert parameter.grad is None
            assert parameter.untyped_storage().nbytes() == parameter.element_size()
            continue
        here += parameter.nbytes
        assert torch.equal(parameter, first[key]), key
        assert parameter.grad is not None, key
        error = float((parameter.grad - other.grad).norm() / max(1e-3, float(other.grad.norm())))  # type: ignore[operator]
        assert error < 1e-5, (key, error)
    everything = sum(p.nbytes for p in whole.parameters())
    outside = sum(p.nbytes for key, p in model.named_parameters() if key in pipeline._known.outside)
    optimizer.step()
    print(f"{here / everything:.3f} {(most - outside) / everything:.3f}")
    pipeline.restore()


def _with(model: nn.Module, name: str) -> Callable[[Any], Tensor]:
    """The step of a case, on another model."""
    if name == "gpt2":
        return lambda part: model(input_ids=part["tokens"], labels=part["tokens"]).loss
    return lambda part: (model(part[0]) - part[1]).square().mean()


def numbers() -> None:
    """What a step draws in front of the layers is the same on all ranks and with all schedules.

    Also where ranks draw different numbers otherwise; Python's and NumPy's are agreed upon too.
    """
    for schedule in ("ooo2", "gpipe"):
        model, _, batch = made("sequential")

        def step(part: Any, model: nn.Module = model) -> Tensor:
            noise = torch.randn_like(part[0]) * random.random() + float(np.random.rand())
            return (model(part[0] + noise) - part[1] * noise).square().mean()

        pipeline = PipelineStep(model, microbatches=4, schedule=schedule)
        seed_all(5)
        first = int(torch.randint(2**62, ()))
        seeds = torch.randint(2**62, (4,), generator=torch.Generator().manual_seed(first)).tolist()
        seed_all(5 + RANK)
        pipeline.train(step, batch)
        after = torch.rand(3).tolist(), random.random(), np.random.rand()
        seed_all(5 + RANK)
        torch.randint(2**62, ())
        assert after == (torch.rand(3).tolist(), random.random(), np.random.rand())
        mine = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        reference, _, _ = made("sequential")
        for index, seed in enumerate(seeds):
            seed_all(seed)
            (step(tuple(one[4 * index : 4 * index + 4] for one in batch), reference) / 4).backward()
        for name, parameter in reference.named_parameters():
            if name in mine:
                torch.testing.assert_close(mine[name], parameter.grad, rtol=1e-4, atol=1e-6)
        pipeline.remove()
    _drop_alike()
    print("same")


def _drop_alike() -> None:
    """Dropout in the layers has the same masks wherever the model is cut."""
    losses, gradients = [], []
    for schedule, again in (("ooo2", False), ("gpipe", False), ("zbv", False), ("ooo2", True)):
        model, _, batch = made("sequential")
        model = nn.Sequential(*(nn.Sequential(one, nn.Dropout(0.3)) for one in model))  # type: ignore[arg-type]
        pipeline = PipelineStep(model, microbatches=4, schedule=schedule)
        torch.manual_seed(5)

        def step(part: Any, model: nn.Module = model, again: bool = again) -> Tensor:
            x = part[0]
            for layer in model:  # type: ignore[attr-defined]
                x = checkpoint(layer, x, use_reentrant=False) if again else layer(x)
            return (x - part[1]).square().mean()

        results = pipeline.train(step, batch)
        gradients.append([p.grad for p in model.parameters() if p.grad is not None])
        losses.append(pipeline.tell([float(one.output) for one in results] if results else None))
        pipeline.remove()
    assert losses[0] == losses[1] == losses[2] == losses[3], losses
    assert all(map(torch.equal, gradients[0], gradients[3]))  # a checkpoint draws the same masks again
    assert len(set(losses[0])) == len(losses[0])


def parts() -> None:
    """Layers that see micro-batches where they would see batches: a warning each, of the layers that are here.

    The spectral norm's power iteration is far from its end: what a stage gives is compared from the same beginning.
    """
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4)]
    layers[3] = nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8))  # type: ignore[call-overload]
    layers[3].parametrizations.weight[0]._v.copy_(torch.eye(8)[0])  # type: ignore[index, operator, union-attr]
    model = nn.Sequential(nn.Embedding(5, 8), *layers)
    tokens = torch.arange(8) % 5
    for count in (1, 4):
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            pipeline = PipelineStep(model, microbatches=count, schedule="1f1b")
            for _ in range(2):
                pipeline.train(lambda part: model(part[0]).square().mean(), (tokens,))
            pipeline.restore()
        print(count, *(str(one.message) for one in found if issubclass(one.category, DifferenceWarning)))


def buffers() -> None:
    """Buffers have what their layer's rank wrote, those behind the layers what the last one wrote; one micro-batch."""
    states = []
    for pipelined in (True, False):
        torch.manual_seed(0)
        layers = [nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8, affine=False)) for _ in range(4)]
        model = nn.Sequential(nn.BatchNorm1d(8, affine=False), nn.Sequential(*layers))
        model.register_buffer("seen", torch.zeros(()))

        def step(part: Any, model: nn.Module = model) -> Tensor:
            output = model(part[0])
            model.seen = model.seen + output.isfinite().sum()
            return output.square().mean()

        pipeline = PipelineStep(model, microbatches=1, schedule="1f1b", layers="1") if pipelined else None
        for number in range(3):
            batch = (torch.randn(6, 8, generator=torch.Generator().manual_seed(number)) + number,)
            _ = step(batch).backward() if pipeline is None else pipeline.train(step, batch)  # type: ignore[func-returns-value]
        if pipeline is not None:
            pipeline.restore()
        states.append(dict(model.named_buffers()))
    assert all(torch.allclose(states[0][name], states[1][name]) for name in states[1]), states
    print("same")


def begins() -> None:
    """Ranks begin with the first one's values, of a buffer that is a part of other memory too."""
    whole, model = torch.full((4, 8), float(RANK)), nn.Linear(2, 2)
    model.register_buffer("part", whole[:, :4])
    broadcast_state(model)
    assert (whole[:, :4] == 0).all()
    assert (whole[:, 4:] == RANK).all()
    print("same")


def autocast() -> None:
    """Around the whole step, as autograd's modes are a thread's own."""
    both = Beside("sequential", microbatches=1, schedule="1f1b")
    for _ in range(2):
        with torch.autocast("cpu", torch.bfloat16):
            both.train(both.batch)
    print("same")


def computed() -> None:
    """A pruned layer's weight is computed by its rank; others can copy the model, and have the weight behind it."""
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4))))
        for number in (0, 3):
            prune.l1_unstructured(models[-1][number][0], "weight", 0.3)
    model, plain = models
    batch = torch.randn(8, 8), torch.randn(8, 8)
    for one in models:
        pipeline = PipelineStep(one, microbatches=4, schedule="1f1b") if one is model else None
        optimizer = torch.optim.SGD(one.parameters(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            if pipeline is None:
                (one(batch[0]) - batch[1]).square().mean().backward()
            else:
                pipeline.train(lambda part: (model(part[0]) - part[1]).square().mean(), batch)
                elsewhere = 3 if RANK == 0 else 0
                copy.deepcopy(model[elsewhere])
            optimizer.step()
        if pipeline is not None:
            pipeline.restore()
    for number in (0, 3):
        weight, expected = model[number][0].weight, plain[number][0].weight
        assert torch.allclose(weight, expected, rtol=1e-5), number
        assert int((weight == 0).sum()) == int((expected == 0).sum()) > 0
    print("same")


def relays(name: str) -> None:
    """Steps without gradients have all values on all ranks."""
    both = Beside(name, layers="auto")
    for _ in range(3):
        both.train(both.batch)
        with torch.inference_mode(), both.pipeline.outside_whole(), both.pipeline.evaluating():
            torch.testing.assert_close(both.step(both.batch), both.plain(both.batch))
    print("same")


WRONG_MODELS = {
    "skip": "skipping",
    "written": "in_place",
    "last unused": "two_heads",
    "no chain": "attributes",
    "reentrant behind": "between",
}
WRONG_OPTIONS: dict[str, dict[str, Any]] = {
    "skip": {"schedule": "1f1b"},
    "written": {"schedule": "zbv"},
    "last unused": {"schedule": "gpipe", "layers": "layers", "split": ["layers.0", "layers.2"]},
    "no chain": {"layers": "auto"},
    "chunks": {"schedule": "zbv"},
    "no weight": {"loss_weight": lambda part: (part[0] > 9).sum()},
    "wrong weight": {"loss_weight": "tokens"},
    "path": {"layers": "nowhere"},
    "split": {"split": ["0", "9"]},
    "split order": {"split": ["0", "3", "2"]},
    "split start": {"split": ["1", "3"]},
    "split word": {"split": "equal"},
    "cap": {"activation_cap": 10},
}


def refused(name: str) -> None:
    """Bad input: the error, printed, on all ranks that see it; by a group whose messages no other case gets."""
    model, step, batch = made(WRONG_MODELS.get(name, "sequential"))
    options = {"microbatches": 4, "group": dist.new_group()} | WRONG_OPTIONS.get(name, {})
    if name == "reentrant":
        model, step, batch = classified(partial(Checkpointed, reentrant=True))
    elif name == "reentrant behind":
        model.behind, model.head = model.head, nn.Identity()
    elif name == "unet":
        model = UNet()
    elif name == "last unused":
        model.layers = nn.ModuleList([model.body, model.head, model.second])  # type: ignore
    elif name == "kept":
        model[1].register_forward_hook(lambda module, _, given: setattr(module, "kept", given.square().mean()))
    elif name == "short":
        model = nn.Sequential(nn.Linear(WIDTH, WIDTH))
    elif name == "chunks":
        model, step, _ = sequential(3)
    wrong: dict[str, Callable[[Any], Any]] = {
        "twice": lambda part: model(model(part[0])).mean(),
        "reentrant behind": lambda part: nn.functional.cross_entropy(
            checkpoint(model.behind, model(part[0]), use_reentrant=True), part[1]
        ),
        "unet": lambda part: model(part[0]).square().mean(),
        "skipped": lambda part: model[:-1](part[0]).mean(),
        "whole loss": lambda part: model(part[0]).std(),
        "no loss": lambda part: None,
        "no gradient": lambda part: model(part[0]).detach().mean(),
        "kept": lambda part: step(part) + 1e-4 * getattr(model[1], "kept", 0.0),
        "no chain": lambda part: model.body.fc3(model.body.fc3(model.embed(part[0]))).mean(),
    }
    batches = [batch, batch]
    if name in ("batches", "later batches"):
        batches = [*([batch] if name == "later batches" else []), tuple(one + RANK for one in batch)]
    elif name == "order":
        batches = [tuple(one.roll(RANK, 0) for one in batch)]
    try:
        pipeline = PipelineStep(model, **options)
        for given in batches:
            if name == "frozen" and pipeline.is_spread:
                model[0].requires_grad_(False)  # type: ignore[index]
            pipeline.train(wrong.get(name, step), given)
    except ValueError as error:  # PipelineError is one
        print(error)
        if name == "later batches":
            sys.stdout.flush()
            os._exit(0)  # as a launcher ends a process that failed
    except RankLostError:
        print("lost", flush=True)
        os._exit(0)


def lost(when: str) -> None:
    """The last rank is killed, raises or does nothing more; the other says whose message did not come."""
    model, step, batch = made("tied" if when in ("shared", "raises") else "sequential")
    group = dist.new_group(timeout=timedelta(seconds=limit_s(3 if when == "hangs" else 40)))
    pipeline = PipelineStep(model, group=group, microbatches=4)
    pipeline.train(step, batch)
    shared = [pipeline.owners.parameters[name] for name in pipeline.owners.shared]
    before = [None if one.grad is None else one.grad.clone() for one in shared]
    calls, is_last, told = 0, RANK == RANKS - 1, dist.distributed_c10d._get_default_store()

    def failing(part: Any) -> Tensor:
        nonlocal calls
        calls += 1
        number = calls  # other calls may begin before this one comes to its loss
        if is_last and number == 3:
            if when == "forward":
                _kill()
            if when == "raises":
                raise ArithmeticError("of the step's own")
            if when == "hangs":
                told.wait([when], timedelta(minutes=5))  # until the other has named this rank
                os._exit(0)
        loss: Tensor = step(part)
        if is_last and number == 3 and when == "backward":
            loss.register_hook(lambda _: _kill())
        return loss

    if is_last and when == "sends":
        Stage.get_bwd_send_ops = lambda *_: _kill()  # type: ignore[method-assign]
    if is_last and when == "shared":
        pipeline.owners.sum_shared = lambda _: _kill()  # type: ignore[method-assign]
    try:
        for _ in range(3):
            pipeline.train(failing, batch)
    except RankLostError as error:
        print(error)
        told.set(when, "1")
    except ArithmeticError as error:
        print("own", error)
    if when == "raises":
        assert any(one is not None for one in before)
        pairs = [(one.grad, grad) for one, grad in zip(shared, before, strict=True) if grad is not None]
        print("kept", all(now is not None and torch.equal(now, grad) for now, grad in pairs))
    sys.stdout.flush()
    os._exit(0)  # as a launcher ends a process that failed


def _kill() -> Any:
    os.kill(os.getpid(), signal.SIGKILL)


def splits() -> None:
    """What each rank keeps, by how layers are cut; and what is said of it on the first rank."""
    options: list[dict[str, Any]] = [{}] * 2
    options += [{"split": "fastest"}, {"split": ["0", "11"], "schedule": "1f1b", "microbatches": 32}]
    for option in options:
        model, step, batch = sequential(12)
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            pipeline = PipelineStep(model, **{"microbatches": 4, **option})
            for samples in (16, 16, 3):
                pipeline.train(step, tuple(one[:samples] for one in batch))
        report = pipeline.report()
        texts = [str(one.message) for one in found if issubclass(one.category, NoEffectWarning)]
        print(report.parameter_bytes_by_rank, pipeline._known.plan.stage_of, *texts, sep="|")
        pipeline.remove()
    print(report)


def written() -> None:
    """Writes into all parameters between steps change a rank's own, and take no memory for others'."""
    both = Beside("sequential")
    model, reference, pipeline = both.model, both.reference, both.pipeline
    both.train(both.batch)
    for one in (model, reference):
        parameters = list(one.parameters())
        with torch.no_grad():
            for p in parameters:
                p.clamp_(-0.05, 0.05)
                p.data.mul_(0.9)
                p.data = p.data.clamp(-0.04, 0.04)
                p[0] = 0.01
                p.data[1:].view(-1)[0] += 0.5
                p -= 0.1 * p
                p.div_(1 + p.norm())
                torch.clamp(p, -0.03, 0.03, out=p)
                p.copy_(p.detach() + torch.zeros_like(p).add_(0.001))
            torch._foreach_mul_(parameters, [0.5] * len(parameters))
            torch._foreach_add_(parameters, 0.001)
            torch._foreach_add_(self=parameters, other=[torch.full_like(p, 0.001) for p in parameters])
            torch._foreach_add_(other=[torch.full_like(p, 0.001) for p in parameters], self=parameters)
            nn.init.constant_(parameters[1], 0.2)
            nn.init.constant_(parameters[-1], 0.2)
    absent = [model.get_parameter(name) for name in pipeline.owners.absent]
    assert absent
    for p in absent:
        assert p.isnan().all()
        assert p.untyped_storage().nbytes() == p.element_size()
        assert type(copy.deepcopy(p)) is type(pickle.loads(pickle.dumps(p))) is nn.Parameter
        assert type(pickle.loads(pickle.dumps(p.detach()))) is type(copy.deepcopy(p.detach())) is Tensor
        assert torch.zeros_like(p).add_(1).eq(1).all()  # memory of its own
        total = torch.zeros(())
        total += p.norm()
        assert total.isnan()
    for copied, of in zip(copy.deepcopy(model).parameters(), model.parameters(), strict=True):
        assert copied.shape == of.shape
    tied = copy.deepcopy([absent[0], absent[1], absent[0], absent[1].data])
    assert tied[0] is tied[2]
    assert tied[0] is not tied[1]
    assert tied[3].shape == absent[1].shape
    model.zero_grad()
    reference.zero_grad()
    both.train(both.batch)
    pipeline.restore()
    for parameter, other in zip(model.parameters(), reference.parameters(), strict=True):
        assert type(parameter) is nn.Parameter
        assert torch.equal(parameter, other)
    print("same")


def not_a_number() -> None:
    """NaN in one sample, in the first batch or later, does to gradients what it does on one device, and to no other."""
    for first in (True, False):
        both = Beside("sequential")
        batch = both.batch
        bad = batch[0].clone(), batch[1]
        bad[0][5] = float("nan")
        for given in (bad, batch) if first else (batch, bad, batch):
            both.train(given, equal_nan=True)
            assert all(bool(p.grad.isnan().any()) == (given is bad) for p in both.reference.parameters())  # type: ignore[union-attr]
            both.model.zero_grad()
            both.reference.zero_grad()
        both.pipeline.remove()
    print("same")


def main(cases: list[str]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    run_cases(globals(), cases)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1:])
