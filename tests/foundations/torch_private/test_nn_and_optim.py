"""Canaries of the private names of layers, optimizers, torch.compile and DDP: see ``private_canaries``."""

import gc
from collections.abc import Callable, Iterable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules import module as module_hooks
from torch.nn.parallel import DistributedDataParallel
from torch.optim import optimizer as optimizer_hooks

from retime.foundations.torch_private import PrivateNameError, distributed, engine, nn_and_optim
from support.private_canaries import Operations, canary, dies


@canary("BatchNormBase", breaks="the memory budget's care for BatchNorm")
def test_memory_budget_finds_batch_norms():
    for layer in (nn.BatchNorm1d(2), nn.BatchNorm2d(2), nn.BatchNorm3d(2), nn.SyncBatchNorm(2), nn.LazyBatchNorm1d()):
        assert isinstance(layer, nn_and_optim.BatchNormBase)
    assert not isinstance(nn.LayerNorm(2), nn_and_optim.BatchNormBase)


@canary("ConvBase", breaks="the search for convolutions of vDNN, the memory budget's peer")
def test_vdnn_finds_convolutions():
    for layer in (nn.Conv1d(1, 1, 1), nn.Conv2d(1, 1, 1), nn.ConvTranspose2d(1, 1, 1)):
        assert isinstance(layer, nn_and_optim.ConvBase)
    assert not isinstance(nn.Linear(1, 1), nn_and_optim.ConvBase)


def assert_seen(hooks: Callable[[], Iterable[object]], *registers: Callable[..., Any]) -> None:
    """Hooks are seen while they are registered, each kind by itself."""
    for register in registers:
        assert not any(hooks())
        handle = register(lambda *_: None)
        try:
            assert any(hooks())
        finally:
            handle.remove()
    assert not any(hooks())


@canary("backward_hooks", breaks="refusing backward fusion and re-ordering beside module backward hooks")
def test_backward_fusion_sees_module_backward_hooks():
    layer = nn.Linear(1, 1)
    kinds = (layer.register_full_backward_hook, layer.register_full_backward_pre_hook)
    assert_seen(lambda: nn_and_optim.backward_hooks(layer), *kinds)


@canary("global_backward_hooks", breaks="plain steps of backward fusion beside global module backward hooks")
def test_backward_fusion_sees_global_backward_hooks():
    kinds = (module_hooks.register_module_full_backward_hook, module_hooks.register_module_full_backward_pre_hook)
    assert_seen(nn_and_optim.global_backward_hooks, *kinds)


@canary("global_forward_hooks", breaks="calls without a CUDA graph beside global module hooks")
def test_graphs_see_global_forward_hooks():
    kinds = (module_hooks.register_module_forward_hook, module_hooks.register_module_forward_pre_hook)
    assert_seen(nn_and_optim.global_forward_hooks, *kinds)


@canary("forward_hooks", "forward_pre_hooks", breaks="ScanSequential's care for layers with hooks")
def test_scan_sequential_sees_forward_hooks():
    layer = nn.Linear(1, 1)
    assert not nn_and_optim.forward_hooks(layer)
    assert not nn_and_optim.forward_pre_hooks(layer)
    layer.register_forward_hook(print)
    layer.register_forward_pre_hook(repr)
    assert list(nn_and_optim.forward_hooks(layer).values()) == [print]
    assert list(nn_and_optim.forward_pre_hooks(layer).values()) == [repr]


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning", "ignore:.*torch.jit:FutureWarning")
@canary("SCRIPTED", breaks="forward fusion, whose updates come before TorchScript reads parameters")
def test_scripted() -> None:
    function = torch.jit.trace(torch.neg, torch.ones(1))
    module = torch.jit.trace(nn.ReLU(), torch.ones(1))
    assert [type(function), type(module.forward)] == list(nn_and_optim.SCRIPTED)
    assert all("__call__" in vars(one) for one in nn_and_optim.SCRIPTED)


@canary("own_parameters", breaks="out-of-order weight gradients' stand-ins")
def test_out_of_order_puts_stand_ins_into_layers():
    layer = nn.Linear(2, 1, bias=False)
    other = torch.ones(1, 2)
    nn_and_optim.own_parameters(layer)["weight"] = other
    assert layer.weight is other
    assert layer(torch.ones(2)).item() == 2


