"""Small models built like the examples that people start from: what a plain user's LightningModule really does."""

import math
from typing import Any

import torch
from lightning.pytorch.callbacks import BaseFinetuning
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss, nll_loss
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.classification import MulticlassAccuracy

from contract.bench import Bench
from contract.models import BATCH, FEATURES, Net, adam, sgd
from contract.registry import fits, scenario
from contract.traits import MANUAL, UNUSED

CLASSES = 3
WORDS = 11
LENGTH = 5
IGNORED = 250
SIDE = 8


def _served(*tensors: Tensor) -> DataLoader[Any]:
    return DataLoader(TensorDataset(*tensors), batch_size=BATCH)


def _random(seed: int = 3) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


class Autoencoder(Net):
    """An encoder and a decoder as attributes; the input is the target."""

    def __init__(self) -> None:
        super().__init__(nn.Identity())
        self.encoder = nn.Sequential(nn.Linear(FEATURES, 8), nn.ReLU(), nn.Linear(8, 2))
        self.decoder = nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, FEATURES))

    def forward(self, inputs: Tensor) -> Tensor:
        return self.encoder(inputs.view(inputs.size(0), -1))

    def loss(self, batch: Any) -> Tensor:
        inputs, _ = batch
        return mse_loss(self.decoder(self(inputs)), inputs)


fits(template_autoencoder=lambda bench: bench.fit(Autoencoder(), val=bench.loader(batches=2)))


class Classifier(Net):
    """A backbone that is given to the module, and a metric object that is logged."""

    def __init__(self, backbone: nn.Module, learning_rate: float = 0.05) -> None:
        super().__init__(backbone)
        self.save_hyperparameters(ignore=["backbone"])
        self.accuracy = MulticlassAccuracy(CLASSES)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        inputs, labels = batch
        logits = self(inputs)
        loss = cross_entropy(logits, labels)
        self.accuracy(logits, labels)
        self.note(loss=loss)
        self.log("train_loss", loss, on_epoch=True, sync_dist=True)
        self.log("train_accuracy", self.accuracy, on_step=False, on_epoch=True)
        return {"loss": loss, "logits": logits.detach()}

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=self.hparams.learning_rate)


@scenario()
def template_backbone(bench: Bench) -> None:
    samples = 5 * BATCH * bench.world_size
    inputs = torch.randn(samples, FEATURES, generator=_random())
    labels = torch.randint(CLASSES, (samples,), generator=_random())
    backbone = nn.Sequential(nn.Linear(FEATURES, 8), nn.ReLU(), nn.Linear(8, CLASSES))
    bench.fit(Classifier(backbone), loader=_served(inputs, labels))


