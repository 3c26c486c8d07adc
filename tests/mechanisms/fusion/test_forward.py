"""Forward fusion: whoever reads a parameter finds it up to date, however it is read."""

import copy
import gc
import io
import operator
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from retime import NoEffectWarning, fuse_optimizer
from retime.foundations.lazy_updates.pending import is_pending
from retime.mechanisms.fusion.forward import ForwardFusion
from support.fusion import adamw, batches, both, fused, network


def stepped(mode: str | None, model: nn.Module | None = None) -> tuple[nn.Module, Optimizer, Any]:
    """A model right after ``optimizer.step()``."""
    model = model or network()
    optimizer = adamw(model.parameters())
    fusion = fuse_optimizer(model, optimizer, mode, bucket_bytes=1) if mode else None
    model(batches(1)[0]).square().mean().backward()
    optimizer.step()
    assert fusion is None or isinstance(fusion, ForwardFusion)
    return model, optimizer, fusion


def test_step_defers_and_the_forward_pass_updates_layer_by_layer() -> None:
    model, optimizer, fusion = stepped("forward")
    parameters = list(model.parameters())
    assert all(map(is_pending, parameters))
    optimizer.zero_grad()
    assert all(p.grad is None for p in parameters)
    assert all(map(is_pending, parameters))  # neither zero_grad nor a look at .grad or .shape counts as a read
    assert parameters[0].shape == (16, 16)
    assert all(map(is_pending, parameters))
    model[0](batches(1)[0])  # type: ignore[index]
    assert [is_pending(p) for p in parameters] == [False] * 2 + [True] * 6
    fusion.flush()
    assert not any(map(is_pending, parameters))


def test_a_fusion_that_nobody_removes_keeps_nothing_alive() -> None:
    model, optimizer, fusion = stepped("forward")
    gone = [weakref.ref(one) for one in (model, optimizer, fusion)]
    del model, optimizer, fusion
    gc.collect()
    assert [one() for one in gone] == [None] * 3


def doubled(x: Tensor) -> Tensor:
    return x * 2