@canary("own_buffers", breaks="batchnorm='ghost' of layers without running statistics")
def test_ghost_batch_norm_gets_statistics():
    layer = nn.BatchNorm1d(1, affine=False, track_running_stats=False)
    nn_and_optim.own_buffers(layer)["running_mean"] = torch.ones(1)
    nn_and_optim.own_buffers(layer)["running_var"] = torch.ones(1)
    layer.training = False
    assert layer(torch.ones(2, 1)).count_nonzero() == 0


@canary("flat_weights", "flat_weights_names", "weight_names", breaks="the conversion of recurrent layers (ScanLSTM)")
def test_converted_recurrent_layers_find_their_weights():
    layer = nn.LSTM(2, 3, num_layers=2, bidirectional=True)
    names = nn_and_optim.weight_names(layer)
    assert names[1] == ["weight_ih_l0_reverse", "weight_hh_l0_reverse", "bias_ih_l0_reverse", "bias_hh_l0_reverse"]
    assert nn_and_optim.flat_weights_names(layer) == [name for part in names for name in part]
    assert all(
        weight is getattr(layer, name)
        for weight, name in zip(nn_and_optim.flat_weights(layer), [n for part in names for n in part], strict=True)
    )


@canary("FLAT_WEIGHTS", "FLAT_WEIGHTS_NAMES", breaks="cuDNN's layout of converted recurrent layers")
def test_converted_recurrent_layers_are_flattened():
    reads = []

    class Part(SimpleNamespace):
        def __getattribute__(self, name):
            reads.append(name)
            return super().__getattribute__(name)

    given = {nn_and_optim.FLAT_WEIGHTS: [torch.ones(1)], nn_and_optim.FLAT_WEIGHTS_NAMES: ["weight_ih_l0"]}
    nn.RNNBase.flatten_parameters(Part(**given))
    assert {nn_and_optim.FLAT_WEIGHTS, nn_and_optim.FLAT_WEIGHTS_NAMES} <= set(reads)


@canary("recurrent_kernels", breaks="the forward pass of converted recurrent layers")
def test_converted_recurrent_layers_run_torchs_kernels():
    layer, x, state = nn.GRU(2, 3), torch.randn(4, 1, 2), torch.zeros(1, 1, 3)
    weights = nn_and_optim.flat_weights(layer)
    output, _ = nn_and_optim.recurrent_kernels.gru(x, state, weights, True, 1, 0.0, True, False, False)
    assert torch.equal(output, layer(x)[0])
    assert all(hasattr(nn_and_optim.recurrent_kernels, name) for name in ("rnn_tanh", "rnn_relu", "lstm"))


@canary("step_hooks", breaks="refusing fusion beside an optimizer's step hooks")
def test_fusion_sees_step_hooks():
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))])
    kinds = (optimizer.register_step_pre_hook, optimizer.register_step_post_hook)
    assert_seen(lambda: nn_and_optim.step_hooks(optimizer), *kinds)


@canary("global_step_hooks", breaks="refusing fusion beside step hooks of all optimizers")
def test_fusion_sees_global_step_hooks():
    kinds = (optimizer_hooks.register_optimizer_step_pre_hook, optimizer_hooks.register_optimizer_step_post_hook)
    assert_seen(nn_and_optim.global_step_hooks, *kinds)


@canary("STEP_HOOKS", breaks="the dry run of an optimizer, which must not call the user's step hooks")
def test_dry_run_of_an_optimizer_calls_no_hooks():
    calls = []
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))])
    optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    optimizer.register_step_post_hook(lambda *_: calls.append("after"))
    for name in nn_and_optim.STEP_HOOKS:
        optimizer.__dict__[name] = {}
    optimizer.step()
    assert calls == []


@canary("INIT_GROUP", breaks="fusion's knowledge of which optimizers are torch's own")
def test_fusion_knows_torchs_optimizers():
    for kind in (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.RMSprop, torch.optim.Adagrad):
        assert getattr(kind, nn_and_optim.INIT_GROUP).__module__.startswith("torch.optim")
    called = []

    class Own(torch.optim.SGD):
        pass

    setattr(Own, nn_and_optim.INIT_GROUP, lambda *_: called.append(True))
    parameter = nn.Parameter(torch.ones(1))
    parameter.grad = torch.ones(1)
    Own([parameter]).step()
    assert called == [True]


