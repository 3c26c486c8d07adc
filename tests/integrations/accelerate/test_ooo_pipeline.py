"""A pipeline in an Accelerate loop, against one device."""

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.data_loader import prepare_data_loader
from torch import Tensor, nn
from torch.utils.data import DataLoader

from retime.foundations.messages import NoEffectWarning
from retime.integrations.accelerate import FusedOptimizer, OutOfOrderPipeline
from retime.mechanisms.pipeline import PipelineError
from support.accelerate_pipeline import (
    ACCUMULATED,
    BATCH,
    BATCHES,
    close,
    data,
    forget_state,
    loss_of,
    net,
    optimizer_of,
    schedule_of,
)
from support.ranks import RANKS, SHARED, on_ranks


class Plain:
    """A loop on one device, with the batches of all pipelines in each of its own."""

    def __init__(self, replicas: int = 1, state: Any = None, optimizer_state: Any = None) -> None:
        self.model = net()
        self.optimizer = optimizer_of(self.model)
        self.scheduler = schedule_of(self.optimizer)
        if state is not None:
            self.model.load_state_dict(state)
            self.optimizer.load_state_dict(optimizer_state)
        self.losses: list[float] = []
        self.norms: list[float] = []
        self._replicas = replicas

    def run(self) -> None:
        parts: list[Tensor] = []
        for number, batch in enumerate(DataLoader(data(), BATCH)):
            loss = loss_of(self.model)(batch)
            (loss / ACCUMULATED / self._replicas).backward()
            parts.append(loss.item())
            if (number + 1) % (ACCUMULATED * self._replicas) == 0:
                self.norms.append(float(nn.utils.clip_grad_norm_(self.model.parameters(), 0.5)))
                self.optimizer.step()
                self.scheduler.step()
                self.optimizer.zero_grad()
        self.losses = parts


def train(pipeline: OutOfOrderPipeline, accelerator: Accelerator, parts: Any) -> tuple[list[float], list[float]]:
    """Losses of the batches, and norms of the gradients."""
    model, optimizer, scheduler, loader = parts
    losses, norms = [], []
    for batch in loader:
        with accelerator.accumulate(model):
            loss = pipeline.train_batch(batch, loss_of(model))
            assert loss.shape == ()
            assert not loss.requires_grad
            losses.append(loss.item())
            if accelerator.sync_gradients:
                norms.append(float(pipeline.clip_grad_norm_(0.5)))
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    return losses, norms


