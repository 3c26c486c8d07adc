"""The forward pass: torch's own kernels, one layer and one direction a call."""

from torch import _VF, Tensor

from retime.mechanisms.scan.cells import Weights

MODES = ("RNN_TANH", "RNN_RELU", "GRU", "LSTM")


def run_native(
    mode: str, x: Tensor, state: tuple[Tensor, ...], weights: Weights, batch_sizes: Tensor | None = None
) -> tuple[Tensor, ...]:
    """What torch.nn would call for this layer, so that its values are torch.nn's bit for bit.

    :param x: ``[T, B, I]``, or packed ``[N, I]`` with ``batch_sizes``.
    :param state: ``h0`` and, for LSTM, ``c0``: ``[B, H]`` each.
    :return: output ``[T, B, H]`` or ``[N, H]``, then the last states ``[B, H]``.
    """
    first = tuple(part.unsqueeze(0) for part in state)
    flat = tuple(weight for weight in weights if weight is not None)
    hx = first if mode == "LSTM" else first[0]
    kernel = getattr(_VF, mode.lower())
    has_biases = weights.input_bias is not None
    if batch_sizes is None:
        results = kernel(x, hx, flat, has_biases, 1, 0.0, True, False, False)
    else:
        results = kernel(x, batch_sizes, hx, flat, has_biases, 1, 0.0, True, False)
    return (results[0], *(part.squeeze(0) for part in results[1:]))