@canary("foreach_clamp_min", "foreach_clamp_max", breaks="clipping by value in backward fusion")
def test_backward_fusion_clips_as_torch_does():
    gradients = [torch.tensor([-3.0, 0.5, 2.0]), torch.tensor([4.0])]
    nn_and_optim.foreach_clamp_min(gradients, -1)
    nn_and_optim.foreach_clamp_max(gradients, 1)
    assert [gradient.tolist() for gradient in gradients] == [[-1, 0.5, 1], [1]]


@canary("foreach_add", "fused_adam_kernel", "fused_adamw", breaks="optimizer fusion's way around Optimizer.step")
@pytest.mark.parametrize("kernel", ["fused_adamw", "decoupled", "coupled"])
def test_bucket_is_updated_as_by_a_fused_step(kernel: str) -> None:
    weight = nn.Parameter(torch.ones(3))
    weight.grad = torch.arange(3.0)
    mine, first, second, step = weight.detach().clone(), torch.zeros(3), torch.zeros(3), torch.zeros(())
    kind = torch.optim.Adam if kernel == "coupled" else torch.optim.AdamW
    kind([weight], lr=0.1, weight_decay=0.1, fused=True).step()
    nn_and_optim.foreach_add([step], 1)
    assert step == 1
    options = {"lr": 0.1, "beta1": 0.9, "beta2": 0.999, "weight_decay": 0.1, "eps": 1e-8}
    own = nn_and_optim.fused_adam_kernel(decoupled=kernel == "decoupled")
    update = nn_and_optim.fused_adamw if kernel == "fused_adamw" else own
    update([mine], [weight.grad], [first], [second], [], [step], amsgrad=False, maximize=False, **options)
    assert torch.equal(mine, weight)


@canary("compiled_call", "has_compile_mark", breaks="forward fusion beside torch.compile")
def test_forward_fusion_sees_compiled_modules():
    layer = nn.Linear(1, 1)
    assert not engine.compiled_call(layer)
    assert not engine.has_compile_mark(layer)
    wrapped = torch.compile(layer, backend="eager")
    assert engine.has_compile_mark(wrapped)
    assert not engine.compiled_call(layer)
    layer.compile(backend="eager")
    assert engine.compiled_call(layer)
    assert engine.has_compile_mark(layer)


@canary("compilation_callbacks", breaks="forward fusion, whose updates must run before code is compiled,")
def test_forward_fusion_is_told_of_compilation():
    calls = []

    def tell(_):
        calls.append(True)

    torch._dynamo.reset()  # it forgets these functions too
    engine.compilation_callbacks.register_start_callback(tell)
    try:
        torch.compile(lambda x: x + 1, backend="eager")(torch.ones(1))
    finally:
        engine.compilation_callbacks.remove_start_callback(tell)
    assert calls
    torch._dynamo.reset()


@canary("compiled_backends", "stance_callback_replaced", breaks="compiled code in steps that a memory budget splits")
def test_memory_budget_runs_compiled_code_uncompiled():
    torch._dynamo.reset()
    met = []

    def noting(chosen):
        def choose(callback):
            met.append(callback)
            return chosen(callback)

        return choose

    compiled = []

    def backend(graph, _):
        compiled.append(graph)
        return graph.forward

    function = torch.compile(lambda x: x + 1, backend=backend)
    with torch.compiler.set_stance("force_eager"), engine.stance_callback_replaced(noting):
        function(torch.ones(1))
    assert any(callback not in (None, False) for callback in met)
    assert compiled == []
    count = len(met)
    function(torch.ones(1))
    assert len(met) == count
    assert len(compiled) == 1
    assert any(known is not None for known in engine.compiled_backends().values())
    torch._dynamo.reset()


@pytest.fixture
def wrap(one_rank) -> Iterator[Callable[[], DistributedDataParallel]]:
    """Makes models; none may outlive its group, whose last reference would join gloo's threads with the GIL held."""
    yield lambda: DistributedDataParallel(nn.Linear(2, 2))
    gc.collect()


