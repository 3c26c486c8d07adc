"""Parameters that only earlier sub-batches use: DDP's error says what sub-batches have to do with it."""

from typing import Any

import pytest
import torch.nn.functional as F
from torch import Tensor, nn

from retime.strategies import MemoryBudgetDDPStrategy
from support import memory_budget as support
from support.memory_budget import CLASSES, FEATURES, ShallowNet, fit, loader

pytestmark = [*support.IGNORED, pytest.mark.filterwarnings("ignore:.*no longer give the batch's gradient")]


class EarlyOnly(ShallowNet):
    """From the second batch on a layer is left out in all sub-batches but the first."""

    def __init__(self) -> None:
        super().__init__()
        self.early = nn.Linear(FEATURES, CLASSES)
        self.begins = True

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.begins = True

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        output = self.net(batch[0])
        if batch_idx == 0 or self.begins:
            output = output + self.early(batch[0])
        self.begins = False
        return F.cross_entropy(output, batch[1])


def test_ddps_error_says_what_sub_batches_have_to_do_with_it(splits: None) -> None:
    with pytest.raises(RuntimeError, match="parameters that were not used in producing the loss") as caught:
        fit(EarlyOnly(), MemoryBudgetDDPStrategy(110_000, process_group_backend="gloo"), data=loader(4))
    (note,) = caught.value.__notes__
    assert "only earlier ones use count as unused; find_unused_parameters=True" in note
