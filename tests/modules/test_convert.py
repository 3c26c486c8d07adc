"""convert() and convert_back(): what changes, what stays the same object, what is refused and why."""

import copy
import warnings
from collections import OrderedDict

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, prune, spectral_norm

from retime.foundations.messages import NoEffectWarning
from retime.modules import ScanGRU, ScanLSTM, ScanRNN, convert, convert_back

WIDTH, HIDDEN = 4, 5


class Tagger(nn.Module):
    """Three recurrent modules, one of them in a list, one tied to a weight elsewhere."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.encoder = nn.GRU(WIDTH, HIDDEN, batch_first=True, num_layers=2, dropout=0.3)
        self.stack = nn.ModuleList([nn.LSTM(HIDDEN, HIDDEN, batch_first=True)])
        self.decoder = nn.RNN(HIDDEN, HIDDEN, nonlinearity="relu", batch_first=True)
        self.tied = nn.Linear(HIDDEN, HIDDEN)
        self.tied.weight = self.decoder.weight_hh_l0
        self.head = nn.Linear(HIDDEN, 2)

    def forward(self, inputs):
        hidden = self.encoder(inputs)[0]
        hidden = self.stack[0](hidden)[0]
        return self.head(self.tied(self.decoder(hidden)[0]))


def batch():
    torch.manual_seed(1)
    return torch.randn(3, 6, WIDTH)


def train(model, steps=3, optimizer=None):
    torch.manual_seed(2)
    optimizer = optimizer or torch.optim.Adam(model.parameters(), lr=0.01)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(batch()).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def plain_types(model):
    return [type(module) for module in model.modules() if isinstance(module, nn.RNNBase)]


def test_what_is_swapped_is_reported():
    report = convert(Tagger(), solver="chunk")
    assert report.swapped == {"encoder": "GRU -> ScanGRU", "stack.0": "LSTM -> ScanLSTM", "decoder": "RNN -> ScanRNN"}
    assert report.skipped == {}
    assert str(report).startswith("3 of 3 recurrent modules converted\n  encoder: GRU -> ScanGRU")


def test_everything_but_the_class_stays_the_same_object():
    model = Tagger().eval().double()
    modules, parameters = list(model.modules()), dict(model.named_parameters())
    calls = []
    handle = model.encoder.register_forward_hook(lambda *_: calls.append("hook"))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    convert(model)
    assert plain_types(model) == [ScanGRU, ScanLSTM, ScanRNN]
    assert all(mine is theirs for mine, theirs in zip(model.modules(), modules, strict=True))
    assert all(value is parameters[name] for name, value in model.named_parameters())
    assert model.tied.weight is model.decoder.weight_hh_l0
    assert not model.encoder.training
    assert model(batch().double()).dtype == torch.float64
    assert calls == ["hook"]
    handle.remove()
    model(batch().double())
    assert calls == ["hook"]
    before = model.encoder.weight_hh_l0.detach().clone()
    train_step = model(batch().double()).sum()
    train_step.backward()
    optimizer.step()
    assert not torch.equal(before, model.encoder.weight_hh_l0)


def test_code_that_asks_for_torchs_classes_finds_them():
    model = Tagger()
    convert(model)
    assert [isinstance(one, nn.GRU) for one in model.modules()] == [type(one) is ScanGRU for one in model.modules()]
    assert isinstance(model.stack[0], nn.LSTM)
    assert isinstance(model.decoder, nn.RNN)
    assert isinstance(ScanLSTM(2, 3), nn.LSTM)


@pytest.mark.parametrize("kind", [nn.GRU, nn.LSTM, nn.RNN])
def test_short_sequences_run_as_in_torch_bit_for_bit(kind):
    torch.manual_seed(0)
    plain = kind(3, 4, num_layers=2, dropout=0.5, bidirectional=True, batch_first=True, dtype=torch.float64)
    ours = copy.deepcopy(plain)
    convert(ours)
    x = torch.randn(2, 4, 3, dtype=torch.float64)
    first = tuple(torch.randn(4, 2, 4, dtype=torch.float64) for _ in range(2))
    gradients = []
    for model in (plain, ours):
        torch.manual_seed(1)
        model(x, first if kind is nn.LSTM else first[0])[0].square().sum().backward()
        gradients.append([one.grad for one in model.parameters()])
    assert all(map(torch.equal, *gradients))


def test_a_saved_model_converted_trained_and_converted_back(tmp_path):
    """The issue's table: same predictions before, loads in plain nn.GRU after."""
    plain = Tagger()
    train(plain)
    torch.save(plain.state_dict(), tmp_path / "plain.pt")
    model = Tagger()
    model.load_state_dict(torch.load(tmp_path / "plain.pt"))
    convert(model, solver="chunk")
    model.eval()
    plain.eval()
    assert torch.equal(model(batch()), plain(batch()))
    model.train()
    train(model)
    torch.save(model.state_dict(), tmp_path / "scan.pt")
    report = convert_back(model)
    assert report.swapped["encoder"] == "ScanGRU -> GRU"
    assert plain_types(model) == [nn.GRU, nn.LSTM, nn.RNN]
    assert "solver" not in vars(model.encoder)
    other = Tagger()
    other.load_state_dict(torch.load(tmp_path / "scan.pt"))
    assert torch.equal(other.eval()(batch()), model.eval()(batch()))


