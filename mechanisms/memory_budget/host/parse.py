"""The host tier that a text names."""

import tempfile

import torch

from retime.mechanisms.memory_budget.host.disk import HostDisk
from retime.mechanisms.memory_budget.host.pinned import HostMemory
from retime.mechanisms.memory_budget.host.tier import HostTier


def check_host_text(text: str | None) -> None:
    """Refuse what names no tier for any device, before the device is known.

    Raises:
        TypeError: no text, and not None.
        ValueError: it names no tier.
    """
    if not isinstance(text, str | None):
        raise TypeError(f"host={text!r} must be a text: use 'memory' or 'disk:FOLDER'")
    if text not in (None, "memory") and not (text.startswith("disk:") and text != "disk:"):
        raise ValueError(f"host={text!r} names no place for offloaded tensors: use 'memory' or 'disk:FOLDER'")


def parse_host(text: str | None, device: torch.device | str, capacity_bytes: int | str = 0) -> HostTier:
    """The host tier that ``host=text`` means for training on ``device``.

    Args:
        text: ``"memory"``: CPU memory, for CUDA devices. ``"disk:FOLDER"``: a file there, for training on the CPU.
            None: memory for CUDA, the folder for temporary files otherwise.
        device: where the step computes.
        capacity_bytes: space to reserve on a disk at once, so that a full disk shows before the first step; or a text
            such as ``"1GiB"``.

    Raises:
        TypeError: no text, and not None.
        ValueError: the text names no tier, or one that is no use for the device.
        HostError: the folder is missing, cannot be written to, or has not the space.
    """
    check_host_text(text)
    device = torch.device(device)
    if text is None:
        text = "memory" if device.type != "cpu" else f"disk:{tempfile.gettempdir()}"
    if text != "memory":
        return HostDisk(text.removeprefix("disk:"), device=device, capacity_bytes=capacity_bytes)
    if device.type == "cpu":
        raise ValueError("host='memory' frees nothing when the model trains on the CPU: use host='disk:FOLDER'")
    return HostMemory(device)
