"""`deterministic=True`: the same seed gives the same bits again, under every strategy."""

import torch
from torch import nn

from contract.bench import Bench
from contract.models import FEATURES, Net
from contract.record import differences, snapshot
from contract.registry import scenario


@scenario()
def deterministic_twice(bench: Bench) -> None:
    fits = []
    try:
        for _ in range(2):
            torch.manual_seed(0)
            module = Net(nn.Sequential(nn.Linear(FEATURES, 8), nn.Dropout(0.3), nn.ReLU(), nn.Linear(8, FEATURES)))
            # Dropout draws other masks for parts of a batch, so this is no fit to compare with the plain one.
            bench.trainer(deterministic=True).fit(module, bench.loader())
            fits.append(snapshot({"weights": module.state_dict(), "trace": module.trace}))
    finally:
        torch.use_deterministic_algorithms(False)
    bench.keep("different in the second fit", list(differences(*fits)))