def test_optimizer_made_before_goes_on():
    plain, scan = Tagger().eval(), Tagger().eval()
    optimizers = [torch.optim.Adam(model.parameters(), lr=0.01) for model in (plain, scan)]
    first = [train(model, 2, optimizer) for model, optimizer in zip((plain, scan), optimizers, strict=True)]
    convert(scan, solver="chunk")
    second = [train(model, 2, optimizer) for model, optimizer in zip((plain, scan), optimizers, strict=True)]
    assert first[0] == first[1]
    assert second[1] == pytest.approx(second[0], rel=1e-5)


@pytest.mark.parametrize("kind", [nn.RNN, nn.GRU, nn.LSTM])
def test_the_model_itself(kind):
    model = kind(WIDTH, HIDDEN)
    report = convert(model)
    assert list(report.swapped) == [""]
    assert "(the model itself): " in str(report)
    assert type(model).__name__ == f"Scan{kind.__name__}"
    convert_back(model)
    assert type(model) is kind


def test_modules_made_as_scans_can_be_converted_back_too():
    model = nn.Sequential(OrderedDict(rnn=ScanRNN(WIDTH, HIDDEN, nonlinearity="relu")))
    convert_back(model)
    assert repr(model.rnn) == repr(nn.RNN(WIDTH, HIDDEN))
    assert model.rnn.nonlinearity == "relu"


def test_a_module_in_two_places_stays_one():
    shared = nn.GRU(WIDTH, HIDDEN)
    model = nn.ModuleDict({"a": shared, "b": shared})
    assert list(convert(model).swapped) == ["a"]
    assert model["a"] is model["b"] is shared


def test_copies_of_converted_models():
    model = Tagger().eval()
    convert(model, solver="chunk")
    other = copy.deepcopy(model)
    assert plain_types(other) == [ScanGRU, ScanLSTM, ScanRNN]
    assert torch.equal(other(batch()), model(batch()))
    assert other.tied.weight is other.decoder.weight_hh_l0


# --- names


def test_only_the_named_ones():
    model = Tagger()
    assert list(convert(model, names=["stack.0"]).swapped) == ["stack.0"]
    assert list(convert(model, names="decoder").swapped) == ["decoder"]
    assert plain_types(model) == [nn.GRU, ScanLSTM, ScanRNN]
    assert list(convert_back(model, names=["decoder"]).swapped) == ["decoder"]
    assert plain_types(model) == [nn.GRU, ScanLSTM, nn.RNN]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"names": ["encoder", "decodr"]}, r"no such module 'decodr'; there are 'encoder', 'stack.0', 'decoder'"),
        ({"names": ["encoder", "head"]}, "no such module 'head'"),
        ({"solver": "fast"}, "unknown solver 'fast'"),
    ],
)
def test_wrong_names_and_solvers_change_nothing(wrong, message):
    model = Tagger()
    with pytest.raises(ValueError, match=message):
        convert(model, **wrong)
    assert plain_types(model) == [nn.GRU, nn.LSTM, nn.RNN]
    with pytest.raises(ValueError, match="no such module 'encoder'; there are none"):
        convert_back(model, names=["encoder"])


# --- what is left as it is


class OwnGRU(nn.GRU):
    pass


class OwnCell(nn.RNNBase):
    def __init__(self):
        super().__init__("GRU", WIDTH, HIDDEN)


class OwnScan(ScanGRU):
    pass


