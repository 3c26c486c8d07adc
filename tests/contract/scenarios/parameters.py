"""Parameters that are tied, unused, frozen, late, read outside their module's forward, or read again in backward."""

from typing import Any

import torch
from lightning.pytorch import Callback
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.nn.utils.parametrizations import weight_norm
from torch.utils.checkpoint import checkpoint

from contract.bench import Bench
from contract.models import FEATURES, Net, adam, mlp, sgd
from contract.registry import fits, scenario
from contract.traits import COMPILED, HELD_BACK, REENTRANT, UNUSED

FROZEN_IN_DDP = "DDP does not synchronise a parameter that was frozen when it was built"


class Tied(nn.Module):
    """One weight, used by two modules."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(FEATURES, FEATURES), nn.Linear(FEATURES, FEATURES)
        self.second.weight = self.first.weight

    def forward(self, inputs: Tensor) -> Tensor:
        return self.second(self.first(inputs).tanh())


class Shared(nn.Module):
    """One module, called three times."""

    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Linear(FEATURES, FEATURES)

    def forward(self, inputs: Tensor) -> Tensor:
        for _ in range(3):
            inputs = self.block(inputs).tanh()
        return inputs


class Unused(nn.Module):
    """One layer never gets a gradient, one only on some batches, and the order of the layers changes."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.sometimes, self.never = mlp(), mlp(), mlp()
        self.calls = 0

    def forward(self, inputs: Tensor) -> Tensor:
        self.calls += 1
        if self.calls % 3 == 0:
            return self.first(inputs)
        if self.calls % 3 == 1:
            return self.sometimes(self.first(inputs))
        return self.first(self.sometimes(inputs))


class Checkpointed(nn.Module):
    """Recomputes its blocks in backward, and uses one block in two recomputed segments."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.inner, self.outer, self.reentrant = mlp(), nn.Linear(FEATURES, FEATURES), reentrant

    def forward(self, inputs: Tensor) -> Tensor:
        inputs = self.outer(inputs)
        for _ in range(2):
            inputs = checkpoint(self.inner, inputs, use_reentrant=self.reentrant)
        return self.outer(inputs)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.out = nn.LSTM(2, 4, num_layers=2, batch_first=True), nn.Linear(4, 2)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.out(self.lstm(inputs.view(len(inputs), -1, 2))[0]).flatten(1)


class Attention(nn.Module):
    """Attention reads its output projection's weight without calling that module."""

    def __init__(self) -> None:
        super().__init__()
        self.block = nn.TransformerEncoderLayer(2, nhead=2, dim_feedforward=4, dropout=0.0, batch_first=True)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.block(inputs.view(len(inputs), -1, 2)).flatten(1)


class Normalised(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(FEATURES, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.3))
        self.out = weight_norm(nn.Linear(8, FEATURES))

    def forward(self, inputs: Tensor) -> Tensor:
        return self.out(self.body(inputs))


class Convolved(nn.Module):
    """Convolutions whose weights lie in memory with the channels last."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(1, 4, 2, padding=1), nn.ReLU(), nn.Conv2d(4, 2, 2))
        self.out = nn.Linear(12, FEATURES)
        self.to(memory_format=torch.channels_last)

    def forward(self, inputs: Tensor) -> Tensor:
        images = inputs.view(len(inputs), 1, 2, 3).contiguous(memory_format=torch.channels_last)
        return self.out(self.body(images).flatten(1))


class Penalised(Net):
    """Reads all weights before any module runs, and calls one layer's function on its bare weight."""

    def loss(self, batch: Any) -> Tensor:
        inputs, targets = batch
        size = sum(parameter.square().sum() for parameter in self.parameters())
        hidden = nn.functional.linear(inputs, self.net[0].weight, self.net[0].bias).tanh()
        return mse_loss(self.net[2](hidden), targets) + 0.01 * size


