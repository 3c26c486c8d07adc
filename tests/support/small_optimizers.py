"""Small optimizers that update as those of other libraries do."""

import math
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer


class Small(Optimizer):
    """Steps each parameter by :meth:`update`."""

    def __init__(self, parameters: Any, **more: Any) -> None:
        super().__init__(parameters, {"lr": 0.01, **more})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            self.begin(group)
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self.update(parameter, parameter.grad, self.state[parameter], group)
            self.end(group)

    def begin(self, group: dict[str, Any]) -> None: ...

    def end(self, group: dict[str, Any]) -> None: ...

    def update(self, parameter: Tensor, gradient: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None: ...


class Averaging(Small):
    """As schedule-free optimizers: sums and counts lie in the group; ``eval()`` moves the weights to their average."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, k=0, weight_sum=0.0, train_mode=True)

    def begin(self, group: dict[str, Any]) -> None:
        if not self.param_groups[0]["train_mode"]:
            raise RuntimeError("not in train mode")
        rate = group["rate"] = group["lr"] * min(1.0, (group["k"] + 1) / 3)
        group["weight_sum"] += rate**2
        self.share = rate**2 / group["weight_sum"]

    def end(self, group: dict[str, Any]) -> None:
        group["k"] += 1

    def update(self, parameter: Tensor, gradient: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        z = state.setdefault("z", parameter.clone())
        parameter.lerp_(z, self.share).sub_(gradient, alpha=group["rate"] * 0.9 * (1 - self.share))
        z.sub_(gradient, alpha=group["rate"])

    def train(self) -> None:
        self.eval(to=True)

    def eval(self, to: bool = False) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if "z" in self.state[parameter] and group["train_mode"] is not to:
                    parameter.data.lerp_(self.state[parameter]["z"], 1 - (0.9 if to else 1 / 0.9))
            group["train_mode"] = to


class CountingInATensor(Small):
    """As optimi's: the group's count of steps is a tensor, which is added to in place; made in the first step."""

    def begin(self, group: dict[str, Any]) -> None:
        group.setdefault("step", torch.tensor(0)).add_(1)
        group.setdefault("largest", max((one.numel() for one in group["params"]), default=0))

    def update(self, parameter: Tensor, gradient: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        parameter.sub_(gradient / math.sqrt(group["largest"]), alpha=group["lr"] / group["step"].item())


class LowRank(Small):
    """As GaLore's: each matrix keeps a projection of its own, which is computed anew every second step."""

    def update(self, parameter: Tensor, gradient: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        count = state["count"] = state.get("count", 0) + 1
        if gradient.ndim < 2:
            parameter.sub_(gradient, alpha=group["lr"])
            return
        if count % 2:
            state["basis"] = torch.linalg.svd(gradient)[0][:, :3].contiguous()
        low = state["basis"].T @ gradient
        mean = state.setdefault("mean", torch.zeros_like(low)).lerp_(low, 0.1)
        parameter.sub_(state["basis"] @ mean, alpha=group["lr"])


class EightBit(Small):
    """As 8-bit states: a moment of whole numbers, with a scale for each parameter."""

    def update(self, parameter: Tensor, gradient: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        mean = gradient if not state else (state["mean"] * state["scale"]).lerp(gradient, 0.1)
        scale = state["scale"] = mean.abs().max() / 127
        state["mean"] = (mean / scale.clamp(min=1e-30)).round().to(torch.int8)
        parameter.sub_(state["mean"] * scale, alpha=group["lr"])
