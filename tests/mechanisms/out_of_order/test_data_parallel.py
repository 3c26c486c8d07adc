"""Out-of-order data parallel on two gloo ranks: same bits, order of sending, the search, refusals, a dying rank."""

import contextlib
import gc
import itertools
import os
import time
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Trainer
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from contract.models import Net, sines
from retime.callbacks import FuseOptimizer, ReverseFirstK
from retime.foundations.ddp.reductions import SIZES_MB, bucket_mb, measured_seconds_per_mb
from retime.foundations.measure import forget_peak, peak_so_far
from retime.foundations.messages import DifferenceWarning, NoEffectWarning
from retime.mechanisms.cpu_accumulation import HostReducer
from retime.mechanisms.out_of_order import OutOfOrderDataParallel, OutOfOrderReport
from retime.mechanisms.out_of_order.k_search import MOST_STEPS, KTuner
from retime.strategies import OOODataParallelStrategy
from retime.strategies.ooo_ddp import FIXED_BUCKET_MB
from support.paths import PYTHONPATH, SUPPORT
from support.ranks import RANK, SHARED, on_ranks, run_ranks, said_in
from support.time_limits import limit_s
from support.trainers import quiet_trainer
from support.warm_start import run_program

WIDTH = 160


def first_rank_warns(match: str) -> contextlib.AbstractContextManager[Any]:
    return pytest.warns(NoEffectWarning, match=match) if RANK == 0 else contextlib.nullcontext()


def network() -> nn.Module:
    torch.manual_seed(0)
    middle = [layer for _ in range(4) for layer in (nn.Linear(WIDTH, WIDTH), nn.ReLU(inplace=True))]
    return nn.Sequential(nn.Linear(8, WIDTH), nn.Tanh(), *middle, nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, 4))


def wrapped(**options: Any) -> DistributedDataParallel:
    return DistributedDataParallel(network(), **{"gradient_as_bucket_view": True, "bucket_cap_mb": 0.1} | options)


def loop(
    k: Any,
    *,
    cross_iteration: bool = True,
    clip: bool = False,
    micro_batches: int = 1,
    make: Any = None,
    steps: int = 5,
    **options: Any,
) -> tuple[list[Tensor], OutOfOrderReport | None]:
    """Weights, gradients and losses of a few steps; `k` None is plain DistributedDataParallel."""
    model = wrapped(**options)
    optimizer = (make or torch.optim.AdamW)(model.parameters(), lr=0.01)
    ooo = None if k is None else OutOfOrderDataParallel(model, optimizer, k=k, cross_iteration=cross_iteration)
    generator = torch.Generator().manual_seed(RANK)
    seen: list[Tensor] = []
    for step in range(steps):
        for micro_batch in range(micro_batches):
            last = micro_batch == micro_batches - 1
            with contextlib.nullcontext() if last else model.no_sync():
                loss = model(torch.randn(6, 8, generator=generator)).square().mean()
                loss.backward()
                seen.append(loss.detach())
        if clip:
            seen.append(nn.utils.clip_grad_norm_(model.parameters(), 0.1))
        if step % 3 == 1:
            seen += [parameter.grad.clone() for parameter in model.parameters()]
        optimizer.step()
        optimizer.zero_grad()
    if ooo is not None:
        ooo.remove()
    return [*seen, *(p.detach().clone() for p in model.parameters())], ooo.report() if ooo else None


def assert_same(a: list[Tensor], b: list[Tensor]) -> None:
    for one, other in zip(a, b, strict=True):
        assert torch.equal(one, other)


