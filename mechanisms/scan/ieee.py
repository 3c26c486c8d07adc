"""Full float32 products: tf32 keeps 10 bits, and a scan multiplies many Jacobians in a row."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def ieee_products(device: torch.device) -> Iterator[None]:
    """Float32 matrix products on ``device`` without tf32, whatever the process has allowed elsewhere."""
    if device.type != "cuda":
        yield
        return
    settings = torch.backends.cuda.matmul
    before = settings.fp32_precision
    settings.fp32_precision = "ieee"
    try:
        yield
    finally:
        settings.fp32_precision = before
