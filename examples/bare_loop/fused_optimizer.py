"""The plain script, with updates inside of the backward pass: same bits, gradients are freed at once."""

import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import retime  # retime


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
    model = nn.Sequential(
        nn.Flatten(), nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    fusion = retime.fuse_optimizer(model, optimizer, mode="backward")  # retime
    for _ in range(options.epochs):
        for batch in DataLoader(TensorDataset(images, labels), options.batch_size):
            loss = nn.functional.cross_entropy(model(batch[0]), batch[1])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    print(fusion.report())  # retime
    fusion.remove()  # retime
    print(f"loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
