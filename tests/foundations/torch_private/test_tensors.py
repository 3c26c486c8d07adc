"""Canaries of the private names of tensors, storages and the dispatcher: see ``private_canaries``."""

import pytest
import torch
from torch import Tensor, nn

from retime.foundations.torch_private import engine, tensors
from support.private_canaries import Operations, canary, dies


@canary("version_of", breaks="seeing writes into tensors (fusion's guards, offloading)")
def test_fusion_and_offloading_see_writes():
    x = torch.zeros(2)
    before = tensors.version_of(x)
    x.add(1)
    assert tensors.version_of(x) == before
    x[:1].add_(1)
    assert tensors.version_of(x) > before
    assert tensors.version_of(nn.Parameter(torch.zeros(2))) == 0


@canary("kept_version", breaks="checkpoints around the layers of a pipeline")
def test_pipelines_write_what_a_checkpoint_has_saved():
    x = torch.ones(2, requires_grad=True)
    y = x * 1
    z = y.square()
    with torch.no_grad(), tensors.kept_version(y):
        y.mul_(1)
    z.sum().backward()
    assert x.grad.tolist() == [2, 2]


@canary("base_of", breaks="the dry run's undoing of writes into outside tensors")
def test_dry_run_tells_views():
    x = torch.zeros(2)
    assert tensors.base_of(x) is None
    assert tensors.base_of(x[:1]) is x


@canary("unsafe_view", breaks="two streams of linear layers on sequences")
def test_another_shape_is_no_view() -> None:
    x = nn.Parameter(torch.ones(2, 3)) * 2
    y = tensors.unsafe_view(x, (3, 2))
    assert tensors.base_of(y) is None
    assert y.data_ptr() == x.data_ptr()
    y.mul_(2).sum().backward()


@canary("tensor_hooks", breaks="respect for gradient hooks (out-of-order weight gradients, memory budget)")
def test_out_of_order_sees_gradient_hooks():
    x = nn.Parameter(torch.zeros(2))
    assert not tensors.tensor_hooks(x)
    handle = x.register_hook(torch.neg)
    assert list(tensors.tensor_hooks(x).values()) == [torch.neg]
    handle.remove()
    assert not tensors.tensor_hooks(x)


@canary("post_accumulate_hooks", breaks="backward fusion's look for others who read gradients")
def test_backward_fusion_sees_other_readers_of_gradients():
    x = nn.Parameter(torch.zeros(2))
    assert not tensors.post_accumulate_hooks(x)
    for count in (1, 2):
        x.register_post_accumulate_grad_hook(lambda _: None)
        assert len(tensors.post_accumulate_hooks(x)) == count


class Watched(Tensor):
    seen: list[object]

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        cls.seen.append(func)
        return super().__torch_function__(func, types, args, kwargs or {})


@canary("reads_of_hooks", breaks="forward fusion, whose updates would run when hooks are looked at,")
def test_forward_fusion_knows_reads_of_hooks():
    x = torch.zeros(2).as_subclass(Watched)
    Watched.seen = []
    _ = x._backward_hooks, x._post_accumulate_grad_hooks
    assert Watched.seen == list(tensors.reads_of_hooks)


@canary("without_subclass_functions", "without_torch_functions", breaks="forward fusion's own reads of parameters")
def test_forward_fusion_reads_without_being_seen():
    x = torch.zeros(2).as_subclass(Watched)
    Watched.seen = []
    with tensors.without_subclass_functions():
        x.add(1)
        assert x.grad is None
    with tensors.without_torch_functions():
        x.add(1)
    assert Watched.seen == []
    x.add(1)
    assert Watched.seen


@canary("make_wrapper_subclass", "disabled_torch_function", breaks="backward fusion's used-up gradients")
def test_backward_fusion_makes_gradients_without_memory():
    seen = []

    class Formal(Tensor):
        __torch_function__ = tensors.disabled_torch_function

        @staticmethod
        def __new__(cls, like):
            return tensors.make_wrapper_subclass(
                cls, like.shape, strides=like.stride(), dtype=like.dtype, device=like.device
            )

        @classmethod
        def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
            seen.append(func)
            return torch.ones(3, 2)

    parameter = nn.Parameter(torch.zeros(2, 3).t())
    parameter.grad = Formal(parameter)
    assert parameter.grad.shape == (3, 2)
    assert parameter.grad.stride() == (1, 3)
    assert isinstance(parameter.grad, Formal)
    assert torch.equal(parameter.grad.neg(), torch.ones(3, 2))
    assert seen == [torch.ops.aten.neg.default]


