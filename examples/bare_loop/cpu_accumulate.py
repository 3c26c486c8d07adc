"""The plain script on two ranks, whose gradients are added up in memory that they share."""

import argparse

import torch
import torch.distributed as dist  # DDP
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel  # DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler  # DDP

from retime.mechanisms.cpu_accumulation import BucketReduction, HostReducer  # retime


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

    dist.init_process_group("gloo")  # DDP
    torch.manual_seed(0)
    digits = load_digits()
    images = torch.from_numpy(digits.images[: options.samples]).float() / 16
    labels = torch.from_numpy(digits.target[: options.samples])
    data = TensorDataset(images, labels)
    model = Digits()
    model = DistributedDataParallel(model, gradient_as_bucket_view=True)  # DDP
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    # DDP replaces: loader = DataLoader(data, options.batch_size)
    loader = DataLoader(data, options.batch_size, sampler=DistributedSampler(data, shuffle=False))  # DDP
    reduction = BucketReduction(model, HostReducer())  # retime
    for _ in range(options.epochs):
        for batch in loader:
            loss = nn.functional.cross_entropy(model(batch[0]), batch[1])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    print(reduction.report())  # retime
    reduction.close()  # retime
    dist.destroy_process_group()  # DDP
    print(f"loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
