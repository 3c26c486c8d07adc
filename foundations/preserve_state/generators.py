"""Torch's own random generators."""

import torch


def cuda_generators() -> list[torch.Generator]:
    """One a device, once CUDA is in use; asking before would start it."""
    return list(torch.cuda.default_generators) if torch.cuda.is_initialized() else []  # type: ignore[no-untyped-call]


def seed_torch(seed: int) -> None:
    """Seed torch's generators for processors and CUDA devices, as ``torch.manual_seed`` does.

    Before CUDA is in use that one formats the call stack at each call, which takes about a millisecond.
    """
    torch.default_generator.manual_seed(seed)
    for generator in cuda_generators():
        generator.manual_seed(seed)
