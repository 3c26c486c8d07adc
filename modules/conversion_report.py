"""What `convert` and `convert_back` did, in words."""

from dataclasses import dataclass, field

from retime.foundations.reports import Report


@dataclass(frozen=True)
class ConversionReport(Report):
    """Names as in `model.named_modules()`; the model itself is called "".

    Attributes:
        swapped: name to what happened, "GRU -> ScanGRU".
        skipped: name to why that recurrent module stayed as it is.
    """

    swapped: dict[str, str] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)

    def what_was_done(self) -> list[str]:
        count = len(self.swapped) + len(self.skipped)
        names = [f"{_named(name)}: {what}" for name, what in self.swapped.items()]
        return [f"{len(self.swapped)} of {count} recurrent modules converted", *names]

    def what_stayed_plain(self) -> list[str]:
        return [f"{_named(name)}: {why}" for name, why in self.skipped.items()]


def _named(name: str) -> str:
    return name or "(the model itself)"
