"""Manual optimization: the module calls backward and step itself."""

from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor
from torch.nn.functional import mse_loss

from contract.bench import Bench
from contract.models import Net, adam, mlp, sgd
from contract.registry import fits, scenario
from contract.traits import MANUAL, UNUSED


class Manual(Net):
    """One optimizer, stepped by hand every other batch."""

    def __init__(self) -> None:
        super().__init__(optimizer=sgd)
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        loss = self.loss(batch)
        self.note(loss=loss)
        self.manual_backward(loss)
        self.clip_gradients(optimizer, gradient_clip_val=0.1, gradient_clip_algorithm="norm")
        if batch_idx % 2:
            optimizer.step()
            optimizer.zero_grad()


class ManualClosure(Manual):
    """Hands the optimizer a closure, as automatic optimization does."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()

        def closure() -> Tensor:
            loss = self.loss(batch)
            self.note(loss=loss)
            optimizer.zero_grad()
            self.manual_backward(loss)
            return loss

        optimizer.step(closure=closure)


class TwoPasses(Manual):
    """Two backward passes through one graph, without a forward pass between them."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        loss = self.loss(batch)
        self.note(loss=loss)
        self.manual_backward(loss, retain_graph=True)
        self.manual_backward(2 * loss)
        optimizer.step()
        optimizer.zero_grad()


class Adversaries(LightningModule):
    """A generator and a discriminator, each with its optimizer and scheduler, stepped in turn."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.generator, self.discriminator = mlp(), mlp()
        self.trace: list[Any] = []

    def training_step(self, batch: Any, batch_idx: int) -> None:
        inputs, targets = batch
        first, second = self.optimizers()

        self.toggle_optimizer(first)
        generated = self.generator(inputs)
        generator_loss = mse_loss(self.discriminator(generated), torch.ones_like(generated))
        first.zero_grad()
        self.manual_backward(generator_loss)
        first.step()
        self.untoggle_optimizer(first)

        self.toggle_optimizer(second)
        generated = self.generator(inputs).detach()
        discriminator_loss = mse_loss(self.discriminator(generated), -targets) + mse_loss(
            self.discriminator(targets), generated
        )
        second.zero_grad()
        self.manual_backward(discriminator_loss)
        second.step()
        self.untoggle_optimizer(second)

        for scheduler in self.lr_schedulers():
            scheduler.step()
        self.trace.append([generator_loss.detach(), discriminator_loss.detach()])
        self.log_dict({"generator": generator_loss, "discriminator": discriminator_loss})

    def configure_optimizers(self) -> Any:
        optimizers = [adam(self.generator.parameters()), sgd(self.discriminator.parameters())]
        return optimizers, [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9) for optimizer in optimizers]


fits(
    MANUAL,
    manual_every_other_batch=lambda bench: bench.fit(Manual()),
    manual_with_closure=lambda bench: bench.fit(ManualClosure()),
    manual_two_passes_of_one_graph=lambda bench: bench.fit(TwoPasses()),
)


@scenario(MANUAL, UNUSED, find_unused_parameters=True)
def manual_with_two_optimizers(bench: Bench) -> None:
    bench.fit(Adversaries(), val=None)
