"""Manual optimization: the module calls backward and step itself."""

from typing import Any

from torch import Tensor

from contract.models import Net, sgd
from contract.registry import fits
from contract.traits import MANUAL


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


fits(
    MANUAL,
    manual_every_other_batch=lambda bench: bench.fit(Manual()),
    manual_with_closure=lambda bench: bench.fit(ManualClosure()),
    manual_two_passes_of_one_graph=lambda bench: bench.fit(TwoPasses()),
)