@canary("has_rebuilt_buckets", "GradBucket", breaks="knowing when DDP's buckets are final (ooo_ddp, memory_budget_ddp)")
def test_out_of_order_knows_when_buckets_are_final(wrap):
    wrapped = wrap()
    seen, buckets = [], []

    def hook(_: object, bucket: distributed.GradBucket) -> torch.futures.Future[torch.Tensor]:
        buckets.append(bucket)
        return dist.all_reduce(bucket.buffer(), async_op=True).get_future().then(lambda done: done.value()[0])

    wrapped.register_comm_hook(None, hook)
    for _ in range(3):
        wrapped(torch.ones(1, 2)).sum().backward()
        seen.append(distributed.has_rebuilt_buckets(wrapped))
    assert seen == [False, True, True]
    assert isinstance(buckets[0], distributed.GradBucket)
    assert buckets[0].buffer().numel() == 6


@canary("joins_uneven_inputs", "join_reader", breaks="ooo_ddp and communication hooks inside of DDP's join()")
def test_out_of_order_sees_join(wrap):
    wrapped = wrap()
    joins = distributed.join_reader(wrapped)
    assert not distributed.joins_uneven_inputs(wrapped)
    assert not joins(wrapped)
    with wrapped.join():
        assert distributed.joins_uneven_inputs(wrapped)
        assert joins(wrapped)
        wrapped(torch.ones(1, 2)).sum().backward()


@canary("divides_by_ranks_left", breaks="gradients of ranks in DDP's join(divide_by_initial_world_size=False)")
def test_communication_hooks_see_who_divides(wrap):
    wrapped = wrap()
    assert not distributed.divides_by_ranks_left(wrapped)
    for initial in (True, False):
        with wrapped.join(divide_by_initial_world_size=initial):
            assert distributed.divides_by_ranks_left(wrapped) is not initial
            wrapped(torch.ones(1, 2)).sum().backward()


@canary("COLLECTIVE_NAMESPACES", breaks="refusing collectives in training_step under memory_budget_ddp")
def test_memory_budget_meets_collectives(wrap):
    wrapped = wrap()
    from torch.distributed._functional_collectives import all_reduce

    for collective in (dist.all_reduce, lambda x: all_reduce(x, "sum", wrapped.process_group).wait()):
        with Operations() as mode:
            collective(torch.ones(1))
        assert {func.namespace for func in mode.seen} & set(distributed.COLLECTIVE_NAMESPACES)


def test_an_attribute_that_is_gone_is_named_with_its_feature(wrap):
    wrapped = wrap()
    del wrapped._has_rebuilt_buckets
    with pytest.raises(PrivateNameError, match=r"'_has_rebuilt_buckets', which out-of-order"):
        distributed.has_rebuilt_buckets(wrapped)


@canary("foreach_classes", breaks="multi-tensor kernels of forward fusion's updates")
def test_forward_fusion_takes_multi_tensor_kernels():
    class Mine(nn.Parameter):
        pass

    def is_taken() -> bool:
        fused, _ = optimizer_hooks._default_to_fused_or_foreach([Mine(torch.ones(1))], False, use_fused=True)
        return fused

    assert nn.Parameter in nn_and_optim.foreach_classes
    assert not is_taken()
    nn_and_optim.foreach_classes.append(Mine)
    try:
        assert is_taken()
    finally:
        nn_and_optim.foreach_classes.remove(Mine)


@pytest.mark.parametrize("always", [False, True])
def test_canaries_die_of_a_ddp_that_tells_nothing(always, wrap, monkeypatch):
    for test, name in (
        (test_out_of_order_knows_when_buckets_are_final, "has_rebuilt_buckets"),
        (test_out_of_order_sees_join, "joins_uneven_inputs"),
    ):
        monkeypatch.setattr(distributed, name, lambda model: always)
        dies(test, wrap)


@pytest.mark.parametrize(
    ("test", "name"),
    [(test_backward_fusion_sees_module_backward_hooks, "backward_hooks"), (test_fusion_sees_step_hooks, "step_hooks")],
)
def test_canaries_die_of_hooks_that_lie_elsewhere(test, name, monkeypatch):
    monkeypatch.setattr(nn_and_optim, name, lambda thing: False)
    dies(test)


def test_the_canary_dies_of_kernels_chosen_in_another_way(monkeypatch):
    monkeypatch.setattr(nn_and_optim, "foreach_classes", list(nn_and_optim.foreach_classes))
    dies(test_forward_fusion_takes_multi_tensor_kernels)
