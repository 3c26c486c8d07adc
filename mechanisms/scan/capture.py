"""CUDA graphs: what may not happen while one is captured.

Between a layer's output and its gradients every solver works on the device alone: the calls depend on shapes, never on
values; nothing is read back, and nothing is copied from the host. Two things would break that, and ask here first:
:func:`~retime.mechanisms.scan.safe_solve.safe_solve` reads whether a result is finite, and leaves that out while a
graph is captured; :class:`~retime.mechanisms.scan.packed.Packing` copies from the host where sequences end, and
refuses.

Run one step before the capture, as ``torch.cuda.graph`` asks for anyway: cuBLAS makes its workspace then, and
``solver="triton"`` compiles. Tested without a GPU: the calls, on torch's "meta" device, not a capture itself.
"""

import torch


def capturing(device: torch.device) -> bool:
    """Whether a CUDA graph is captured on ``device``'s current stream."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()
