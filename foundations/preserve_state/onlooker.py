"""Modes that look on while a step is trained for real."""

from __future__ import annotations

from retime.foundations.torch_private import TorchDispatchMode

__all__ = ["Onlooker"]


class Onlooker(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees each operation, and changes none: compiled code stays compiled, and what it does inside is not seen."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Torch would else run what was compiled without its compiled code."""
        return True
