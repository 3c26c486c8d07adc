"""Processes that train by one method each and take turns: how `retime advise` and `make demo` compare two ways.

What each process does is in :mod:`retime.commands.advise_worker`.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from functools import cached_property
from multiprocessing.connection import wait
from statistics import median
from typing import Any

from retime.foundations.measure import Spread
from retime.foundations.workers import Server, Worker, WorkerError, free_port, rank_variables

FASTER, SLOWER, UNDECIDED = "faster", "slower", "undecided"
_LEAST_ROUNDS, _ENOUGH_ROUNDS = 3, 5
_HOPELESS = 0.9
"""The most speed in any round of a method that gets no more rounds."""
_BLOCK_MS, _MOST_STEPS = 300.0, 500
"""Of a block, which gives one number of a round; several steps where they are short."""
_HAS_NO_EFFECT = re.compile(r"no effect(: | on these steps)|do not pay here|no CPU memory pool: ")
"""In a NoEffectWarning about all of a method, and not about some layers or parameters."""

Block = tuple[float, int]
"""The median step of a block in ms, and its peak in bytes."""


class MethodError(Exception):
    """Reason why a method does not apply, in its own words; `missing` is a module that is not installed."""

    def __init__(self, text: str, missing: str | None = None) -> None:
        super().__init__(text)
        self.missing = missing


class Limit:
    """Until when a method may be measured; `option` is how a user says it."""

    def __init__(self, seconds: float, option: str = "") -> None:
        self.seconds, self._end = seconds, time.monotonic() + seconds
        self._option = option or f"--seconds {seconds:g}"

    def left_s(self) -> float:
        return max(0.0, self._end - time.monotonic())

    def __str__(self) -> str:
        return self._option


class Running:
    """Processes that train by one method, a rank each, and wait in the middle of it.

    They start in the background, which takes seconds: `first` and `steps` wait for them.

    Args:
        server: what answers in each; it has to train by :func:`retime.commands.advise_worker.fit_in_turns`.
        request: the first, which starts the training.
        environment: variables to start the processes with, from their first instruction on; None forks them, which is
            quicker.
        ranks: how many.
        limit: for the first answer.
    """

    def __init__(
        self, server: Server, request: dict[str, Any], environment: Mapping[str, str] | None, ranks: int, limit: Limit
    ) -> None:
        self._workers: list[Worker] = []
        self._limit, self.is_busy = limit, True
        try:
            port = free_port()
            for rank in range(ranks):
                variables = rank_variables(rank, ranks, port) if ranks > 1 else {}
                self._workers.append(Worker(server, None, environment=environment, variables=variables))
                self._workers[-1].tell({**request, "rank": rank})
        except BaseException:
            self.close()
            raise

    @cached_property
    def first(self) -> dict[str, Any]:
        """The answer of the first steps.

        Raises:
            MethodError: they failed, or took too long.
        """
        return self._answers()

    def steps(self, limit: Limit, count: int, **more: Any) -> dict[str, Any]:
        """Train so many steps; all ranks' times (the slowest counts), and the most bytes that one had."""
        _ = self.first  # one request at a time
        self._limit, self.is_busy = limit, True
        for worker in self._workers:
            worker.tell({"steps": count, **more})
        return self._answers()

    def block(self, limit: Limit, step_ms: float, **more: Any) -> Block:
        """Train a block of steps that take about `step_ms`."""
        answer = self.steps(limit, max(1, min(_MOST_STEPS, round(_BLOCK_MS / step_ms))), **more)
        return median(answer["ms"]), answer["peak_bytes"]

    def close(self) -> None:
        """End the processes, whatever they do."""
        for worker in self._workers:
            worker.close()

    def _answers(self) -> dict[str, Any]:
        waiting = {worker.connection: number for number, worker in enumerate(self._workers)}
        answers: dict[int, Any] = {}
        while waiting:
            ready = wait(list(waiting), self._limit.left_s())
            if not ready:
                raise MethodError(f"it took longer than {self._limit}: give more")
            for connection in ready:
                number = waiting[connection]  # type: ignore[index]
                try:
                    if not self._workers[number].heard(0):
                        continue
                except WorkerError as error:
                    raise MethodError(str(error).splitlines()[0]) from error
                answers[number] = self._workers[number].answered
                if "error" in answers[number]:
                    raise MethodError(answers[number]["error"], answers[number]["missing"])
                del waiting[connection]  # type: ignore[arg-type]
        self.is_busy = False
        every = [answers[number] for number in sorted(answers)]
        if "ms" not in every[0]:
            return dict(every[0])
        return {
            **every[0],
            "ms": [max(step) for step in zip(*(one["ms"] for one in every), strict=True)],
            "peak_bytes": max(one["peak_bytes"] for one in every),
            "spans": [one["spans"] for one in every],
        }


def settled(running: Running, warm_steps: int, limit: Limit) -> tuple[dict[str, Any], int]:
    """Train until a method has settled, at most half of the time; the last answer, and steps since the fit began."""
    answer, done = running.first, len(running.first["ms"])
    while done < warm_steps and limit.left_s() > limit.seconds / 2:
        count = min(warm_steps - done, max(1, round(_BLOCK_MS / max(answer["ms"]))))
        answer, done = running.steps(limit, count), done + count
    return answer, done


def in_turns(base: Running, other: Running, limit: Limit, rounds: int) -> tuple[list[Block], list[Block]]:
    """Blocks of both, one of each a round, who is first in turn.

    Fewer rounds where the time is short, or where the other is much slower in each of the first five.

    Raises:
        MethodError: it is too short for three, or one of them does not go on.
    """
    guesses = [median(one.steps(limit, 2)["ms"]) for one in (base, other)]
    blocks: tuple[list[Block], list[Block]] = ([], [])
    while len(blocks[0]) < rounds:
        began = limit.left_s()
        for turn in (0, 1) if len(blocks[0]) % 2 else (1, 0):
            blocks[turn].append((base, other)[turn].block(limit, guesses[turn]))
        if began - limit.left_s() > limit.left_s():
            break
        speeds = [before / after for (before, _), (after, _) in zip(*blocks, strict=True)]
        if len(speeds) >= _ENOUGH_ROUNDS and max(speeds) < _HOPELESS:
            break
    if len(blocks[0]) < min(rounds, _LEAST_ROUNDS):
        raise MethodError(f"only {len(blocks[0])} rounds in {limit}: give more")
    return blocks


def judged(gain: Spread) -> str:
    """Verdict on a gain in speed: its quartiles, or all of fewer than five rounds, have to lie on one side of 1."""
    least, most = gain.reach
    return FASTER if least > 1 else SLOWER if most < 1 else UNDECIDED


def notes_of(messages: Sequence[tuple[str, str]]) -> list[str]:
    """The texts of a method's warnings, those of differences first."""
    return [text for kind in ("DifferenceWarning", "NoEffectWarning") for one, text in messages if one == kind]


def no_effect(messages: Sequence[tuple[str, str]]) -> str:
    """Reason why a method did nothing in these steps, in its own words; "" where it did something."""
    return next((text for text in notes_of(messages) if _HAS_NO_EFFECT.search(text)), "")