@on_ranks(2)
def test_same_bits() -> None:
    sgd = lambda parameters, lr: torch.optim.SGD(parameters, lr)  # noqa: E731
    cases: list[dict[str, Any]] = [
        {},
        {"clip": True, "make": sgd},
        {"micro_batches": 2},
        {"static_graph": True},
        {"bucket_cap_mb": 25},
    ]
    for case in cases:
        plain, _ = loop(None, **case)
        for k in (0, 2, 5):
            ours, report = loop(k, **case)
            assert_same(plain, ours)
            assert report.k == k
            assert report.blocks == 5
            assert report.fused_updates
            assert bool(report.deferred_gradients) == bool(k)
            assert bool(report.early_waits) == bool(case.get("clip")) or report.early_waits == 2
        assert_same(plain, loop(3, cross_iteration=False, **case)[0])


@on_ranks(2)
def test_two_forward_passes_and_one_backward_pass() -> None:
    weights = []
    for k in (None, 5, "auto"):
        model = wrapped()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        ooo = None if k is None else OutOfOrderDataParallel(model, optimizer, k=k)
        generator = torch.Generator().manual_seed(RANK)
        for _ in range(20):
            pair = [model(torch.randn(6, 8, generator=generator)) for _ in range(2)]
            (pair[0].square().mean() + pair[1].sin().mean()).backward()
            optimizer.step()
            optimizer.zero_grad()
        if ooo is not None:
            ooo.remove()
            assert ooo.report().deferred_gradients
            assert ooo.report().buffered_gradients or k == "auto"
        weights.append([parameter.detach().clone() for parameter in model.parameters()])
    assert_same(*weights[:2])
    assert_same(*weights[1:])


def odd_loop(ours: bool, odd: str) -> list[Tensor]:
    """Weights of steps with something between their passes, where one rank is late."""
    layers = [one for one in network() if not isinstance(one, nn.BatchNorm1d)]  # whose buffers are a collective's
    model = DistributedDataParallel(nn.Sequential(*layers), gradient_as_bucket_view=True, bucket_cap_mb=0.1)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    ooo = OutOfOrderDataParallel(model, optimizer, k=4) if ours else None
    generator = torch.Generator().manual_seed(RANK)
    for step in range(7):
        loss = model(torch.randn(6, 8, generator=generator)).square().mean()
        penalty = sum(p.abs().sum() for p in model.parameters()) * 0.01
        if odd == "samples" and RANK == 0 and step > 3:
            with torch.no_grad():
                model(torch.ones(2, 8))
        time.sleep(0.05 * RANK)
        loss.backward()
        if odd == "penalty":
            penalty.backward()
        if odd != "skips" or step != 3:
            optimizer.step()
        optimizer.zero_grad(set_to_none=False)
    if ooo is not None:
        ooo.remove()
    return [p.detach().clone() for p in model.parameters()]


@on_ranks(2)
def test_what_comes_between_the_passes() -> None:
    for odd in ("skips", "samples"):
        assert_same(odd_loop(False, odd), odd_loop(True, odd))


@on_ranks(2)
def test_a_second_backward_pass_that_changes_sums_on_their_way() -> None:
    with pytest.raises(RuntimeError, match="a gradient was changed while its all-reduce was on its way"):
        odd_loop(True, "penalty")


@on_ranks(2)
def test_gradients_that_a_program_keeps_for_the_next_step_are_told_of() -> None:
    copies = lambda gradients: [gradient.clone() for gradient in gradients]  # noqa: E731
    for keep, cross_iteration in itertools.product((list, copies), (False, True)):
        model = wrapped()
        optimizer = torch.optim.AdamW(model.parameters())
        ooo = OutOfOrderDataParallel(model, optimizer, k=2, divide=False, cross_iteration=cross_iteration)
        told = keep is list and RANK == 0
        with pytest.warns(DifferenceWarning, match="hold p.grad.clone") if told else contextlib.nullcontext():
            for _ in range(5):
                model(torch.randn(6, 8)).square().mean().backward()
                kept = keep(parameter.grad for parameter in model.parameters())
                optimizer.step()
                optimizer.zero_grad()
        assert kept
        ooo.remove()