@on_ranks(2, 4, joined=False, before=forget_state)
def test_a_loop_over_ranks_is_that_of_one_device() -> None:
    """Losses, norms, weights, evaluation and checkpoints; of two pipelines on four ranks, which share the batches."""
    count = RANKS // 2
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=ACCUMULATED)
    model = net(seed=accelerator.process_index)  # the first process's values count
    plain_optimizer = optimizer_of(model)
    if count == 1:
        optimizer, scheduler = accelerator.prepare(plain_optimizer, schedule_of(plain_optimizer))
    else:
        optimizer = accelerator.prepare(plain_optimizer)
        scheduler = _When(accelerator, schedule_of(plain_optimizer))
    pipeline = OutOfOrderPipeline(
        accelerator, model, optimizer, data_parallel_size=count, microbatches=4, schedule="ooo2"
    )
    whole = pipeline.state_dict()
    assert (whole is not None) == (accelerator.process_index % (RANKS // count) == 0)
    loader = prepare_data_loader(
        DataLoader(data(), BATCH), num_processes=pipeline.data_parallel_size, process_index=pipeline.data_parallel_rank
    )
    plain = Plain(count)
    plain.run()
    losses, norms = train(pipeline, accelerator, (model, optimizer, scheduler, loader))
    close(losses, plain.losses[pipeline.data_parallel_rank :: count])
    close(norms, plain.norms)
    report = pipeline.report()
    assert report.parameter_bytes < report.parameter_bytes_of_all
    assert f"{report.steps}" == str(BATCHES // count)
    tokens = torch.arange(13)
    model.eval()
    with torch.no_grad():
        close(pipeline.evaluate(tokens, model), plain.model(tokens))
    model.train()
    state, optimizer_state = pipeline.state_dict(), pipeline.optimizer_state_dict()
    if accelerator.process_index == 0:
        close(state, dict(plain.model.state_dict()))
        close(optimizer_state["state"], plain.optimizer.state_dict()["state"])
        assert list(state) == list(plain.model.state_dict())
        again = Plain(count, state, optimizer_state)  # plain code goes on from there
        plain.run()
        again.run()
        close(again.losses, plain.losses)
    else:
        plain.run()
    payload = [state, optimizer_state]
    dist.broadcast_object_list(payload, 0)
    pipeline.restore()
    for tensor in model.parameters():
        assert not tensor.isnan().any()
    with pytest.raises(RuntimeError, match="was restored"):
        pipeline.train_batch(tokens, loss_of(model))
    pipeline.restore()
    assert pipeline.report().steps == report.steps
    if count == 1:
        _resumed(accelerator, payload)


@on_ranks(2, joined=False, before=forget_state)
def test_two_models_of_one_accelerator() -> None:
    """Two pipelines of one accelerator, of which the first ends first; folders have both."""
    accelerator = Accelerator(cpu=True)
    models, plain = [net(1), net(2)], [net(1), net(2)]
    optimizers = [accelerator.prepare(optimizer_of(model)) for model in models]
    pipelines = [
        OutOfOrderPipeline(accelerator, model, optimizer, microbatches=4)
        for model, optimizer in zip(models, optimizers, strict=True)
    ]
    folder = str(SHARED / "two models")
    ours = [optimizer_of(model) for model in plain]
    batches = list(DataLoader(data(), BATCH))
    for index, batch in enumerate(batches[:4]):
        if index == 2:
            accelerator.save_state(folder)
            pipelines[0].restore()
            for parameter, other in zip(models[0].parameters(), plain[0].parameters(), strict=True):
                close(parameter, other)
        for model, optimizer, pipeline in list(zip(models, optimizers, pipelines, strict=True))[index // 2 :]:
            pipeline.train_batch(batch, loss_of(model))
            with pytest.raises(RuntimeError, match=r"use OutOfOrderPipeline\.clip_grad_norm_"):
                accelerator.clip_grad_norm_(model.parameters(), 0.5)
            norm = pipeline.clip_grad_norm_(0.5)
            optimizer.step()
            optimizer.zero_grad()
        for model, optimizer in list(zip(plain, ours, strict=True))[index // 2 :]:
            loss_of(model)(batch).backward()
            expected = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
        close(norm, expected)
    state = accelerator.get_state_dict(models[1])
    if state is not None:
        close(dict(state), dict(plain[1].state_dict()))
    pipelines[1].restore()
    assert not {"save_state", "load_state", "clip_grad_norm_", "get_state_dict"} & vars(accelerator).keys()
    accelerator.clip_grad_norm_(models[0].parameters(), 0.5)
    accelerator.load_state(folder)
    reference = net(1)
    optimizer = optimizer_of(reference)
    for batch in batches[:2]:
        loss_of(reference)(batch).backward()
        nn.utils.clip_grad_norm_(reference.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    close(dict(models[0].state_dict()), dict(reference.state_dict()))


def _resumed(accelerator: Accelerator, told: list[Any]) -> None:
    """Another pipeline goes on from a checkpoint, as plain code does."""
    model = net(seed=9)
    plain_optimizer = optimizer_of(model)
    plain_optimizer.load_state_dict(told[1])
    model.load_state_dict(told[0])
    optimizer = accelerator.prepare(plain_optimizer)
    pipeline = OutOfOrderPipeline(accelerator, model, optimizer, microbatches=2, schedule="1f1b")
    scheduler = _When(accelerator, schedule_of(plain_optimizer))
    losses, _ = train(pipeline, accelerator, (model, optimizer, scheduler, DataLoader(data(), BATCH)))
    assert len(plain_optimizer.state) < len(list(model.parameters()))  # what other processes have is dropped
    reference = Plain(1, *told)
    reference.run()
    close(losses, reference.losses)
    pipeline.restore()


class _When:
    """A scheduler that was not prepared, stepped where a step ends."""

    def __init__(self, accelerator: Accelerator, scheduler: Any) -> None:
        self._accelerator, self._scheduler = accelerator, scheduler

    def step(self) -> None:
        if self._accelerator.sync_gradients:
            self._scheduler.step()


@on_ranks(2, joined=False, before=forget_state)
def test_what_would_train_something_else_is_refused() -> None:
    """What would train something else is refused, with what to do; what is left can be used again."""
    accelerator = Accelerator(cpu=True)
    wrapped = accelerator.prepare(net())
    optimizer = accelerator.prepare(optimizer_of(wrapped))
    with pytest.raises(ValueError, match=r"prepare only the optimizer and the scheduler, and pass the model"):
        OutOfOrderPipeline(accelerator, wrapped, optimizer)
    model = net()
    with pytest.raises(ValueError, match="parameters that are not the model's"):
        OutOfOrderPipeline(accelerator, model, optimizer)
    with pytest.raises(TypeError, match="takes the optimizer that prepare returned"):
        OutOfOrderPipeline(accelerator, model, optimizer_of(model))
    plain = optimizer_of(model)
    optimizer, scheduler = accelerator.prepare(plain, schedule_of(plain))
    with pytest.raises(ValueError, match=r"make 3 ranks, and there are 2"):
        OutOfOrderPipeline(accelerator, model, optimizer, pipeline_parallel_size=3)
    fused = FusedOptimizer(accelerator, model, optimizer, mode="forward")
    with pytest.raises(ValueError, match="forward fusion cannot work on: drop"):
        OutOfOrderPipeline(accelerator, model, optimizer)
    fused.remove()
    before = dict(vars(accelerator))
    pipeline = OutOfOrderPipeline(accelerator, model, optimizer, microbatches=2)
    with pytest.raises(ValueError, match="forward fusion cannot work on: drop"):
        FusedOptimizer(accelerator, model, optimizer, mode="forward")
    with pytest.raises(ValueError, match="another pipeline cannot work on"):
        OutOfOrderPipeline(accelerator, model, optimizer)
    with pytest.raises(RuntimeError, match=r"use OutOfOrderPipeline\.clip_grad_norm_"):
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
    other = nn.Linear(2, 2)
    other(torch.ones(2)).sum().backward()
    assert accelerator.clip_grad_norm_(other.parameters(), 1.0) > 0
    tokens = torch.arange(13)
    with pytest.raises(PipelineError, match="were given different batches"):
        pipeline.train_batch((tokens.roll(accelerator.process_index), tokens), loss_of(model))
    pipeline.restore()
    assert scheduler.split_batches is False
    assert vars(accelerator).keys() - before.keys() == {"_retime_models_in_folders"}
    pipeline = OutOfOrderPipeline(accelerator, model, optimizer, pipeline_parallel_size=2, microbatches=2)
    pipeline.train_batch((tokens, tokens), loss_of(model))
    assert scheduler.split_batches is True
    optimizer.step()
    pipeline.restore()
    assert scheduler.split_batches is False
    with pytest.raises(ValueError, match="state of different parameters"):
        OutOfOrderPipeline(accelerator, model, optimizer)
    plain.state.clear()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        alone = OutOfOrderPipeline(accelerator, model, optimizer, pipeline_parallel_size=1)
    assert alone.data_parallel_size == 2
    with pytest.raises(ValueError, match="do not prepare the scheduler"):
        alone.train_batch((tokens, tokens), loss_of(model))
    alone.restore()


@on_ranks(2, joined=False, before=forget_state)
def test_bf16_is_autocast_on_all_ranks() -> None:
    """Under bf16 the loss code runs in autocast, on the last stage's rank too."""
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    model = net()
    optimizer = accelerator.prepare(optimizer_of(model))
    pipeline = OutOfOrderPipeline(accelerator, model, optimizer, microbatches=2)
    tokens, seen = torch.arange(12), []

    def step(part: Any) -> Tensor:
        logits = model(part[0])
        seen.append(logits.dtype)
        return nn.functional.cross_entropy(logits.float(), part[1])

    loss = pipeline.train_batch((tokens, tokens.roll(1)), step)
    assert set(seen) == {torch.bfloat16}, seen
    expected = nn.functional.cross_entropy(net()(tokens), tokens.roll(1))
    torch.testing.assert_close(loss, expected.detach(), rtol=0.02, atol=0.02)
    assert all(p.grad.dtype == torch.float32 for p in model.parameters() if p.grad is not None)
    pipeline.restore()


def test_one_process_trains_as_ever() -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    inputs = torch.randn(4, 3)
    loss = model(inputs).square().mean()
    expected = torch.autograd.grad(loss / 2, model.parameters())  # type: ignore[arg-type]
    optimizer = accelerator.prepare(torch.optim.SGD(model.parameters(), 0.1))
    with pytest.warns(NoEffectWarning, match="OutOfOrderPipeline has no effect"):
        pipeline = OutOfOrderPipeline(accelerator, model, optimizer)
    assert torch.equal(pipeline.train_batch(inputs, lambda part: model(part).square().mean()), loss.detach())
    assert all(torch.equal(p.grad, found) for p, found in zip(model.parameters(), expected, strict=True))
    norm = torch.stack([found.norm() for found in expected]).norm()
    torch.testing.assert_close(pipeline.clip_grad_norm_(1e9), norm)
    assert torch.equal(pipeline.evaluate(inputs, model), model(inputs).detach())
    state, optimizer_state = pipeline.state_dict(), pipeline.optimizer_state_dict()
    assert state.keys() == model.state_dict().keys()
    assert optimizer_state == optimizer.state_dict()
    assert "no step yet" in str(pipeline.report())
    pipeline.restore()


def test_loss_scaling_is_refused() -> None:
    accelerator = Accelerator(cpu=True)
    accelerator.scaler = torch.amp.GradScaler("cpu")
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    optimizer = accelerator.prepare(torch.optim.SGD(model.parameters(), 0.1))
    with pytest.raises(ValueError, match="use mixed_precision='bf16'"):
        OutOfOrderPipeline(accelerator, model, optimizer)