class ReadsDataFirst(Net):
    """Reads weights through .data and .detach(), outside autograd, at the start of the step."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.trace.append({"first": self.net[0].weight.data.clone(), "last": self.net[2].bias.detach().clone()})
        return super().training_step(batch, batch_idx)


class GradientPenalty(Net):
    """Differentiates twice: the inner gradient is part of the loss."""

    def loss(self, batch: Any) -> Tensor:
        inputs, targets = batch[0].clone().requires_grad_(), batch[1]
        outputs = self(inputs)
        (slope,) = torch.autograd.grad(outputs.sum(), inputs, create_graph=True)
        return mse_loss(outputs, targets) + 0.1 * slope.square().mean()


class LateRead(Net):
    """Uses the last weight once more, detached: backward still needs it after its gradient is complete."""

    def loss(self, batch: Any) -> Tensor:
        inputs, targets = batch
        outputs = self.net[0](inputs) @ self.net[2].weight.detach().t()
        return mse_loss(self.net[2](outputs @ self.net[2].weight.detach()), targets)


class TwoForwards(Net):
    def loss(self, batch: Any) -> Tensor:
        return super().loss(batch) + super().loss([batch[0].flip(1), batch[1]])


class LateUnfreeze(Callback):
    """Thaws in epoch 1 a parameter that the optimizer has held from the start."""

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        pl_module.net[0].requires_grad_(trainer.current_epoch >= 1)


class HoldsAll(Net):
    def configure_optimizers(self) -> Any:
        return adam(self.parameters())


class Replaced(Net):
    """Its weights get new storage between epochs, as pruning and resizing tools do."""

    def on_train_epoch_start(self) -> None:
        for parameter in self.parameters():
            parameter.data = parameter.data.clone()


class Quiet(Net):
    """Notes and logs nothing in training_step, which is compiled as a whole."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(batch)


fits(
    UNUSED,
    ddp={"find_unused_parameters": True},
    parameters_unused=lambda bench: bench.fit(Net(Unused())),
    parameters_unused_with_accumulation=lambda bench: bench.fit(
        Net(Unused(), optimizer=sgd), accumulate_grad_batches=2
    ),
)


fits(single=FROZEN_IN_DDP, parameters_thawed_late=lambda bench: bench.fit(HoldsAll(), callbacks=[LateUnfreeze()]))


@scenario()
def parameters_frozen(bench: Bench) -> None:
    module = Net()
    module.net[0].requires_grad_(False)
    bench.fit(module)


fits(
    REENTRANT,
    single="reentrant checkpointing marks a DDP parameter ready twice",
    activation_checkpointing_reentrant=lambda bench: bench.fit(Net(Checkpointed(reentrant=True))),
)

fits(
    parameters_tied=lambda bench: bench.fit(Net(Tied()), accumulate_grad_batches=2),
    module_called_three_times=lambda bench: bench.fit(Net(Shared(), optimizer=sgd)),
    parameters_get_new_storage=lambda bench: bench.fit(Replaced()),
    activation_checkpointing=lambda bench: bench.fit(Net(Checkpointed(reentrant=False))),
    recurrent_network=lambda bench: bench.fit(Net(Recurrent())),
    channels_last=lambda bench: bench.fit(Net(Convolved()), accumulate_grad_batches=2),
    attention=lambda bench: bench.fit(Net(Attention()), val=bench.loader(batches=1)),
    batch_norm_dropout_weight_norm=lambda bench: bench.fit(Net(Normalised()), val=bench.loader(batches=1)),
    weights_in_the_loss=lambda bench: bench.fit(Penalised()),
    weights_read_without_autograd=lambda bench: bench.fit(ReadsDataFirst()),
    gradient_penalty=lambda bench: bench.fit(GradientPenalty()),
    two_forwards_one_loss=lambda bench: bench.fit(TwoForwards()),
)


fits(HELD_BACK, weight_read_late_in_backward=lambda bench: bench.fit(LateRead()))

fits(
    COMPILED,
    # "aot_eager" traces forward and backward as the default does, without a C++ compiler.
    compiled_module=lambda bench: bench.fit(torch.compile(Quiet(), backend="aot_eager"), max_epochs=1),
)


@scenario(COMPILED)
def compiled_submodule(bench: Bench) -> None:
    module = Net()
    module.net.compile(backend="aot_eager")
    bench.fit(module, accumulate_grad_batches=2)
