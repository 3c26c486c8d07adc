"""The plain script, with an optimizer class of your own, which is fused as torch's are."""

import argparse

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import retime  # retime


@retime.declare_per_parameter  # retime
class OwnAdamW(torch.optim.AdamW):  # retime
    """Updates each parameter by itself, which declaring it promises."""  # retime


class Digits(nn.Module):
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
    data = TensorDataset(images, labels)
    model = Digits()
    # retime replaces: optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    optimizer = OwnAdamW(model.parameters(), lr=1e-3)  # retime
    fusion = retime.fuse_optimizer(model, optimizer, mode="backward")  # retime
    loader = DataLoader(data, options.batch_size)
    for _ in range(options.epochs):
        for batch in loader:
            loss = nn.functional.cross_entropy(model(batch[0]), batch[1])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    print(fusion.report())  # retime
    print(f"loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
