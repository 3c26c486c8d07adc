"""What is done by hand for memory: blocks that run twice and leave the same gradients, and a batch in parts."""

import pytest
import torch
from torch import Tensor, nn

from retime.recipes.modnn.budget_worker import checkpointed, part_sizes, saving


class Blocks(nn.Module):
    """A list of two blocks between layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 1)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(2))

    def forward(self, inputs: Tensor) -> Tensor:
        outputs = self.first(inputs)
        for block in self.blocks:
            outputs = block(outputs)
        return self.last(outputs)


def gradients(model: nn.Module) -> list[Tensor]:
    model.zero_grad()
    torch.manual_seed(1)
    model(torch.randn(3, 4)).sum().backward()
    return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]


@pytest.mark.parametrize(
    ("model", "twice"),
    [(Blocks(), 2), (nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(4, 4), nn.Tanh()))), 4)],
)
def test_blocks_run_twice_and_leave_the_same_gradients(model: nn.Module, twice: int) -> None:
    calls: dict[nn.Module, int] = {}
    linear = [module for module in model.modules() if isinstance(module, nn.Linear)]
    plain = gradients(model)
    for module in linear:
        module.register_forward_hook(lambda module, *_: calls.update({module: calls.get(module, 0) + 1}))
    again = gradients(checkpointed(model))
    assert all(torch.equal(*pair) for pair in zip(plain, again, strict=True))
    assert sorted(calls.values()) == [1] * (len(linear) - twice) + [2] * twice


def test_a_model_without_blocks_is_refused() -> None:
    with pytest.raises(ValueError, match="Linear has no blocks to checkpoint: leave checkpoint out of peers"):
        checkpointed(nn.Linear(2, 2))


def test_saving_on_the_host_leaves_the_same_gradients() -> None:
    model = Blocks()
    plain = gradients(model)
    with saving("save_on_cpu"):
        assert all(torch.equal(*pair) for pair in zip(plain, gradients(model), strict=True))


def test_parts_are_equal_and_at_most_32() -> None:
    assert part_sizes(16) == {8, 4, 2, 1}
    assert part_sizes(8192) == {4096, 2048, 1024, 512, 256}
    assert part_sizes(3) == {1}