@canary("sparse_values", "sparse_indices", breaks="counting the bytes of sparse gradients")
def test_sparse_tensors_are_counted():
    # not coalesced: the public methods would raise
    x = torch.sparse_coo_tensor([[1, 1]], [2.0, 3.0], (4,), check_invariants=True)
    assert tensors.sparse_values(x).tolist() == [2, 3]
    assert tensors.sparse_indices(x).tolist() == [[1, 1]]


@canary("neg_view", breaks="offloading of tensors with the negative bit")
def test_offloading_gives_back_the_negative_bit():
    x = torch.tensor([1.0, -2.0])
    assert tensors.neg_view(x).is_neg()
    assert tensors.neg_view(x).tolist() == [-1, 2]
    assert tensors.neg_view(x).untyped_storage().data_ptr() == x.untyped_storage().data_ptr()


@canary("storage_address", breaks="telling storages apart (offloading, dry runs)")
def test_offloading_knows_storages_again():
    x = torch.zeros(4)
    assert tensors.storage_address(x.untyped_storage()) == tensors.storage_address(x[2:].untyped_storage())
    assert tensors.storage_address(x.untyped_storage()) != tensors.storage_address(x.clone().untyped_storage())


@canary("storage_use_count", breaks="forward fusion's search for aliases of parameters")
def test_forward_fusion_finds_aliases():
    x = nn.Parameter(torch.zeros(4))

    def owners() -> int:
        return tensors.storage_use_count(tensors.storage_address(x.untyped_storage()))

    assert owners() == 2  # the parameter and the handle
    alias = x.data
    assert owners() == 3
    del alias
    assert owners() == 2
    array = x.detach().numpy()
    assert owners() > 2
    del array


@canary("is_functorch_wrapped", breaks="offloading inside of torch.func's transforms")
def test_offloading_leaves_transformed_tensors_alone():
    seen = []

    def function(x: Tensor) -> Tensor:
        seen.append(tensors.is_functorch_wrapped(x))
        return x.sum()

    torch.func.vmap(function)(torch.ones(2, 2))
    assert seen == [True]
    assert not tensors.is_functorch_wrapped(torch.ones(2))


@canary("lazy_clone", breaks="the dry run's copies that cost no memory")
def test_dry_run_copies_lazily():
    x = torch.zeros(1 << 16)
    copy = tensors.lazy_clone(x)
    assert torch._C._is_cow_tensor(copy)
    x.add_(1)
    assert copy.count_nonzero() == 0
    copy.add_(2)
    assert x.unique().tolist() == [1]


@canary("empty_host_cache", breaks="giving locked host memory back after offloading")
def test_offloading_gives_locked_memory_back():
    tensors.empty_host_cache()
    if torch.cuda.is_available():
        pinned = torch.empty(1 << 24, dtype=torch.uint8, pin_memory=True)
        del pinned
        tensors.empty_host_cache()
        assert torch.cuda.memory.host_memory_stats()["allocated_bytes.current"] < 1 << 24


@canary("TorchDispatchMode", "OpOverload", breaks="the memory budget's dry run and probe")
def test_dry_run_sees_each_operation():
    x = torch.ones(2, requires_grad=True)
    with torch.autograd.set_multithreading_enabled(False), Operations() as mode:
        y = x.exp()
        y.backward(torch.ones(2))
    assert torch.ops.aten.exp.default in mode.seen
    assert torch.ops.aten.mul.Tensor in mode.seen  # of the backward pass
    assert all(isinstance(func, engine.OpOverload) for func in mode.seen)


@canary("function_mode_count", breaks="calls without a CUDA graph under torch function modes")
def test_graphs_see_function_modes():
    before = engine.function_mode_count()
    with torch.overrides.TorchFunctionMode():
        assert engine.function_mode_count() == before + 1
    assert engine.function_mode_count() == before


