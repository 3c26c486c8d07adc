"""What only several ranks have: DDP's options, uneven use of parameters, collectives in hooks."""

from typing import Any

import torch
from torch import Tensor, nn

from contract.models import FEATURES, Net, mlp, sgd
from contract.registry import fits
from contract.scenarios.parameters import Normalised
from contract.traits import UNUSED


def _deep() -> nn.Module:
    return nn.Sequential(*[nn.Sequential(nn.Linear(FEATURES, 64), nn.Tanh(), nn.Linear(64, FEATURES)) for _ in "abcd"])


class DependsOnRank(nn.Module):
    """Rank 0 and rank 1 use different layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.out = mlp(), mlp(), mlp()

    def forward(self, inputs: Tensor) -> Tensor:
        used = self.second if torch.distributed.get_rank() else self.first
        return self.out(used(inputs))


class LogsAcrossRanks(Net):
    """Gathers values of all ranks while training."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        norm = torch.stack([parameter.detach().norm() for parameter in self.parameters()]).norm()
        self.log("norm", norm, sync_dist=True)
        self.trace.append({"all norms": self.all_gather(norm), "all losses": self.all_gather(outputs["loss"])})


fits(
    several=True,
    ddp={"bucket_cap_mb": 0.001},
    ddp_many_buckets=lambda bench: bench.fit(Net(_deep())),
    ddp_many_buckets_with_accumulation=lambda bench: bench.fit(Net(_deep(), optimizer=sgd), accumulate_grad_batches=2),
)


fits(
    several=True,
    ddp={"gradient_as_bucket_view": True},
    ddp_gradients_are_bucket_views=lambda bench: bench.fit(Net(_deep()), accumulate_grad_batches=2),
)

fits(several=True, ddp={"static_graph": True}, ddp_static_graph=lambda bench: bench.fit(Net(_deep())))

fits(
    UNUSED,
    several=True,
    ddp={"find_unused_parameters": True},
    ddp_ranks_use_different_layers=lambda bench: bench.fit(Net(DependsOnRank())),
)

fits(
    several=True,
    ddp={"broadcast_buffers": False},
    ddp_own_buffers_on_each_rank=lambda bench: bench.fit(Net(Normalised())),
)

fits(several=True, ddp_collectives_in_hooks=lambda bench: bench.fit(LogsAcrossRanks()))
