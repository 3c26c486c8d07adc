"""The ranks' mean has the bits of DDP's own, on three ranks too, where its two ways to scale round differently."""

import torch

from retime.foundations.ddp import scale
from support.ranks import run_ranks, said_in


def test_two_ways_to_scale() -> None:
    values = torch.arange(1.0, 50.0)
    divided, multiplied = values.clone(), values.clone()
    scale(divided, 3, divide=True)
    scale(multiplied, 3, divide=False)
    assert torch.equal(divided, values / 3)
    assert torch.equal(multiplied, values * (1 / 3))
    assert not torch.equal(divided, multiplied)


def test_three_ranks_keep_the_bits_of_plain_ddp() -> None:
    for rank in run_ranks(3, "ddp_mean_worker.py"):
        said_in(rank, "same_bits")
