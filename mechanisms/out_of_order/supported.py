"""Which wrapped models can be re-ordered."""

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from retime.foundations.ddp import sparse_layer

SUPPORTED_BACKENDS = ("gloo", "nccl")


def check_model(model: DistributedDataParallel) -> None:
    """Refuse what cannot be re-ordered, before anything is changed.

    Raises:
        ValueError: with what to do.
    """
    backend = dist.get_backend(model.process_group)
    if backend not in SUPPORTED_BACKENDS:
        raise ValueError(f"backend {backend!r} is not supported: use {' or '.join(SUPPORTED_BACKENDS)}")
    if dist.get_world_size(model.process_group) < 2:
        return  # it does nothing then
    if not model.gradient_as_bucket_view:
        raise ValueError("build the model with DistributedDataParallel(..., gradient_as_bucket_view=True)")
    if model.mixed_precision is not None:
        raise ValueError("DistributedDataParallel(mixed_precision=...) is not supported: use autocast instead")
    layer = sparse_layer(model.module)
    if layer is not None:
        raise ValueError(f"the sparse gradients of {layer!r} cannot go through a communication hook: use sparse=False")
