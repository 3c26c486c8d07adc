"""Strategies for one device, whichever the Trainer chose."""

from __future__ import annotations

from typing import Any

import torch
from lightning.fabric.plugins import CheckpointIO
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.plugins import Precision
from lightning.pytorch.strategies import SingleDeviceStrategy

from retime.strategies.support.lightning_private import given_device


class SingleDevice(SingleDeviceStrategy):
    """Takes its device from the Trainer, unless it is given one, and refuses several.

    Lightning's own needs a ``device`` from the start, so its registry can only make it for a CPU.
    """

    instead = ""
    """What to say to those who have several devices."""

    def __init__(
        self,
        device: str | int | torch.device | None = None,
        accelerator: Accelerator | str | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
    ) -> None:
        chosen: Any = accelerator  # the Trainer takes names too, which Lightning's annotations do not say
        super().__init__("cpu" if device is None else device, chosen, checkpoint_io, precision_plugin)
        self.parallel_devices: list[torch.device] | None = None if device is None else [given_device(self)]

    @property
    def root_device(self) -> torch.device:
        devices = self.parallel_devices
        if not devices:
            return given_device(self)
        if len(devices) > 1:
            raise ValueError(
                f"strategy={self.strategy_name!r} runs on one device, got devices={len(devices)}: use devices=1"
                + (f", or strategy={self.instead!r} for several" if self.instead else "")
            )
        return devices[0]

    def setup_environment(self) -> None:
        _ = self.root_device  # several devices are refused before anything is set up
        super().setup_environment()
