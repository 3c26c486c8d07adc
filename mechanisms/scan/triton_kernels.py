"""Triton kernels of the two-level scan over Jacobians ``J[t] = sum_k diag(a[t, k]) M[k]``. Imports triton.

Legend: ``T`` time steps, ``B`` sequences, ``H`` hidden size, ``K`` blocks (``BLOCKS``), ``C`` steps a chunk
(``length``), ``N = ceil(T / C)`` chunks. Chunk 0 is the *last* in time, since gradients meet it first; only chunk
``N - 1`` may be shorter. ``WIDTH`` is ``H`` padded to a power of two, at least the 16 that ``tl.dot`` needs: padded
columns load as zero and stay zero. Each loop loads what its next turn needs before it multiplies, so that the loads
need not be waited for; its last turn loads its own again, which keeps every address inside.

No integer argument is specialised: a kernel is compiled once for each ``(dtype, K, WIDTH)``.

Checked in Triton's interpreter and compiled for compute capability 8.0 and 9.0; never run on a GPU yet, so that tile
sizes and numbers of warps are guesses from the compiled code.
"""

# ruff: noqa: N803
import triton
import triton.language as tl

SIZES = ["steps", "length", "batch", "hidden", "stride_t", "stride_b", "stride_k", "count"]


@triton.jit
def _load_matrix(matrix, hidden, BLOCKS: tl.constexpr, WIDTH: tl.constexpr):
    """All ``M[k]`` under one another, each padded on its own: ``[K * WIDTH, WIDTH]`` from ``[K * H, H]``."""
    line = tl.arange(0, BLOCKS * WIDTH)
    column = tl.arange(0, WIDTH)
    source = (line // WIDTH) * hidden + line % WIDTH
    real = (line % WIDTH < hidden)[:, None] & (column < hidden)[None, :]
    return tl.load(matrix + source[:, None] * hidden + column[None, :], mask=real, other=0.0)


@triton.jit(do_not_specialize=[size for size in SIZES if size != "count"])
def chunk_products(
    scale,
    matrix,
    gradient,
    maps,
    steps,
    length,
    batch,
    hidden,
    stride_t,
    stride_b,
    stride_k,
    BLOCKS: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Each chunk's affine map ``v -> v P + q``, for all chunks but the first in time, which nothing asks for.

    ``P`` starts as the identity and ``q``, row ``H`` under it, as zero; a step adds the gradient to ``q`` and
    multiplies all rows by the Jacobian. Rows do not meet: a program owns ``ROWS`` of them. Grid: ``(N - 1) * B``, row
    tiles.

    ``scale`` ``[T, B, K, H]`` with any strides but the last; ``matrix`` ``[K * H, H]`` and ``gradient`` ``[T, B, H]``
    contiguous; writes ``maps`` ``[N - 1, B, H + 1, H]``.
    """
    program = tl.program_id(0).to(tl.int64)
    last = steps - 1 - program // batch * length
    sequence = program % batch
    column, block = tl.arange(0, WIDTH), tl.arange(0, BLOCKS)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    real = column < hidden
    m = _load_matrix(matrix, hidden, BLOCKS, WIDTH)
    scale += last * stride_t + sequence * stride_b
    scales = scale + block[:, None] * stride_k + column[None, :]
    gradients = gradient + (last * batch + sequence) * hidden + column
    a = tl.load(scales, mask=real[None, :], other=0.0)
    g = tl.load(gradients, mask=real, other=0.0)
    x = (row[:, None] == column[None, :]).to(m.dtype)
    sent = (row == hidden)[:, None]
    for step in range(length):
        more = step + 1 < length
        scales -= tl.where(more, stride_t, 0)
        gradients -= tl.where(more, batch * hidden, 0)
        next_a = tl.load(scales, mask=real[None, :], other=0.0)
        next_g = tl.load(gradients, mask=real, other=0.0)
        x = tl.where(sent, x + g[None, :], x)
        wide = tl.reshape(x[:, None, :] * a[None, :, :], (ROWS, BLOCKS * WIDTH))
        x = tl.dot(wide, m, input_precision="ieee")  # tf32 would lose what a product of many Jacobians needs
        a = next_a
        g = next_g
    target = (program * (hidden + 1) + row[:, None]) * hidden + column[None, :]
    tl.store(maps + target, x, mask=(row <= hidden)[:, None] & real[None, :])


@triton.jit(do_not_specialize=["count", "batch", "hidden"])
def pass_chunks(maps, entries, count, batch, hidden, WIDTH: tl.constexpr):
    """One vector a sequence through ``count = N - 1`` maps, one or more. Grid: ``B``.

    Reads ``maps`` ``[count, B, H + 1, H]``; writes what enters each chunk, ``entries`` ``[count + 1, B, H]``.
    """
    sequence = tl.program_id(0).to(tl.int64)
    row, column = tl.arange(0, WIDTH), tl.arange(0, WIDTH)
    real = column < hidden
    square = (row < hidden)[:, None] & real[None, :]
    maps += sequence * (hidden + 1) * hidden + column
    entries += sequence * hidden + column
    matrices = maps[None, :] + row[:, None] * hidden
    sents = maps + hidden * hidden
    p = tl.load(matrices, mask=square, other=0.0)
    q = tl.load(sents, mask=real, other=0.0)
    v = tl.zeros((WIDTH,), dtype=p.dtype)
    for chunk in range(count):
        tl.store(entries, v, mask=real)
        entries += batch * hidden
        ahead = tl.where(chunk + 1 < count, batch * (hidden + 1) * hidden, 0)
        matrices += ahead
        sents += ahead
        next_p = tl.load(matrices, mask=square, other=0.0)
        next_q = tl.load(sents, mask=real, other=0.0)
        v = q + tl.sum(v[:, None] * p, axis=0)
        p = next_p
        q = next_q
    tl.store(entries, v, mask=real)


@triton.jit(do_not_specialize=[size for size in SIZES if size != "count"])
def sweep_chunks(
    scale,
    matrix,
    gradient,
    entries,
    states,
    carry,
    steps,
    length,
    batch,
    hidden,
    stride_t,
    stride_b,
    stride_k,
    BLOCKS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """All steps within each chunk from what enters it, ``entries`` ``[N, B, H]``. Grid: ``N * B``.

    Inputs as in ``chunk_products``; writes ``states`` ``[T, B, H]`` and ``carry`` ``[B, H]``, what leaves the first
    step.
    """
    program = tl.program_id(0).to(tl.int64)
    last = steps - 1 - program // batch * length
    sequence = program % batch
    column, block = tl.arange(0, WIDTH), tl.arange(0, BLOCKS)
    real = column < hidden
    m = _load_matrix(matrix, hidden, BLOCKS, WIDTH)
    scale += last * stride_t + sequence * stride_b
    scales = scale + block[:, None] * stride_k + column[None, :]
    here = (last * batch + sequence) * hidden + column
    a = tl.load(scales, mask=real[None, :], other=0.0)
    g = tl.load(gradient + here, mask=real, other=0.0)
    v = tl.load(entries + program * hidden + column, mask=real, other=0.0)
    turns = tl.minimum(length, last + 1)
    for step in range(turns):
        more = step + 1 < turns
        v += g
        tl.store(states + here, v, mask=real)
        scales -= tl.where(more, stride_t, 0)
        here -= tl.where(more, batch * hidden, 0)
        next_a = tl.load(scales, mask=real[None, :], other=0.0)
        next_g = tl.load(gradient + here, mask=real, other=0.0)
        wide = tl.reshape(a * v[None, :], (BLOCKS * WIDTH,))
        v = tl.sum(wide[:, None] * m, axis=0)
        a = next_a
        g = next_g
    if last < length:
        tl.store(carry + sequence * hidden + column, v, mask=real)


INTERPRETED = not isinstance(sweep_chunks, triton.JITFunction)
"""Whether ``TRITON_INTERPRET=1`` was set when this file was imported: kernels then run on tensors of a CPU."""
FLOAT64 = tuple(int(part) for part in triton.__version__.split(".")[:2]) >= (3, 5)
"""Whether ``tl.dot`` takes float64."""