def replaced_forward():
    module = nn.GRU(WIDTH, HIDDEN)
    module.forward = module.forward
    return module


def with_parametrization():
    return parametrizations.weight_norm(nn.GRU(WIDTH, HIDDEN), "weight_hh_l0")


def to_be_quantized():
    module = nn.GRU(WIDTH, HIDDEN)
    module.qconfig = object()
    return module


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda: OwnGRU(WIDTH, HIDDEN), "OwnGRU is a subclass of torch.nn.GRU .* derive it from ScanGRU"),
        (OwnCell, "OwnCell is a subclass of torch.nn.RNNBase"),
        (lambda: nn.LSTM(WIDTH, HIDDEN, proj_size=2), "proj_size=2: there is no scan over projected states"),
        (lambda: nn.GRUCell(WIDTH, HIDDEN), "GRUCell is called once a step by other code; use torch.nn.GRU"),
        (replaced_forward, "its forward was replaced on the instance"),
        (with_parametrization, "it has parametrizations; convert first"),
        (to_be_quantized, "it has a quantization config"),
        (lambda: ScanGRU(WIDTH, HIDDEN, solver="chunk"), r"already ScanGRU\(solver='chunk'\); to change"),
        (lambda: OwnScan(WIDTH, HIDDEN), r"already OwnScan\(solver='auto'\)"),
    ],
)
def test_reasons(make, why):
    model = nn.ModuleDict({"plain": nn.GRU(WIDTH, HIDDEN), "other": make()})
    kept = type(model["other"])
    with pytest.raises(ValueError, match=f"'other' cannot be converted: {why}"):
        convert(model, names=["plain", "other"])
    assert type(model["plain"]) is nn.GRU
    report = convert(model)
    assert list(report.swapped) == ["plain"]
    assert list(report.skipped) == ["other"]
    assert "  plain:    other: " in str(report)
    assert type(model["other"]) is kept
    with pytest.warns(NoEffectWarning, match=f"0 of 2 .*{why}"):
        convert(model)


def test_scripted_modules_are_left():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        scripted = torch.jit.script(nn.GRU(WIDTH, HIDDEN))
    report = convert(nn.ModuleDict({"plain": nn.GRU(WIDTH, HIDDEN), "scripted": scripted}))
    assert report.skipped == {"scripted": "it is compiled by torch.jit; convert before scripting"}


def test_nothing_to_convert():
    with pytest.warns(NoEffectWarning, match="Linear has no torch.nn.RNN, GRU or LSTM"):
        report = convert(nn.Linear(2, 2))
    assert report.headline == "0 of 0 recurrent modules converted"
    assert convert_back(nn.Linear(2, 2)).swapped == {}


def test_a_class_of_ones_own_cannot_go_back():
    report = convert_back(nn.ModuleList([OwnScan(WIDTH, HIDDEN)]))
    assert report.skipped == {"0": "OwnScan is a class of its own: torch.nn has no counterpart"}


# --- what works around converted modules


def test_parametrizations_pruning_and_old_hooks_work_after_conversion():
    for apply in (
        lambda module: parametrizations.weight_norm(module, "weight_hh_l0"),
        lambda module: prune.l1_unstructured(module, "weight_hh_l0", amount=0.4),
        lambda module: spectral_norm(module, "weight_hh_l0"),
    ):
        torch.manual_seed(0)
        plain = nn.GRU(WIDTH, HIDDEN)
        scan = copy.deepcopy(plain)
        convert(scan, solver="chunk")
        gradients = []
        for module in (plain, scan):
            torch.manual_seed(3)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                apply(module)
            module(batch())[0].square().sum().backward()
            gradients.append({name: value.grad for name, value in module.named_parameters()})
        for name, gradient in gradients[0].items():
            assert torch.allclose(gradients[1][name], gradient, atol=1e-5), name


def test_wrappers_around_the_model_do_not_notice():
    model = Tagger()
    averaged = torch.optim.swa_utils.AveragedModel(model)
    convert(model)
    averaged.update_parameters(model)
    assert list(convert(averaged).swapped) == ["module.encoder", "module.stack.0", "module.decoder"]


def test_compiled_before_conversion():
    model = Tagger().eval()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        compiled = torch.compile(model, backend="eager")
        before = compiled(batch())
        convert(model)
        after = compiled(batch())
    assert torch.equal(before, after)