class Doubling(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 2


class Named(Tensor):
    """Tensor of a class of somebody's own."""


READERS: dict[str, Callable[[nn.Module, list[nn.Parameter]], Any]] = {
    "forward pass": lambda model, held: model(torch.ones(2, 16)),
    "evaluation": lambda model, held: model.eval()(torch.ones(2, 16)),
    "direct .weight": lambda model, held: model[2][0].weight.sum(),  # type: ignore[index]
    "held parameters": lambda model, held: torch.stack([p.sum() for p in held]),
    "held .data": lambda model, held: torch.stack([p.data.sum() for p in held]),
    "foreach over held parameters": lambda model, held: torch._foreach_norm(held),
    "numpy": lambda model, held: [torch.from_numpy(p.detach().numpy().copy()) for p in held],
    "tolist": lambda model, held: [p.tolist() for p in held],
    "state_dict": lambda model, held: list(model.state_dict().values()),
    "deepcopy": lambda model, held: list(copy.deepcopy(model).parameters()),
    "deepcopy of held": lambda model, held: copy.deepcopy(held),
    "functional_call": lambda model, held: torch.func.functional_call(
        model, dict(model.named_parameters()), (torch.ones(2, 16),)
    ),
    "parameters_to_vector": lambda model, held: nn.utils.parameters_to_vector(held),
    "EMA": lambda model, held: list(torch.optim.swa_utils.AveragedModel(model).parameters()),
    "out of a buffer": lambda model, held: torch.cat([p.reshape(-1) for p in held], out=torch.empty(0)),
    "in-place write after the step": lambda model, held: [p.data.clamp_(-0.1, 0.1) for p in held],
    "keyword argument": lambda model, held: torch.nn.functional.linear(torch.ones(2, 16), weight=held[4]),
    "scripted function": lambda model, held: [torch.jit.script(doubled)(p) for p in held],
    "scripted module": lambda model, held: [torch.jit.script(Doubling())(p) for p in held],
    "traced function": lambda model, held: [torch.jit.trace(torch.neg, torch.ones(1))(p) for p in held],
    "nn.Parameter": lambda model, held: [nn.Parameter(p) for p in held],
    "another of its type": lambda model, held: [type(p)(p.detach().clone()) for p in held],
    "as_subclass": lambda model, held: [p.as_subclass(Named).as_subclass(Tensor) for p in held],
    "data_ptr": lambda model, held: [torch.tensor(p.data_ptr() > 0) and p.detach().clone() for p in held],
}


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.*torch.jit:FutureWarning")
@pytest.mark.parametrize("name", READERS)
def test_every_reader_sees_updated_values(name: str) -> None:
    def read(mode: str | None) -> Any:
        model, _, fusion = stepped(mode)
        parameters = list(model.parameters())
        with torch.no_grad():
            seen = READERS[name](model, parameters)
        if fusion:
            assert not is_pending(parameters[4])
            fusion.remove()
        return seen

    plain, ours = read(None), read("forward")
    if isinstance(plain, Tensor):
        plain, ours = [plain], [ours]
    assert all(torch.equal(torch.as_tensor(a), torch.as_tensor(b)) for a, b in zip(plain, ours, strict=True))


def test_saving_reads_and_copies_are_plain_parameters() -> None:
    model, _, _ = stepped("forward")
    buffer = io.BytesIO()
    torch.save(list(model.parameters()), buffer)
    buffer.seek(0)
    loaded = torch.load(buffer, weights_only=False)
    assert {type(p) for p in loaded} == {nn.Parameter}
    model, _optimizer, fusion = stepped("forward")
    assert {type(p) for p in copy.deepcopy(list(model.parameters()))} == {nn.Parameter}
    fusion.remove()


def test_optimizer_state_dict_is_up_to_date() -> None:
    (_, plain, _), (_, ours, fusion) = stepped(None), stepped("forward")
    for index, state in plain.state_dict()["state"].items():
        assert torch.equal(state["exp_avg"], ours.state_dict()["state"][index]["exp_avg"])
    fusion.remove()


def test_loading_weights_wins_over_pending_updates() -> None:
    saved = network().state_dict()
    model, _optimizer, fusion = stepped("forward")
    model.load_state_dict(saved)
    fusion.flush()
    assert all(torch.equal(saved[k], v) for k, v in model.state_dict().items())
    fusion.remove()


@pytest.mark.parametrize("context", [torch.inference_mode, torch.no_grad])
def test_evaluation_can_trigger_the_update_and_training_goes_on(context: Any) -> None:
    def validate(model: nn.Module, optimizer: Optimizer, i: int) -> None:
        with context():
            model(torch.ones(2, 16))

    both("forward", each_step=validate)


@pytest.mark.parametrize("around", [lambda: torch.autocast("cpu", dtype=torch.bfloat16), lambda: torch.device("meta")])
def test_what_is_around_the_reader_does_not_touch_the_update(around: Callable[[], Any]) -> None:
    def loss(model: nn.Module, x: Tensor) -> Tensor:
        with around():
            return model(x).square().mean()  # type: ignore[no-any-return]

    both("forward", lambda p: torch.optim.Adafactor(p, lr=0.01), loss=loss)  # its update multiplies matrices


@pytest.mark.parametrize("fused", [False, True])
def test_grad_scaler_is_exact(fused: bool) -> None:
    scalers: list[torch.amp.GradScaler] = []

    def step(model: nn.Module, optimizer: Optimizer, x: Tensor, i: int) -> None:
        if i == 0:
            scalers.append(torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2))
        loss = model(x).square().mean() * (torch.inf if i == 3 else 1.0)  # one step is skipped
        scalers[-1].scale(loss).backward()
        scalers[-1].step(optimizer)
        scalers[-1].update()
        optimizer.zero_grad()

    assert both("forward", lambda p: torch.optim.AdamW(p, lr=0.01, fused=fused), step=step).fused_updates >= 40
    assert scalers[0].state_dict() == scalers[1].state_dict()


def test_global_norm_clipping_is_exact() -> None:
    norms: list[Tensor] = []

    def step(model: nn.Module, optimizer: Optimizer, x: Tensor, i: int) -> None:
        model(x).square().mean().backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.01))
        optimizer.step()
        norms.append(sum(p.grad.norm() for p in model.parameters()))  # type: ignore  # readable after step()
        optimizer.zero_grad()

    both("forward", step=step, steps=5)
    assert torch.equal(*torch.stack(norms).reshape(2, -1))


