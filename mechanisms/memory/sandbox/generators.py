"""Torch's own random generators."""

import torch


def cuda_generators() -> list[torch.Generator]:
    """One a device, once CUDA is in use; asking before would start it."""
    return list(torch.cuda.default_generators) if torch.cuda.is_initialized() else []  # type: ignore[no-untyped-call]
