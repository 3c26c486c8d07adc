"""Coefficients of the cost model that ship with the package, by type of device."""

from retime.mechanisms.scan.cost_model import CostModel

CPU = CostModel(
    {
        "RNN autograd": (57.4, 23.0, 0.000129, 0.00395, 3.95e-05),
        "RNN sequential": (317.0, 6.49, 0.00531, 4.61e-05),
        "RNN chunk": (527.0, 6.16, 0.0229, 0.0, 0.0, 2.5e-05),
        "RNN blelloch": (154.0, 126.0, 0.0, 0.0016, 0.00276, 0.0),
        "GRU autograd": (0.0, 79.4, 0.000761, 0.0128, 0.000127),
        "GRU sequential": (494.0, 6.64, 0.0283, 0.000215),
        "GRU chunk": (459.0, 12.2, 0.103, 0.0, 0.0, 0.000108),
        "GRU blelloch": (181.0, 146.0, 0.0686, 0.0, 0.00217, 7.49e-06),
        "LSTM autograd": (0.0, 72.2, 0.000642, 0.0231, 9.19e-05),
        "LSTM sequential": (529.0, 30.1, 0.0523, 0.000154),
        "LSTM chunk": (470.0, 25.5, 0.0, 0.0, 0.0196, 7.49e-05),
    }
)
"""Fitted to one core of a server (AVX-512, torch 2.13) over T 10 to 3000, B 1 to 256, H 8 to 256."""

CUDA = CostModel(
    {
        f"{cell} {way}": coefficients
        for cell in ("RNN", "GRU", "LSTM")
        for way, coefficients in {
            "autograd": (60.0, 2.5, 0.0, 1e-6, 1e-7),
            "chunk": (150.0, 12.0, 1e-6, 1e-7, 3e-6, 4e-7),
            "blelloch": (150.0, 60.0, 1e-6, 1e-7, 1e-5, 8e-7),
        }.items()
    }
)
"""Estimates, not measurements: 2.5 microseconds a step in cuDNN, 5 a launch. ``calibrate("cuda")`` measures, and alone
gives the coefficients with which "auto" may choose the Triton kernels."""
