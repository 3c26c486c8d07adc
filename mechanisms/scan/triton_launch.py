"""Run the Triton kernels, and say where they cannot run. Triton is imported when they run, never before."""

import os
from functools import cache
from importlib.util import find_spec

import torch
from torch import Tensor

LARGEST_HIDDEN = 64
LARGEST_MATRIX_BYTES = 64 * 1024
"""The padded blocks ``M[k]`` of a program, which lie in shared memory: it is 99 KiB on the smaller GPUs."""
BLOCKS = {"RNN_TANH": 1, "RNN_RELU": 1, "GRU": 4}
ROWS = 16
"""Rows of a chunk's map a program computes: the least that ``tl.dot`` takes."""


@cache
def has_triton() -> bool:
    """Return whether triton can be imported; does not import it."""
    return find_spec("triton") is not None


def why_not(mode: str, hidden: int, dtype: torch.dtype, device: torch.device) -> str | None:
    """Reason why the kernels cannot run a layer, in words that end an error; None where they can.

    Kernels exist for RNN and GRU in float32 and float64, up to ``H = 64`` (GRU in float64: 32), for NVIDIA GPUs of
    compute capability 8.0 or more. In Triton's interpreter (``TRITON_INTERPRET=1``) they run on a CPU, slowly.

    Args:
        dtype: of the layer's input; the scan of half precision runs in float32.
    """
    if mode not in BLOCKS:
        return f"it has kernels for RNN and GRU, not for {mode}"
    if hidden > LARGEST_HIDDEN:
        return f"it has kernels for a hidden size up to {LARGEST_HIDDEN}, not {hidden}"
    dtype = torch.promote_types(dtype, torch.float32)
    if dtype not in (torch.float32, torch.float64):
        return f"it has kernels for float32 and float64, not {dtype}"
    if BLOCKS[mode] * padded(hidden) ** 2 * dtype.itemsize > LARGEST_MATRIX_BYTES:
        return f"its kernels hold a {mode} in {dtype} up to a hidden size of 32, not {hidden}"
    if not has_triton():
        return "triton is not installed (pip install 'lightning-retime[triton]')"
    return _why_not_here(dtype, device)


def _why_not_here(dtype: torch.dtype, device: torch.device) -> str | None:
    if device.type != "cuda" and "TRITON_INTERPRET" not in os.environ:
        return f"its kernels run on NVIDIA GPUs, and the layer is on {device}"
    from retime.mechanisms.scan import triton_kernels as kernels  # lazy: only a user of the kernels needs triton

    if dtype == torch.float64 and not kernels.FLOAT64:
        return "its kernels need triton 3.5 or later for float64"
    if kernels.INTERPRETED:
        return None
    if device.type != "cuda" or torch.version.hip is not None:
        return "its kernels run on NVIDIA GPUs"
    if torch.cuda.get_device_capability(device) < (8, 0):
        return "its kernels need a GPU of compute capability 8.0 or more"
    return None


def padded(hidden: int) -> int:
    """``H`` as the kernels pad it: a power of two, 16 or more."""
    return max(16, 1 << (hidden - 1).bit_length())


def scan_chunks(scale: Tensor, matrix: Tensor, gradient: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """Three launches, whatever ``T``; nothing is read back.

    The first call for a dtype, number of blocks and padded ``H`` compiles: make it before a CUDA graph is captured.

    Args:
        scale: ``[T, B, K, H]``, ``K`` a power of two.
        matrix: ``[K * H, H]``.
        gradient: ``[T, B, H]``.
        length: time steps a chunk, 1 to ``T``.

    Returns:
        ``v``: ``[T, B, H]``, and what leaves the first step: ``[B, H]``.
    """
    from retime.mechanisms.scan import triton_kernels as kernels

    steps, batch, blocks, hidden = scale.shape
    scale = scale if scale.stride(-1) == 1 else scale.contiguous()
    matrix, gradient = matrix.contiguous(), gradient.contiguous()
    chunks, width = -(-steps // length), padded(hidden)
    v, carry = torch.empty_like(gradient), torch.empty_like(gradient[0])
    entries = gradient.new_zeros(chunks, batch, hidden)
    sizes = steps, length, batch, hidden, *scale.stride()[:-1]
    matrix_bytes = width * width * gradient.element_size()
    with torch.cuda.device_of(gradient):  # type: ignore[no-untyped-call]  # Triton takes the current device
        if chunks > 1:
            maps = gradient.new_empty(chunks - 1, batch, hidden + 1, hidden)
            grid = ((chunks - 1) * batch, -(-(hidden + 1) // ROWS))
            kernels.chunk_products[grid](
                scale, matrix, gradient, maps, *sizes, blocks, width, ROWS,
                num_warps=8 if blocks * width > 64 else 4, enable_fp_fusion=True,
            )  # fmt: skip
            kernels.pass_chunks[(batch,)](
                maps, entries, chunks - 1, batch, hidden, width,
                num_warps=_warps(2 * matrix_bytes), enable_fp_fusion=True,
            )  # fmt: skip
        kernels.sweep_chunks[(chunks * batch,)](
            scale, matrix, gradient, entries, v, carry, *sizes, blocks, width,
            num_warps=_warps(blocks * matrix_bytes), enable_fp_fusion=True,
        )  # fmt: skip
    return v, carry


def _warps(held_bytes: int) -> int:
    """For matrices held in registers: one warp needs no barrier, but has 32 KiB of registers for everything."""
    return 1 if held_bytes <= 4096 else 4 if held_bytes <= 16384 else 8
