"""Code that reads or changes weights, gradients or optimizer state where nothing announces it."""

import copy
import pickle
from functools import partial
from typing import Any

import torch
from lightning.pytorch import Callback
from torch import Tensor, nn

from contract.models import Net, adam, mlp, sgd
from contract.registry import fits
from contract.traits import ACCUMULATION_HOOK, ALIASES, BACKWARD_HOOK, HELD_BACK, STATE_DICT


class NumpyReader(Net):
    """Reads weights as NumPy arrays that share memory, made once."""

    def on_fit_start(self) -> None:
        self.arrays = [parameter.detach().numpy() for parameter in self.parameters()]

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.trace.append({"sums": [float(array.sum()) for array in self.arrays]})


class LogsOptimizerState(Callback):
    """Reads Adam's moments and step counts between batches."""

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        (optimizer,) = trainer.optimizers
        states = [optimizer.state[parameter] for parameter in pl_module.parameters()]
        pl_module.trace.append([{name: value.clone() for name, value in state.items()} for state in states])


class Copies(Callback):
    """Copies and pickles the network in the middle of the run."""

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        copied = copy.deepcopy(pl_module.net)
        loaded = pickle.loads(pickle.dumps(pl_module.net))
        pl_module.trace.append({"copied": copied.state_dict(), "loaded": loaded.state_dict()})


class HalvesInPlace(Net):
    """A hook on a gradient tensor, before it is accumulated."""

    def on_fit_start(self) -> None:
        for parameter in self.parameters():
            parameter.register_hook(partial(torch.mul, other=0.5))


def _halve_accumulated(parameter: Tensor) -> None:
    parameter.grad.mul_(0.5)


class HalvesAccumulatedEarly(Net):
    """A hook on the accumulated gradient, there before the fit starts."""

    def __init__(self) -> None:
        super().__init__(optimizer=sgd)
        for parameter in self.parameters():
            parameter.register_post_accumulate_grad_hook(_halve_accumulated)


class HalvesAccumulatedLate(Net):
    """The same, registered when training has begun, so after any hook of a mechanism."""

    def on_train_start(self) -> None:
        for parameter in self.parameters():
            parameter.register_post_accumulate_grad_hook(_halve_accumulated)


class HalvesAccumulatedMidRun(Net):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 2 and self.current_epoch == 0:
            self.net[0].weight.register_post_accumulate_grad_hook(_halve_accumulated)


class WatchesBackward(Net):
    """Notes the last layer's weight when backward passes through the layer."""

    def on_fit_start(self) -> None:
        self.net[2].register_full_backward_hook(self._note_weight)

    def _note_weight(self, layer: nn.Module, grad_input: Any, grad_output: Any) -> None:
        self.trace.append({"weight in backward": layer.weight.detach().clone()})


class WatchesForward(Net):
    """Notes each layer's weight from a pre-hook, and through functional_call."""

    def on_fit_start(self) -> None:
        self.net[2].register_forward_pre_hook(self._note_weight)

    def _note_weight(self, layer: nn.Module, inputs: Any) -> None:
        self.trace.append({"weight in forward": layer.weight.detach().clone()})

    def forward(self, inputs: Tensor) -> Tensor:
        return torch.func.functional_call(self.net, dict(self.net.named_parameters()), (inputs,))


class ClearsMoments(Net):
    """Restarts the optimizer every epoch: momentum is forgotten."""

    def on_train_epoch_start(self) -> None:
        self.trainer.optimizers[0].state.clear()


class ReloadsOptimizer(Net):
    """Goes back to the optimizer state of the epoch before."""

    kept: Any = None

    def on_train_epoch_start(self) -> None:
        (optimizer,) = self.trainer.optimizers
        if self.kept is not None:
            optimizer.load_state_dict(self.kept)
        self.kept = copy.deepcopy(optimizer.state_dict())


class NewOptimizer(Net):
    """Builds its optimizers anew in epoch 1, the way progressive training does."""

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            self.trainer.strategy.setup_optimizers(self.trainer)


class GrowsInTheMiddle(Net):
    """Gets a new layer in epoch 1, and the layer a parameter group."""

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            self.net.append(mlp())
            self.trainer.optimizers[0].add_param_group({"params": list(self.net[-1].parameters()), "lr": 0.01})


class ClearsGradientsItself(Net):
    """Throws gradients away in the middle of a window."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1 and self.current_epoch == 0:
            self.trainer.optimizers[0].zero_grad()
        if batch_idx == 1 and self.current_epoch == 1:
            self.zero_grad(set_to_none=False)


class LoadsWeights(Callback):
    """Puts old weights back after every third batch, as a spike detector does."""

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 0:
            self.kept = {name: value.clone() for name, value in pl_module.state_dict().items()}
        if batch_idx == 2:
            pl_module.load_state_dict(self.kept)


fits(ALIASES, weights_shared_with_numpy=lambda bench: bench.fit(NumpyReader(optimizer=sgd)))

fits(
    ACCUMULATION_HOOK,
    accumulation_hooks_before_the_fit=lambda bench: bench.fit(HalvesAccumulatedEarly()),
    accumulation_hooks_at_train_start=lambda bench: bench.fit(HalvesAccumulatedLate(optimizer=sgd)),
)

fits(HELD_BACK, accumulation_hooks_mid_run=lambda bench: bench.fit(HalvesAccumulatedMidRun(optimizer=sgd)))

fits(BACKWARD_HOOK, weights_read_in_backward_hooks=lambda bench: bench.fit(WatchesBackward(optimizer=sgd)))

fits(STATE_DICT, optimizer_state_reloaded=lambda bench: bench.fit(ReloadsOptimizer(), max_epochs=3))

fits(
    single="DDP does not synchronise a parameter that joins after it was built",
    network_grows=lambda bench: bench.fit(GrowsInTheMiddle(optimizer=adam), max_epochs=3),
)

fits(
    optimizer_state_logged=lambda bench: bench.fit(Net(), callbacks=[LogsOptimizerState()]),
    network_copied_and_pickled=lambda bench: bench.fit(Net(), callbacks=[Copies()]),
    tensor_hooks=lambda bench: bench.fit(HalvesInPlace(optimizer=sgd), accumulate_grad_batches=2),
    weights_read_in_forward_hooks=lambda bench: bench.fit(WatchesForward(optimizer=sgd)),
    optimizer_state_cleared=lambda bench: bench.fit(ClearsMoments(), max_epochs=3),
    optimizer_built_anew=lambda bench: bench.fit(NewOptimizer(), max_epochs=3),
    gradients_thrown_away=lambda bench: bench.fit(ClearsGradientsItself(optimizer=sgd), accumulate_grad_batches=2),
    weights_put_back=lambda bench: bench.fit(Net(), callbacks=[LoadsWeights()]),
)