class Language(nn.Module):
    """A causal transformer whose mask and positions are made when they are first needed."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.width = width
        self.embedding = nn.Embedding(WORDS, width)
        layer = nn.TransformerEncoderLayer(width, nhead=2, dim_feedforward=16, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, num_layers=2, enable_nested_tensor=False)
        self.decoder = nn.Linear(width, WORDS)
        self.positions: Tensor | None = None
        self.mask: Tensor | None = None

    def forward(self, words: Tensor) -> Tensor:
        if self.mask is None or self.positions is None:
            self.mask = torch.full((words.shape[1], words.shape[1]), -math.inf).triu(1)
            angle = torch.arange(words.shape[1])[:, None] / 10 ** torch.arange(0, self.width, 2)
            self.positions = torch.stack([angle.sin(), angle.cos()], -1).flatten(1)
        hidden = self.embedding(words) * math.sqrt(self.width) + self.positions
        return self.decoder(self.encoder(hidden, mask=self.mask)).log_softmax(-1)


class NextWord(Net):
    """Predicts each next word; its rate falls after every epoch."""

    def __init__(self) -> None:
        super().__init__(Language(), optimizer=sgd)

    def loss(self, batch: Any) -> Tensor:
        words, following = batch
        return nll_loss(self(words).flatten(0, 1), following.flatten())

    def configure_optimizers(self) -> Any:
        optimizer = sgd(self.parameters())
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.9)]


@scenario()
def template_transformer(bench: Bench) -> None:
    text = torch.randint(WORDS, (4 * BATCH * bench.world_size, LENGTH + 1), generator=_random())
    bench.fit(NextWord(), loader=_served(text[:, :-1].contiguous(), text[:, 1:].contiguous()))


class Generative(Net):
    """A generator of noise drawn in each step, and a discriminator: each has an optimizer and a scheduler, in turn."""

    def __init__(self) -> None:
        super().__init__(nn.Sequential(nn.Linear(2, 8), nn.LeakyReLU(0.2), nn.Linear(8, FEATURES), nn.Tanh()))
        self.automatic_optimization = False
        self.discriminator = nn.Sequential(nn.Linear(FEATURES, 8), nn.LeakyReLU(0.2), nn.Linear(8, 1))

    def training_step(self, batch: Any, batch_idx: int) -> None:
        real, _ = batch
        for_generator, for_discriminator = self.optimizers()
        noise = torch.randn(len(real), 2).type_as(real)

        self.toggle_optimizer(for_generator)
        judged = self.discriminator(self.net(noise))
        fooled = nn.functional.binary_cross_entropy_with_logits(judged, torch.ones_like(judged))
        self.manual_backward(fooled)
        for_generator.step()
        for_generator.zero_grad()
        self.untoggle_optimizer(for_generator)

        self.toggle_optimizer(for_discriminator)
        judged = torch.cat([self.discriminator(real), self.discriminator(self.net(noise).detach())])
        truth = torch.cat([torch.ones(len(real), 1), torch.zeros(len(real), 1)]).type_as(real)
        caught = nn.functional.binary_cross_entropy_with_logits(judged, truth)
        self.manual_backward(caught)
        for_discriminator.step()
        for_discriminator.zero_grad()
        self.untoggle_optimizer(for_discriminator)
        for scheduler in self.lr_schedulers():
            scheduler.step()
        self.trace.append([fooled.detach(), caught.detach()])
        self.log_dict({"fooled": fooled, "caught": caught}, prog_bar=True)

    def configure_optimizers(self) -> Any:
        optimizers = [adam(self.net.parameters()), sgd(self.discriminator.parameters())]
        return optimizers, [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9) for optimizer in optimizers]


@scenario(MANUAL, UNUSED, find_unused_parameters=True)
def template_gan(bench: Bench) -> None:
    bench.fit(Generative(), val=None)


class Frozen(BaseFinetuning):
    """Trains the head first, then the backbone too, with a rate of its own."""

    def freeze_before_training(self, pl_module: Any) -> None:
        self.freeze(pl_module.net[0], train_bn=False)

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.net[0], optimizer, initial_denom_lr=10)


class FineTuned(Net):
    def __init__(self) -> None:
        backbone = nn.Sequential(nn.Linear(FEATURES, 8), nn.BatchNorm1d(8), nn.ReLU())
        super().__init__(nn.Sequential(backbone, nn.Linear(8, FEATURES)))

    def configure_optimizers(self) -> Any:
        optimizer = adam(parameter for parameter in self.parameters() if parameter.requires_grad)
        return [optimizer], [torch.optim.lr_scheduler.MultiStepLR(optimizer, [1, 2], gamma=0.5)]


@scenario(single="DDP does not synchronise a parameter that was frozen when it was built")
def template_finetuning(bench: Bench) -> None:
    bench.fit(FineTuned(), max_epochs=3, callbacks=[Frozen()])


class Segmenter(nn.Module):
    """Down and up again, with what was seen before at each size."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, width, 3, padding=1), nn.Conv2d(width, 2 * width, 3, padding=1)
        self.pool = nn.MaxPool2d(2)
        self.up = nn.ConvTranspose2d(2 * width, width, 2, stride=2)
        self.merge = nn.Sequential(
            nn.Conv2d(2 * width, width, 3, padding=1), nn.GroupNorm(2, width), nn.ReLU(inplace=True)
        )
        self.out = nn.Conv2d(width, CLASSES, 1)

    def forward(self, images: Tensor) -> Tensor:
        fine = self.first(images).relu()
        coarse = self.second(self.pool(fine)).relu()
        return self.out(self.merge(torch.cat([fine, self.up(coarse)], 1)))


class Segmented(Net):
    """A label a pixel, of which some do not count."""

    def __init__(self) -> None:
        super().__init__(Segmenter(), optimizer=sgd)

    def loss(self, batch: Any) -> Tensor:
        images, labels = batch
        return cross_entropy(self(images), labels.long(), ignore_index=IGNORED)

    def configure_optimizers(self) -> Any:
        optimizer = sgd(self.parameters())
        return [optimizer], [torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=10)]


@scenario()
def template_segmentation(bench: Bench) -> None:
    samples = 3 * BATCH * bench.world_size
    images = torch.rand(samples, 3, SIDE, SIDE, generator=_random())
    labels = torch.randint(CLASSES + 1, (samples, SIDE, SIDE), generator=_random())
    labels[labels == CLASSES] = IGNORED
    bench.fit(Segmented(), loader=_served(images, labels))