@on_ranks(2)
def test_search() -> None:
    plain, _ = loop(None, steps=60)
    ours, report = loop("auto", steps=60)
    assert_same(plain, ours)
    assert sorted(report.searched) == [0, 1, 2, 3, 4]
    assert 10 < report.search_steps <= 60
    agreed = torch.tensor([report.k])
    both = [torch.zeros_like(agreed) for _ in range(2)]
    dist.all_gather(both, agreed)
    assert both[0] == both[1]


@on_ranks(2)
def test_gradients_leave_in_forward_order() -> None:
    sent: list[list[int]] = []
    model = wrapped()
    ooo = OutOfOrderDataParallel(model, torch.optim.SGD(model.parameters(), lr=0.01), k=3)
    numbers = {parameter: number for number, parameter in enumerate(model.parameters())}
    start = ooo._sending.reductions.start

    def noting(key: Any, parameters: Any, values: Tensor, *, urgent: bool) -> None:
        if urgent:
            sent.append(sorted(numbers[p] for p in parameters))
        start(key, parameters, values, urgent=urgent)

    ooo._sending.reductions.start = noting  # type: ignore[method-assign]
    import retime.mechanisms.out_of_order.data_parallel as module

    module.SMALLEST_MESSAGE_BYTES = 1
    for _ in range(4):
        sent.clear()
        model(torch.ones(2, 8)).sum().backward()
    assert [group[0] for group in sent] == [0, 2, 4]
    ooo.remove()


