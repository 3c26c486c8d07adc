"""The plain script on two ranks, out of order; every third epoch (29 steps each) searches anew, in up to 60 steps."""

import argparse

import torch
from lightning.pytorch import LightningModule, Trainer
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import retime  # retime


class Digits(LightningModule):
    """Images of 8 x 8 points, read row by row by a GRU; ten classes."""

    def __init__(self) -> None:
        super().__init__()
        self.recurrent = nn.GRU(8, 64, batch_first=True)
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(64, 64), nn.ReLU()) for _ in range(4)])
        self.head = nn.Linear(64, 10)

    def forward(self, images: Tensor) -> Tensor:
        hidden = self.recurrent(images)[0][:, -1]
        for layer in self.layers:
            hidden = layer(hidden)
        return self.head(hidden)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        images, labels = batch
        loss = nn.functional.cross_entropy(self(images), labels)
        self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--samples", type=int, default=1797)
    options = parser.parse_args()

    torch.manual_seed(0)
    digits = load_digits()
    images = torch.from_numpy(digits.images[: options.samples]).float() / 16
    labels = torch.from_numpy(digits.target[: options.samples])
    module = Digits()
    trainer = Trainer(
        max_epochs=options.epochs,
        accelerator="cpu",
        # retime replaces: strategy="ddp",  # DDP
        strategy="ooo_ddp",  # retime
        callbacks=[retime.ReverseFirstK(search_every_n_epochs=3)],  # retime
        devices=2,  # DDP
        logger=False,
        enable_checkpointing=False,
    )
    trainer.fit(module, DataLoader(TensorDataset(images, labels), options.batch_size))
    print(trainer.strategy.report())  # retime
    print(f"loss {trainer.callback_metrics['loss']:.4f}")


if __name__ == "__main__":
    main()
