"""Runs of scenarios under rows, each made once and remembered: every row is compared with the same plain run."""

from pathlib import Path

from contract.bench import run
from contract.ranks import RankRuns, let_work
from contract.record import Record
from contract.rows import PLAIN, STRATEGIES, Row
from contract.scenarios import SCENARIOS


class Runs:
    """The session's runs.

    Args:
        folder: where runs may write.
        chosen: the scenarios wanted of each row by name. Rows on several ranks run all of theirs in one go.
    """

    def __init__(self, folder: Path, chosen: dict[str, set[str]]) -> None:
        self._folder, self._chosen = folder, chosen
        self._here: dict[str, Record] = {}
        self._ranks: dict[str, RankRuns] = {}

    def of(self, row: Row, scenario: str) -> list[Record]:
        """One record for each rank; raises what the run raised."""
        self._begin(row)
        if row.on_ranks:
            return self._on_ranks(row).records(scenario)
        folder = self._folder / row.name / scenario
        if row is not row.reference:  # only a plain run is wanted again
            return [run(row, SCENARIOS[scenario], folder)]
        if scenario not in self._here:
            self._here[scenario] = run(row, SCENARIOS[scenario], folder)
        return [self._here[scenario]]

    def _on_ranks(self, row: Row) -> RankRuns:
        if row.name not in self._ranks:
            names = [name for name in SCENARIOS if name in self._chosen[row.name] - row.cannot.keys()]
            self._ranks[row.name] = RankRuns(row.name, names, self._folder / row.name)
            self._ranks[row.name].meanwhile = lambda: self._begin(row)
        return self._ranks[row.name]

    def _begin(self, asked: Row) -> None:
        """Let ranks go to work that are asked for later, of the rows that run in this process with `asked`."""
        share = [row for row in (PLAIN["ddp"], *STRATEGIES) if (row.plain == "ddp") == (asked.plain == "ddp")]
        let_work(self._on_ranks(row) for row in share if row.on_ranks and row.name in self._chosen)

    def stop(self) -> None:
        """End worker processes that are still there."""
        for runs in self._ranks.values():
            runs.stop()