class OrderOfRank(nn.Module):
    """Two layers in another order on each rank: all parameters are used everywhere, so the wrapper does not mind."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        first, second = (self.a, self.b) if RANK == 0 else (self.b, self.a)
        return second(first(x))  # type: ignore[no-any-return]


@on_ranks(2)
def test_ranks_that_differ() -> None:
    results = []
    for k in (None, 1):
        model = DistributedDataParallel(OrderOfRank(), gradient_as_bucket_view=True, bucket_cap_mb=0.01)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        ooo = None if k is None else OutOfOrderDataParallel(model, optimizer, k=k)
        with contextlib.nullcontext() if k is None else first_rank_warns("different orders"):
            for _ in range(5):
                model(torch.ones(2, WIDTH)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        if ooo is not None:
            ooo.remove()
            assert ooo.report().in_order
        results.append([p.detach().clone() for p in model.parameters()])
    assert_same(*results)


@on_ranks(2)
def test_k_changes_while_training() -> None:
    plain, _ = loop(None, steps=9)
    model = wrapped()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    ooo = OutOfOrderDataParallel(model, optimizer, k=1)
    generator = torch.Generator().manual_seed(RANK)
    for step in range(9):
        loss = model(torch.randn(6, 8, generator=generator)).square().mean()
        if step > 3:
            ooo.set_k(step % 5)  # between forward and backward: counts from the next step on
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert ooo.k == 2
    ooo.remove()
    assert_same(plain[-len(list(model.parameters())) :], [p.detach() for p in model.parameters()])


@on_ranks(2)
def test_refusals() -> None:
    optimizer = torch.optim.SGD(network().parameters(), lr=0.1)
    with pytest.raises(TypeError, match="give a DistributedDataParallel"):
        OutOfOrderDataParallel(network(), optimizer)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="gradient_as_bucket_view=True"):
        OutOfOrderDataParallel(wrapped(gradient_as_bucket_view=False), optimizer)
    hooked = wrapped()
    hooked.register_comm_hook(None, lambda state, bucket: torch.futures.Future())
    with pytest.raises(ValueError, match="has one already"):
        OutOfOrderDataParallel(hooked, optimizer)
    alone = dist.new_group([RANK], use_local_synchronization=True)
    with first_rank_warns("with one process there is no communication to hide"):
        OutOfOrderDataParallel(wrapped(process_group=alone), optimizer)
    with first_rank_warns("static_graph=True"):
        OutOfOrderDataParallel(wrapped(find_unused_parameters=True), (), k=1).remove()
    model = wrapped()
    ooo = OutOfOrderDataParallel(model, torch.optim.SGD(model.parameters(), lr=0.1), k=6)
    with pytest.raises(ValueError, match="k=6, but the model has 5 blocks: 0, 2, 4, 6, 8"):
        model(torch.ones(2, 8))
    ooo.remove()
    model = wrapped()
    bounded = OutOfOrderDataParallel(model, (), k=2, max_memory=1000)
    for _ in range(2):
        model(torch.ones(2, 8)).sum().backward()
    with pytest.raises(ValueError, match="max_memory=1000 is below"):
        model(torch.ones(2, 8))
    bounded.remove()


@on_ranks(2)
def test_nothing_is_left_behind() -> None:
    groups = len(dist.distributed_c10d._world.pg_map)
    gone = []
    for k in (0, 3):
        model = wrapped()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        ooo = OutOfOrderDataParallel(model, optimizer, k=k)
        for _ in range(4):
            model(torch.ones(2, 8)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        ooo.remove()
        net = model.module
        assert not any(module._forward_hooks or module._forward_pre_hooks for module in net.modules())
        assert all(type(parameter) is nn.Parameter for parameter in net.parameters())
        gone += [weakref.ref(parameter) for parameter in net.parameters()]
        del model, optimizer, ooo, net
    gc.collect()
    assert not any(reference() is not None for reference in gone)
    assert len(dist.distributed_c10d._world.pg_map) == groups


@on_ranks(2)
def test_a_rank_that_failed_tells_the_other_at_once_where_the_host_adds_up() -> None:
    model = wrapped(broadcast_buffers=False)
    ooo = OutOfOrderDataParallel(model, torch.optim.SGD(model.parameters(), 0.1), k=1, reducer=HostReducer())
    for _ in range(3):
        model(torch.ones(2, 8)).sum().backward()
    ooo.flush()
    if RANK == 1:
        ooo.remove(failed=True)
    else:
        model(torch.ones(2, 8)).sum().backward()
        with pytest.raises(RuntimeError, match="rank 1"):
            ooo.remove()
    dist.barrier()  # it still lives


@on_ranks(2)
def test_a_removed_optimizer_is_let_go() -> None:
    model = wrapped()
    ooo = OutOfOrderDataParallel(model, k=2)

    def train() -> weakref.ref[Any]:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        updates = ooo.attach(optimizer)
        for _ in range(3):
            model(torch.ones(2, 8)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        updates.remove()
        return weakref.ref(optimizer)

    gone = [train() for _ in range(2)]
    gc.collect()
    assert not any(reference() is not None for reference in gone)
    assert ooo.report().fused_updates == 6 * len(list(model.parameters()))
    ooo.remove()


@on_ranks(2)
def test_memory_bound() -> None:
    model = wrapped()
    ooo = OutOfOrderDataParallel(model, torch.optim.SGD(model.parameters(), lr=0.1), k=5, max_memory=2**50)
    for _ in range(4):
        model(torch.ones(2 + RANK, 8)).sum().backward()
    assert ooo.k == 4  # the largest below the number of blocks that the bound was asked for
    ooo.remove()


def measured_peak_stays_below_the_bound() -> None:
    mib, layers = 2**20, 8
    inputs = torch.randn(13_107, WIDTH)  # 8 MiB, as each layer's output

    def peak_after(k: int, max_memory: int | None) -> tuple[int, int]:
        torch.manual_seed(0)
        net = nn.Sequential(*[part for _ in range(layers) for part in (nn.Linear(WIDTH, WIDTH), nn.Tanh())])
        model = DistributedDataParallel(net, gradient_as_bucket_view=True)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        ooo = OutOfOrderDataParallel(model, optimizer, k=k, max_memory=max_memory)
        for _ in range(3):
            model(inputs).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        used = ooo.k
        ooo.remove()
        return peak_so_far(), used

    plain, _ = peak_after(0, None)
    bound = plain + 12 * mib
    bounded, used = peak_after(7, bound)
    assert 0 < used < 7
    assert plain <= bounded <= bound
    with pytest.raises(ValueError, match="max_memory"):
        peak_after(7, plain // 2)
    ballast = torch.ones(256 * mib, dtype=torch.uint8)
    peak = peak_so_far()
    del ballast
    forget_peak()  # as the callback PeakMemory does in every phase
    _, used = peak_after(7, peak + 12 * mib)
    assert 0 < used < 7


def trainer(**options: Any) -> Trainer:
    return quiet_trainer(devices=2, default_root_dir=SHARED, **options)


@on_ranks(2, joined=False)
def test_k_is_kept_in_the_checkpoint() -> None:
    deep = nn.Sequential(nn.Linear(6, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 6))
    again = OOODataParallelStrategy(k="auto")
    path = SHARED / "kept.ckpt"
    seeing = trainer(strategy=again, max_steps=70, max_epochs=-1, callbacks=[Saves(path)])
    seeing.fit(Net(deep), sines(64))
    assert len(again.report().searched) == again.report().blocks
    k = again.report().k
    kept = torch.load(path, weights_only=False)
    assert kept["retime_ooo_ddp"]["bucket_cap_mb"] in SIZES_MB  # chosen by measurement, as nobody gave one
    kept["retime_ooo_ddp"]["bucket_cap_mb"] = 3  # which no measurement gives
    path = path.with_name(f"kept-{RANK}.ckpt")
    torch.save(kept, path)
    resumed = OOODataParallelStrategy(k="auto")
    last = trainer(strategy=resumed, max_steps=72, max_epochs=-1)
    last.fit(Net(deep), sines(64), ckpt_path=path, weights_only=False)
    assert resumed.report().k == k
    assert not resumed.report().searched
    assert resumed.report().bucket_bytes == 3 * 2**20
    plain = trainer(strategy="ddp", max_steps=68, max_epochs=-1)
    plain.fit(Net(deep), sines(64), ckpt_path=path, weights_only=False)
    kept["retime_ooo_ddp"]["k"] = "all"
    torch.save(kept, path)
    tampered = OOODataParallelStrategy(k="auto", bucket_cap_mb=1)
    anew = trainer(strategy=tampered, max_steps=72, max_epochs=-1)
    with first_rank_warns("k of an earlier run has no effect, and k is searched for again: k is no whole"):
        anew.fit(Net(deep), sines(64), ckpt_path=path, weights_only=False)


@on_ranks(2, joined=False)
def test_bucket_size_is_fixed_where_a_measurement_must_not_matter() -> None:
    sizes = []
    for options in ({"deterministic": True}, {}):
        strategy = OOODataParallelStrategy(k=0)
        quick = trainer(strategy=strategy, max_steps=1, **options)
        quick.fit(Net(nn.Linear(6, 6)), sines(64))
        sizes.append(strategy.report().bucket_bytes // 2**20)
        torch.use_deterministic_algorithms(False)
    assert sizes[0] == FIXED_BUCKET_MB
    assert sizes[1] in SIZES_MB
    seconds = measured_seconds_per_mb()
    assert 0 < seconds < 1
    every = [torch.zeros(1, dtype=torch.float64) for _ in range(2)]
    dist.all_gather(every, torch.tensor([seconds], dtype=torch.float64))
    assert every[0] == every[1]  # all ranks know the same, or their buckets would differ


class Saves(ReverseFirstK):
    """Sets nothing of its own, and saves a checkpoint late."""

    def __init__(self, path: Path) -> None:
        super().__init__("auto", log=False)
        self.path = path

    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        if trainer.global_step == 66:
            trainer.save_checkpoint(self.path)


@on_ranks(2, joined=False)
def test_callback_sets_k() -> None:
    deep = nn.Sequential(nn.Linear(6, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 6))
    one = trainer(strategy="ooo_ddp", max_epochs=2, callbacks=[ReverseFirstK(2)])
    one.fit(Net(deep), sines(64))
    assert one.strategy.report().k == 2  # type: ignore[attr-defined]
    assert one.callback_metrics["reverse_first_k"] == 2
    silent = trainer(strategy="ooo_ddp", max_epochs=1, callbacks=[ReverseFirstK(1, log=False)])
    silent.fit(Net(), sines(64))
    assert "reverse_first_k" not in silent.callback_metrics
    with pytest.raises(ValueError, match="strategy='ooo_ddp'"):
        trainer(strategy="ddp", callbacks=[ReverseFirstK(2)]).fit(Net(), sines(64))
    with pytest.raises(ValueError, match="fuses the optimizer already"):
        trainer(strategy="ooo_ddp", callbacks=[FuseOptimizer("forward")]).fit(Net(), sines(64))


@on_ranks(2, joined=False)
def test_accelerate_loop() -> None:
    from accelerate import Accelerator
    from accelerate.utils import DistributedDataParallelKwargs

    from retime.integrations.accelerate import OutOfOrderDataParallel as ForAccelerate

    def train(k: Any) -> tuple[list[Tensor], Any]:
        views = DistributedDataParallelKwargs(gradient_as_bucket_view=True)
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2, kwargs_handlers=[views])
        net = network()
        model, optimizer = accelerator.prepare(net, torch.optim.AdamW(net.parameters(), lr=0.01))
        ooo = None if k is None else ForAccelerate(accelerator, model, optimizer, k=k)
        generator = torch.Generator().manual_seed(RANK)
        norms = []
        for _ in range(10):
            with accelerator.accumulate(model):
                accelerator.backward(model(torch.randn(6, 8, generator=generator)).square().mean())
                if accelerator.sync_gradients:
                    norms.append(accelerator.clip_grad_norm_(model.parameters(), 0.1))
                optimizer.step()
                optimizer.zero_grad()
        if k is not None:
            folder = SHARED / "accelerate"
            accelerator.save_state(str(folder))
            accelerator.wait_for_everyone()
            accelerator.load_state(str(folder))
            if RANK == 0:  # the other rank hears of it
                for path in folder.glob("retime_*.json"):
                    path.write_text('{"k": 99}')
            with first_rank_warns("k of an earlier run has no effect"):
                accelerator.load_state(str(folder))
            ooo.remove()
            assert not [path for path in folder.iterdir() if path.name.startswith("custom_checkpoint")]
            accelerator.load_state(str(folder))  # as plain code does
        return [*norms, *(p.detach().clone() for p in net.parameters())], ooo

    plain, _ = train(None)
    ours, ooo = train(2)
    assert_same(plain, ours)
    assert ooo.report().deferred_gradients
    assert ooo.report().fused_updates
    saved = ooo._ooo.k_choice.saved
    assert (saved.k, saved.blocks) == (2, 5)


@on_ranks(2, joined=False)
def test_accelerate_refuses_a_budget_beside() -> None:
    from accelerate import Accelerator
    from accelerate.utils import DistributedDataParallelKwargs

    from retime.integrations.accelerate import FusedOptimizer, MemoryBudget
    from retime.integrations.accelerate import OutOfOrderDataParallel as ForAccelerate

    views = DistributedDataParallelKwargs(gradient_as_bucket_view=True)
    accelerator = Accelerator(cpu=True, kwargs_handlers=[views])
    net = network()
    model, optimizer = accelerator.prepare(net, torch.optim.AdamW(net.parameters(), lr=0.01))
    text = "weight gradients that wait keep activations"
    for cross_iteration in (True, False):
        ooo = ForAccelerate(accelerator, model, optimizer, k=1, cross_iteration=cross_iteration)
        with pytest.raises(ValueError, match=text):
            MemoryBudget(accelerator, model, optimizer, "1GiB")
        if not cross_iteration:
            FusedOptimizer(accelerator, model, optimizer, "forward").remove()
        ooo.remove()
        budget = MemoryBudget(accelerator, model, optimizer, "1GiB")
        with pytest.raises(ValueError, match=text):
            ForAccelerate(accelerator, model, optimizer, k=1, cross_iteration=cross_iteration)
        budget.remove()


def rank_dies_in_backward() -> None:
    from datetime import timedelta

    class Dies(Net):
        def on_after_backward(self) -> None:
            if RANK == 1 and self.global_step == 4:
                os._exit(9)

    strategy = OOODataParallelStrategy(k=1, timeout=timedelta(seconds=limit_s(15)))
    trainer(strategy=strategy, max_epochs=2).fit(Dies(), sines(64))


@pytest.mark.long
def test_memory_of_the_process_stays_below_max_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MALLOC_MMAP_THRESHOLD_", "65536")  # freed tensors leave the process at once, on glibc
    name = "measured_peak_stays_below_the_bound"
    for rank in run_ranks(2, __file__, name, warm=False):
        said_in(rank, name)


@pytest.mark.parametrize("start", [pytest.param("spawn", marks=pytest.mark.long), "fork"])
def test_names_that_start_their_own_processes(start: str, tmp_path: Path) -> None:
    said = run_program((SUPPORT / "ooo_ddp_launcher.py").read_text(), start, str(tmp_path), **PYTHONPATH)
    assert "steps: 8, blocks: 3, updates: True" in said
    assert "brought home: 8 steps" in said


def test_a_rank_that_dies_ends_the_other_with_an_error() -> None:
    first, second = run_ranks(2, __file__, "rank_dies_in_backward", timeout_s=60, joined=False)
    assert second.returncode == 9
    assert first.returncode not in (0, None)
    assert "Error" in first.stderr


def drive(tuner: KTuner, seconds_of: dict[int, float], blocks_carry: float = 0.0) -> int:
    """Steps until the search ends; a step after a change of k takes longer by what the former k left."""
    now, steps, k, debt = 0.0, 0, tuner.k, 0.0
    tuner.tick(now)
    while not tuner.is_done:
        now += seconds_of[k] + debt
        debt = 0.0
        steps += 1
        if tuner.tick(now):
            k, debt = tuner.k, blocks_carry
    return steps


@pytest.mark.parametrize(("gbit", "size"), [(100, 25), (9.2, 16), (1.92, 4), (0.8, 1), (0.01, 1)])
def test_bucket_size_follows_the_network(gbit: float, size: int) -> None:
    assert bucket_mb(8 * 2**20 / (gbit * 1e9)) == size


@pytest.mark.parametrize("blocks", [1, 2, 5, 12, 40, 100])
def test_search_ends_at_the_best_k_within_its_steps(blocks: int) -> None:
    best = blocks // 3
    tuner = KTuner(blocks, blocks, lambda seconds: seconds)
    steps = drive(tuner, {k: 1.0 + 0.02 * abs(k - best) for k in range(blocks + 1)}, blocks_carry=0.5)
    assert steps <= MOST_STEPS
    assert abs(tuner.k - best) <= (0 if blocks < 60 else 2)


def test_of_k_that_take_equally_long_the_one_with_least_memory_is_chosen() -> None:
    tuner = KTuner(6, 6, lambda seconds: seconds)
    drive(tuner, {0: 1.2, 1: 1.1, 2: 1.005, 3: 1.0, 4: 0.999, 5: 1.0, 6: 1.0})
    assert tuner.k == 2


def test_search_does_not_count_a_step_that_was_interrupted() -> None:
    tuner = KTuner(2, 2, lambda seconds: seconds)
    tuner.tick(0.0)
    tuner.tick(1.0)
    tuner.discard()
    tuner.tick(100.0)
    tuner.tick(101.0)
    tuner.tick(102.0)
    assert tuner.measured == {0: 1.0}