@canary("without_dispatch_modes", "dispatch_mode_count", breaks="copies of real tensors in the midst of a dry run")
def test_dry_run_can_be_left():
    assert engine.dispatch_mode_count() == 0
    with Operations() as mode:
        assert engine.dispatch_mode_count() == 1
        with engine.without_dispatch_modes():
            assert engine.dispatch_mode_count() == 0
            torch.ones(2).exp()
        assert engine.dispatch_mode_count() == 1
        assert mode.seen == []


@canary("schema_of", breaks="the dry run's knowledge of what an operation writes")
def test_dry_run_reads_schemas():
    schema = engine.schema_of(torch.ops.aten.add_.Tensor)
    assert schema.name == "aten::add_"
    assert schema.is_mutable
    assert [argument.name for argument in schema.arguments] == ["self", "other", "alpha"]
    assert schema.arguments[0].alias_info.is_write
    assert schema.arguments[1].alias_info is None
    assert schema.arguments[2].default_value == 1
    assert [str(result.type) for result in schema.returns] == ["Tensor"]
    assert not engine.schema_of(torch.ops.aten.add.Tensor).is_mutable


@canary(
    "FakeTensor",
    "FakeTensorMode",
    "DataDependentOutputException",
    "DynamicOutputShapeException",
    "UnsupportedFakeTensorException",
    breaks="the memory budget's dry run on tensors without values",
)
def test_dry_run_computes_nothing():
    with engine.FakeTensorMode(allow_non_fake_inputs=True) as mode:
        x = mode.from_tensor(torch.ones(3))
        y = x.exp()
        assert isinstance(y, engine.FakeTensor)
        assert (y.shape, y.dtype, y.device) == ((3,), torch.float32, torch.device("cpu"))
        assert y.untyped_storage().device.type == "meta"
        with pytest.raises(engine.DataDependentOutputException):
            y.sum().item()
        with pytest.raises(engine.DynamicOutputShapeException):
            y.nonzero()
    assert issubclass(engine.UnsupportedFakeTensorException, RuntimeError)


@canary("tree_flatten", "tree_leaves", "tree_map", "tree_unflatten", breaks="taking batches apart")
def test_batches_are_taken_apart():
    tree = {"x": (1, [2, None]), "y": 3}
    leaves, form = engine.tree_flatten(tree)
    assert leaves == engine.tree_leaves(tree) == [1, 2, None, 3]
    assert engine.tree_unflatten([4, 5, 6, 7], form) == {"x": (4, [5, 6]), "y": 7}
    assert engine.tree_map(str, tree) == {"x": ("1", ["2", "None"]), "y": "3"}


@canary("LOCAL_SCALAR_DENSE", breaks="the dry run's answer to .item()")
def test_dry_run_meets_value_reads():
    with Operations() as mode:
        torch.ones(()).item()
        bool(torch.ones(()))
    assert mode.seen.count(engine.LOCAL_SCALAR_DENSE) == 2


@canary("FOREACH_ZERO", "TO_COPY", breaks="zeroing and moving of backward fusion's used-up gradients")
def test_backward_fusions_gradients_are_zeroed_and_moved():
    x = nn.Parameter(torch.ones(2))
    x.grad = torch.ones(2)
    with Operations() as mode:
        torch.optim.SGD([x], foreach=True).zero_grad(set_to_none=False)
        x.grad.to(torch.float64)
    assert mode.seen.count(engine.FOREACH_ZERO) == 1
    assert mode.seen.count(engine.TO_COPY) == 1


@pytest.mark.parametrize(
    ("test", "name", "broken"),
    [
        (test_forward_fusion_finds_aliases, "storage_use_count", lambda address: 2),
        (test_forward_fusion_finds_aliases, "storage_use_count", lambda address: 3),
        (test_offloading_knows_storages_again, "storage_address", lambda storage: 1),
        (test_offloading_leaves_transformed_tensors_alone, "is_functorch_wrapped", lambda x: False),
        (test_dry_run_copies_lazily, "lazy_clone", torch.clone),
    ],
)
def test_canaries_die_of_a_torch_that_behaves_otherwise(test, name, broken, monkeypatch):
    monkeypatch.setattr(tensors, name, broken)
    dies(test)