@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.LSTM(16, 16, num_layers=2, batch_first=True, bidirectional=True),
        lambda: nn.GRU(16, 16, batch_first=True),
        lambda: nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True),
        lambda: nn.Conv1d(4, 4, 3, padding=1),
        lambda: nn.utils.parametrizations.weight_norm(nn.Linear(16, 16)),
        lambda: nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 16)),
    ],
    ids=["lstm", "gru", "transformer", "conv", "weight-norm", "layer-norm"],
)
@pytest.mark.parametrize("mode", ["backward", "forward"])
def test_layers_that_read_their_weights_in_their_own_way(make: Callable[[], nn.Module], mode: str) -> None:
    def build() -> nn.Module:
        torch.manual_seed(0)
        return make()

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        out = model(x.expand(2, 4, 16))
        return (out[0] if isinstance(out, tuple) else out).square().mean()  # type: ignore[no-any-return]

    outputs: list[Tensor] = []

    def evaluate(model: nn.Module, optimizer: Optimizer, i: int) -> None:
        model.eval()
        with torch.no_grad():
            outputs.append(loss(model, batches(1)[0]))
        model.train()

    assert both(mode, make=build, loss=loss, each_step=evaluate).fused_updates > 0
    assert torch.equal(*torch.stack(outputs).reshape(2, -1))


def test_two_optimizers_of_one_parameter_keep_their_order() -> None:
    def loop(mode: str | None) -> Any:
        model = network()
        first, second = adamw(model.parameters()), torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        fusions = [fuse_optimizer(model, o, mode) for o in (first, second)] if mode else []
        for x in batches(4):
            model(x).square().mean().backward()
            first.step()
            second.step()
            first.zero_grad()
        for fusion in fusions:
            fusion.remove()
        return model.state_dict()

    plain, ours = loop(None), loop("forward")
    assert all(torch.equal(plain[k], ours[k]) for k in plain)


def test_gradient_changed_after_the_step_raises() -> None:
    model, optimizer, _ = fused("forward")
    model(batches(1)[0]).square().mean().backward()
    gradient = next(model.parameters()).grad
    optimizer.step()
    gradient.mul_(2)
    with pytest.raises(RuntimeError, match=r"changed in place between optimizer.step\(\) and the update"):
        model(batches(1)[0])


def test_no_parameter_waits_once_something_was_compiled() -> None:
    inner = network()
    compiled = torch.compile(inner, backend="eager")
    with pytest.warns(NoEffectWarning, match="inside compiled or scripted modules"):
        model, _, fusion = stepped("forward", model=nn.Sequential(compiled, nn.Linear(16, 16)))
    assert not any(is_pending(p) for p in model.parameters())
    assert fusion.report().plain_steps
    fusion.remove()
    torch._dynamo.reset()


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.*torch.jit:FutureWarning")
def test_scripted_modules_are_updated_in_step() -> None:
    scripted = torch.jit.script(nn.Linear(16, 16))
    _, _, fusion = stepped("forward", model=nn.Sequential(scripted, nn.Linear(16, 16)))
    assert fusion.report().late_updates == 2
    fusion.remove()


