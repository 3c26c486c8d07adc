"""Rows that need two ranks: one pair of gloo processes runs all of a row's scenarios, one after the other."""

import os
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch

from contract.record import Record, Refusal
from support.ranks import torchrun_variables
from support.time_limits import limit_s
from support.warm_start import Warm

WORLD_SIZE = 2
START_S = 90
"""The longest a pair may take from its start to its first result (imports, on a busy machine)."""
SCENARIO_S = 30
"""The longest one scenario may take after that: the ranks then wait for each other for ever."""
GRACE_S = 5
"""How long the second rank may take to notice that the first has failed."""
PAIRS = 6
"""A failed scenario ends its pair of processes; so many pairs are started before the rest is given up."""
AT_WORK = 2
"""So many rows' pairs are at work at once: each rank waits for the other half of the time."""


class RankError(AssertionError):
    """A scenario failed on some rank; the message holds the ranks' tracebacks."""


def let_work(ranks: "Iterable[RankRuns]") -> None:
    """Let the first of these go to work that have not yet, while this process does other things."""
    ranks = list(ranks)
    idle = AT_WORK - sum(one.works for one in ranks)
    for one in ranks:
        idle -= idle > 0 and one.begin()


class RankRuns:
    """Runs `scenarios` under a row on two ranks, from `begin` on, or from the first question for a record on.

    Attributes:
        worker: the module of one rank.
        meanwhile: is called again and again while these ranks are waited for.
    """

    worker = "contract.worker"

    def __init__(self, row: str, scenarios: list[str], folder: Path, scenario_s: float = SCENARIO_S) -> None:
        self._row, self._scenarios, self._folder, self._scenario_s = row, scenarios, folder, scenario_s
        self._results: dict[str, list[Any]] | None = None
        self._processes: list[Warm] = []
        self._logs: list[Path] = []
        self.meanwhile: Callable[[], object] = lambda: None

    @property
    def works(self) -> bool:
        return any(process.returncode is None for process in self._processes)

    def begin(self) -> bool:
        """Start a first pair, unless there was one or there is nothing to run, and say so."""
        first = bool(self._scenarios) and not self._logs
        if first:
            try:
                self._start(self._scenarios, 0)
            except Exception:  # this row's, and not that of the one that is waited for: it starts again when asked
                self.stop()
        return first

    def records(self, scenario: str) -> list[Record]:
        """The scenario's records by rank."""
        if self._results is None:
            self._results = {}
            self._run_all(self._results)
        results = self._results.get(scenario, [f"not run: {PAIRS} pairs of processes had failed before it"])
        if all(isinstance(result, Record) for result in results):
            return results
        refused = [isinstance(result, Refusal) for result in results]
        if any(refused) and not all(refused):
            raise RankError(f"only rank {refused.index(True)} ended with the error that all ranks must end with")
        texts = [f"rank {rank}:\n{result}" for rank, result in enumerate(results) if not isinstance(result, Record)]
        raise RankError("\n".join(texts))

    def stop(self) -> None:
        """End the processes, if they are still there."""
        for process in self._processes:
            process.kill()
        self._processes = []

    def _run_all(self, results: dict[str, list[Any]]) -> None:
        left = list(self._scenarios)
        for attempt in range(PAIRS):
            if not left:
                return
            try:
                if not self._processes:  # else they have begun
                    self._start(left, attempt)
                failure = self._watch(left)
            finally:
                self.stop()
            for name in left:
                paths = self._paths(name)
                if all(path.exists() for path in paths) or name == failure:
                    results[name] = [self._read(path, log) for path, log in zip(paths, self._logs, strict=True)]
            left = [name for name in left if name not in results]

    def _start(self, scenarios: list[str], attempt: int) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        self._logs = [self._folder / f"{attempt}.{rank}.log" for rank in range(WORLD_SIZE)]
        for log, variables in zip(self._logs, torchrun_variables(WORLD_SIZE), strict=True):
            arguments = [self._row, str(self._folder), *scenarios]
            self._processes.append(Warm(self.worker, arguments, os.environ | variables, log, log))

    def _watch(self, scenarios: list[str]) -> str | None:
        """Wait for the pair; return the scenario in which it failed or hung."""
        deadline, seen = time.monotonic() + limit_s(START_S), 0
        while self.works:
            time.sleep(0.1)
            self.meanwhile()
            done = self._done(scenarios)
            if done > seen:
                deadline, seen = time.monotonic() + limit_s(self._scenario_s), done
            if any(process.returncode not in (None, 0) for process in self._processes):
                deadline = min(deadline, time.monotonic() + limit_s(GRACE_S))
            if time.monotonic() > deadline:
                break
        for name in scenarios:
            paths = self._paths(name)
            if not all(path.exists() for path in paths) or any(self._ended_by(path) for path in paths):
                return name
        return None

    def _ended_by(self, path: Path) -> bool:
        result = self._read(path)
        return isinstance(result, str) and not isinstance(result, Refusal)

    def _done(self, scenarios: list[str]) -> int:
        return sum(path.exists() for name in scenarios for path in self._paths(name))

    def _paths(self, scenario: str) -> list[Path]:
        return [self._folder / f"{scenario}.{rank}.pt" for rank in range(WORLD_SIZE)]

    @staticmethod
    def _read(path: Path, log: Path | None = None) -> Any:
        if path.exists():
            return torch.load(path, weights_only=False)
        tail = "" if log is None else log.read_text(errors="replace")[-2000:]
        return f"no result: the process hung or died. The end of its output:\n{tail}"
