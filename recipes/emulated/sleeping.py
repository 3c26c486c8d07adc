"""Layers that sleep for a layer's measured times, so that more hosts than processor cores can be emulated.

A real layer keeps a core busy; a sleeping one only takes the time, holds parameters of the real size, and hands
gradients of that size to whoever synchronises them. Output gradient (O) and weight gradient (W) sleep in different
autograd nodes, built-in ones with a hook each, so a schedule can run O now and W later, as it can with a real layer:

    input --view--(+)--> output       hook on the view's output: sleeps O, runs on the way to the input alone
    weight --view--[0]--^             hook on the view's output: sleeps W, runs on the way to the weight alone
"""

import time
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from retime.foundations.measure import LayerTimes


class SleepingLayer(nn.Module):
    """Takes any float tensor and returns it plus the first weight; takes the given times for it, in milliseconds.

    The gradient of the weight is zero but in its first element: what a synchronisation moves has the real size.
    """

    def __init__(self, forward_ms: float, output_ms: float, weight_ms: float, elements: int) -> None:
        super().__init__()
        for name, value in (("forward_ms", forward_ms), ("output_ms", output_ms), ("weight_ms", weight_ms)):
            if value < 0:
                raise ValueError(f"{name}={value} is negative: a layer cannot take less than no time")
        self.forward_ms, self.output_ms, self.weight_ms = forward_ms, output_ms, weight_ms
        self.weight = nn.Parameter(torch.zeros(elements)) if elements else None

    def forward(self, inputs: Tensor) -> Tensor:
        time.sleep(self.forward_ms / 1e3)
        outputs = inputs.view_as(inputs)
        if outputs.requires_grad:
            outputs.register_hook(lambda gradient: time.sleep(self.output_ms / 1e3))  # type: ignore[no-untyped-call]
        if self.weight is None:
            return outputs
        weight = self.weight.view_as(self.weight)
        if weight.requires_grad:
            weight.register_hook(lambda gradient: time.sleep(self.weight_ms / 1e3))  # type: ignore[no-untyped-call]
        return outputs + weight[0]


def sleeping_copy(layers: Sequence[LayerTimes]) -> nn.Sequential:
    """The emulated network of measured layers; a layer without parameters sleeps with the one before it."""
    merged: list[LayerTimes] = []
    for layer in layers:
        if layer.bytes or not merged:
            merged.append(layer)
        else:
            last, more = merged[-1], (layer.forward_ms, layer.output_ms)
            merged[-1] = replace(last, forward_ms=last.forward_ms + more[0], output_ms=last.output_ms + more[1])
    return nn.Sequential(
        *(SleepingLayer(one.forward_ms, one.output_ms, one.weight_ms, one.bytes // 4) for one in merged)
    )