class Foreign(nn.Module):
    """Hands its parameter to code that no torch function sees, as a C extension would."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weight = nn.Parameter(torch.randn(16, 16))

    def forward(self, x: Tensor) -> Tensor:
        with torch._C.DisableTorchFunctionSubclass():
            return torch.tanh(x @ self.weight)


def test_modules_of_others_are_brought_up_to_date_by_a_hook() -> None:
    assert both("forward", make=Foreign).fused_updates == 6


def test_plain_tensors_as_parameters() -> None:
    def loop(mode: str | None) -> Tensor:
        model = nn.Linear(4, 4)
        extra = torch.ones(4, requires_grad=True)
        nn.init.ones_(model.weight)
        nn.init.zeros_(model.bias)
        optimizer = torch.optim.SGD([extra, *model.parameters()], lr=0.1)
        fusion = fuse_optimizer(model, optimizer, mode) if mode else None
        for x in batches(4, width=4):
            (model(x) * extra).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        if fusion:
            fusion.remove()
        return extra.detach().clone()

    for mode in ("backward", "forward"):
        assert torch.equal(loop(None), loop(mode))


def test_torch_has_its_own_functions_back_without_a_fusion() -> None:
    def own() -> list[Any]:
        return [vars(torch.jit.ScriptFunction)["__call__"], vars(nn.Parameter)["__new__"]]

    plain = own()
    fusions = [stepped("forward")[2] for _ in range(2)]
    for fusion in fusions:
        assert all(map(operator.is_not, plain, own()))
        fusion.remove()
        fusion.remove()
    assert all(map(operator.is_, plain, own()))


@pytest.mark.parametrize("zero", [lambda flat: flat.zero_(), lambda flat: flat.numpy().fill(0)])
def test_gradients_that_are_views_of_one_buffer(zero: Callable[[Tensor], object]) -> None:
    flats: list[Tensor] = []

    def make() -> nn.Module:
        model = network()
        parameters = list(model.parameters())
        flats.append(torch.zeros(sum(p.numel() for p in parameters)))
        for p, gradient in zip(parameters, flats[-1].split([p.numel() for p in parameters]), strict=True):
            p.grad = gradient.view_as(p)
        return model

    def step(model: nn.Module, optimizer: Optimizer, x: Tensor, i: int) -> None:
        model(x).square().mean().backward()
        optimizer.step()
        zero(flats[-1])

    with pytest.warns(NoEffectWarning, match="share their memory"):
        both("forward", make=make, step=step, steps=3, bucket_bytes=1)


def test_old_style_zeroing_through_data() -> None:
    def step(model: nn.Module, optimizer: Optimizer, x: Tensor, i: int) -> None:
        model(x).square().mean().backward()
        optimizer.step()
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad.data.zero_()

    both("forward", step=step, steps=4)


def test_parameters_of_another_model_do_not_wait() -> None:
    mine, other = network(2), network(2)
    optimizer = adamw([*mine.parameters(), *other.parameters()])
    fusion = fuse_optimizer(mine, optimizer, "forward")
    other(mine(batches(1)[0])).sum().backward()
    optimizer.step()
    assert all(map(is_pending, mine.parameters()))
    assert not any(map(is_pending, other.parameters()))
    fusion.remove()


def test_a_model_with_hooks_of_ours_can_be_pickled() -> None:
    model, _, fusion = stepped("forward", model=Foreign())
    torch.save(model, io.BytesIO())
    fusion.remove()


def _compiled_function(model: nn.Module) -> Callable[[Tensor], Tensor]:
    return torch.compile(lambda x: model(x).square().mean(), backend="aot_eager")


def _compiled_model(model: nn.Module) -> Callable[[Tensor], Tensor]:
    compiled = torch.compile(model, backend="aot_eager")
    return lambda x: compiled(x).square().mean()


def _compiled_layer(model: nn.Module) -> Callable[[Tensor], Tensor]:
    model[0].compile(backend="aot_eager")  # type: ignore[index]
    return lambda x: model(x).square().mean()  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("compile_late", "forgets"),
    [(_compiled_function, False), (_compiled_model, False), (_compiled_layer, False), (_compiled_function, True)],
)
@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")
@pytest.mark.filterwarnings("ignore::FutureWarning:torch")
def test_compiling_after_fusing(compile_late: Callable[[nn.Module], Callable[[Tensor], Tensor]], forgets: bool) -> None:
    """Also where dynamo was reset, which forgets whom to tell of compilations."""

    def loop(mode: str | None) -> list[Tensor]:
        torch._dynamo.reset()
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        fusion = fuse_optimizer(model, optimizer, mode) if mode else None
        losses = []
        run: Callable[[Tensor], Tensor] = lambda x: model(x).square().mean()  # noqa: E731
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            for i, x in enumerate(batches(5)):
                if forgets and i == 1:
                    torch._dynamo.reset()
                if i == 1 + forgets:
                    run = compile_late(model)
                loss = run(x)
                losses.append(loss.detach())
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
        if fusion:
            assert forgets or any(issubclass(warning.category, NoEffectWarning) for warning in told)
            torch._dynamo.reset()
            fusion.remove()
        return losses

    plain, ours = loop(None), loop("forward")
    assert all(torch.equal(a, b) for a, b in zip(plain, ours, strict=True))
    torch._dynamo.reset()
