"""The forward pass: torch's own kernels, one layer a call."""

from torch import Tensor

from retime.foundations.torch_private import recurrent_kernels
from retime.mechanisms.scan.cells import Weights

MODES = ("RNN_TANH", "RNN_RELU", "GRU", "LSTM")


def run_native(
    mode: str, x: Tensor, state: tuple[Tensor, ...], directions: tuple[Weights, ...], batch_sizes: Tensor | None = None
) -> tuple[Tensor, ...]:
    """What torch.nn calls for this layer, so that its values are torch.nn's bit for bit.

    Args:
        x: ``[T, B, I]``, or packed ``[N, I]`` with ``batch_sizes``.
        state: ``h0`` and, for LSTM, ``c0``: ``[D, B, H]`` each, ``D`` directions.
        directions: one direction's weights, or the forward and the reverse one's.

    Returns:
        Output ``[T, B, D * H]`` or ``[N, D * H]``, then the last states ``[D, B, H]``.
    """
    flat = tuple(weight for weights in directions for weight in weights if weight is not None)
    hx = state if mode == "LSTM" else state[0]
    kernel = getattr(recurrent_kernels, mode.lower())
    has_biases, two_ways = directions[0].input_bias is not None, len(directions) == 2
    if batch_sizes is None:
        results = kernel(x, hx, flat, has_biases, 1, 0.0, True, two_ways, False)
    else:
        results = kernel(x, batch_sizes, hx, flat, has_biases, 1, 0.0, True, two_ways)
    return tuple(results)
