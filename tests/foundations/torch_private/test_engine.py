"""Canaries of autograd's private names: see ``private_canaries``."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import forward_ad
from torch.overrides import TorchFunctionMode

from retime.foundations.torch_private import engine
from support.private_canaries import canary, dies


def _in_backward(act, **options):
    """What ``act`` gives in the midst of a backward pass."""
    seen = []
    x = torch.ones(2, requires_grad=True)
    y = x.exp()
    y.register_hook(lambda _: seen.append(act()))
    y.sum().backward(**options)
    return seen


@canary("reduction_of", breaks="the pipeline's look at losses, of which a mean may become a sum")
def test_reductions_of_losses_are_told() -> None:
    x = torch.ones(2, requires_grad=True)
    for number, reduction in enumerate(("none", "mean", "sum")):
        for loss in (F.mse_loss(x, 2 * x.detach(), reduction=reduction), F.huber_loss(x, x.detach(), reduction)):
            assert engine.reduction_of(loss.grad_fn) == number  # type: ignore[arg-type]
    assert engine.reduction_of((2 * x).grad_fn) is None  # type: ignore[arg-type]


@canary("graph_task_id", breaks="offloading, which must not offload what a backward pass recomputes,")
def test_offloading_tells_backward_passes_apart():
    assert engine.graph_task_id() == -1
    first, second = _in_backward(engine.graph_task_id) + _in_backward(engine.graph_task_id)
    assert -1 not in (first, second)
    assert first != second


@canary("keeps_graph", breaks="out-of-order weight gradients with retain_graph=True")
def test_out_of_order_keeps_graphs_alive():
    assert _in_backward(engine.keeps_graph, retain_graph=True) == [True]
    assert _in_backward(engine.keeps_graph) == [False]


@canary("will_execute", breaks="out-of-order weight gradients beside autograd.grad")
def test_out_of_order_leaves_partial_backward_passes_alone():
    x, weight = (torch.ones(2, requires_grad=True) for _ in range(2))
    seen, y = [], x * weight
    z = y.exp()
    accumulate = torch.autograd.graph.get_gradient_edge(weight).node
    z.register_hook(lambda _: seen.append(engine.will_execute(accumulate)))
    z.sum().backward(retain_graph=True)
    torch.autograd.grad(z.sum(), x)
    assert seen == [True, False]


@canary("queue_callback", breaks="the end of a backward pass, where fusion, ooo_ddp and offloading clean up,")
def test_fusion_acts_at_the_end_of_the_backward_pass():
    order = []
    x = torch.ones(2, requires_grad=True)
    x.register_post_accumulate_grad_hook(lambda _: order.append("gradient"))

    def later():
        engine.queue_callback(lambda: engine.queue_callback(lambda: order.append("after others")))
        engine.queue_callback(lambda: order.append("end"))

    y = x.exp()
    y.register_hook(lambda _: later())
    y.sum().backward()
    assert order == ["gradient", "end", "after others"]


@canary("current_node", breaks="the dry run's attribution of backward operations to layers")
def test_dry_run_names_the_layer_in_the_backward_pass():
    nodes = []

    class Watch(engine.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            nodes.append(engine.current_node())
            return func(*args, **(kwargs or {}))

    x = torch.ones(2, requires_grad=True)
    y = x.exp()
    assert engine.current_node() is None
    with torch.autograd.set_multithreading_enabled(False), Watch():
        y.backward(torch.ones(2))
    assert any(node is not None and node.name() == y.grad_fn.name() for node in nodes)


@canary("next_sequence_number", "sequence_number", breaks="finding a layer's nodes (out-of-order weight gradients)")
def test_out_of_order_finds_a_layers_nodes_by_number():
    x = torch.ones(2, requires_grad=True)
    before = engine.next_sequence_number()
    first = x.exp()
    between = engine.next_sequence_number()
    second = first.sin()
    numbers = [engine.sequence_number(tensor.grad_fn) for tensor in (first, second)]
    assert before <= numbers[0] < between <= numbers[1] < engine.next_sequence_number()
    leaf = torch.autograd.graph.get_gradient_edge(x).node
    assert engine.sequence_number(leaf) > 2**62


@canary("top_saved_tensors_hooks", breaks="offloading beside a user's own saved-tensor hooks")
def test_offloading_sees_other_saved_tensor_hooks():
    assert engine.top_saved_tensors_hooks(True) is None
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x):
        assert engine.top_saved_tensors_hooks(True) is not None
    assert engine.top_saved_tensors_hooks(True) is None


@canary("in_function_transform", breaks="out-of-order weight gradients beside torch.func")
def test_out_of_order_leaves_function_transforms_alone():
    seen = []

    def function(x: Tensor) -> Tensor:
        seen.append(engine.in_function_transform())
        return x.sum()

    torch.func.grad(function)(torch.ones(2))
    assert seen == [True]
    assert not engine.in_function_transform()


@canary("forward_ad_level", breaks="out-of-order weight gradients beside forward-mode differentiation")
def test_out_of_order_leaves_forward_mode_alone():
    assert engine.forward_ad_level() < 0
    with forward_ad.dual_level():
        assert engine.forward_ad_level() >= 0


@canary("run_backward", breaks="the memory budget's probe of checkpointed layers")
def test_probe_keeps_its_modes_on_in_the_backward_pass():
    calls = []

    class Watch(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            calls.append(func)
            return func(*args, **(kwargs or {}))

    x = torch.ones(2, requires_grad=True)
    y = x.exp()
    y.register_hook(lambda gradient: torch.mul(gradient, 2))
    with Watch():
        (gradient,) = engine.run_backward(
            (y.sum(),), (torch.ones(()),), False, False, (x,), allow_unreachable=True, accumulate_grad=False
        )
    assert torch.equal(gradient, 2 * torch.ones(2).exp())
    assert torch.mul in calls


@canary("RAW_SAVED", "saves_any", breaks="out-of-order weight gradients of layers that save their output")
def test_out_of_order_sees_what_a_kernel_saved():
    x = torch.ones(2, requires_grad=True)
    assert engine.saves_any(x.exp().grad_fn, ("result",))
    assert engine.saves_any(x.softmax(0).grad_fn, ("result",))
    assert not engine.saves_any(x.neg().grad_fn, ("result", "result0", "output", "out"))
    assert hasattr(x.exp().grad_fn, engine.RAW_SAVED + "result")


@canary("loss_choices", breaks="the memory budget's watch for a step that reduces its loss in another way")
def test_memory_budget_sees_how_a_loss_is_reduced():
    x, classes = torch.zeros(2, 3, requires_grad=True), torch.tensor([0, 1])

    def choices(**options):
        return engine.loss_choices(F.nll_loss(x, classes, **options).grad_fn)

    assert choices() == choices()
    assert len({choices(), choices(reduction="sum"), choices(ignore_index=1), choices(weight=torch.ones(3))}) == 4
    squares = F.mse_loss(x, torch.ones(2, 3)).grad_fn, F.mse_loss(x, torch.ones(2, 3), reduction="sum").grad_fn
    assert engine.loss_choices(squares[0]) != engine.loss_choices(squares[1])
    assert engine.loss_choices(x.neg().grad_fn) == (None, None, False)


@canary("check_saved_values", breaks="the check that nodes have what the memory budget looks for")
def test_nodes_have_what_is_looked_for():
    engine.check_saved_values.cache_clear()
    with torch.inference_mode():
        engine.check_saved_values()


@pytest.mark.parametrize(
    ("test", "name", "broken"),
    [
        (test_out_of_order_finds_a_layers_nodes_by_number, "next_sequence_number", lambda: 0),
        (test_out_of_order_finds_a_layers_nodes_by_number, "sequence_number", lambda node: 0),
        (test_out_of_order_finds_a_layers_nodes_by_number, "sequence_number", lambda node: 2**63),
        (test_offloading_tells_backward_passes_apart, "graph_task_id", lambda: 7),
        (test_out_of_order_keeps_graphs_alive, "keeps_graph", lambda: True),
        (test_out_of_order_leaves_partial_backward_passes_alone, "will_execute", lambda node: True),
        (test_fusion_acts_at_the_end_of_the_backward_pass, "queue_callback", lambda act: act()),
        (test_dry_run_names_the_layer_in_the_backward_pass, "current_node", lambda: None),
        (test_offloading_sees_other_saved_tensor_hooks, "top_saved_tensors_hooks", lambda _: None),
        (test_out_of_order_leaves_function_transforms_alone, "in_function_transform", lambda: False),
        (test_out_of_order_leaves_forward_mode_alone, "forward_ad_level", lambda: -1),
        (test_out_of_order_sees_what_a_kernel_saved, "saves_any", lambda node, names: False),
        (test_memory_budget_sees_how_a_loss_is_reduced, "loss_choices", lambda node: (None, None, False)),
    ],
)
def test_canaries_die_of_a_torch_that_behaves_otherwise(test, name, broken, monkeypatch):
    monkeypatch.setattr(engine, name, broken)
    dies(test)
