"""What `convert` and `convert_back` did, in words."""

from dataclasses import dataclass, field


@dataclass(frozen=True)
class ConversionReport:
    """Names as in `model.named_modules()`; the model itself is called "".

    Attributes:
        swapped: name to what happened, "GRU -> ScanGRU".
        skipped: name to why that recurrent module stayed as it is.
    """

    swapped: dict[str, str] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        count = len(self.swapped) + len(self.skipped)
        lines = [f"{len(self.swapped)} of {count} recurrent modules converted"]
        lines += [f"  {name or '(the model itself)'}: {what}" for name, what in self.swapped.items()]
        lines += [f"  {name or '(the model itself)'} left as it is: {why}" for name, why in self.skipped.items()]
        return "\n".join(lines)
