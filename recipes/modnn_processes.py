"""Processes that train side by side, a block of steps at a time, so that their times can be compared.

A limit of memory holds for a whole process, so plans under different budgets cannot share one. They are started once
and take turns: drift of the machine meets them alike.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


class Worker:
    """`python -m module`, which answers one line of JSON for each line of JSON.

    Raises:
        WorkerError: it ended, or answered with an error.
    """

    def __init__(self, module: str, request: dict[str, Any]) -> None:
        self._log = tempfile.TemporaryFile(mode="w+", encoding="utf-8")  # noqa: SIM115 -- closed by close()
        self._process = subprocess.Popen(
            [sys.executable, "-m", module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            text=True,
        )
        try:
            self.ready = self.ask(request)
        except BaseException:
            self.close()
            raise

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """Send a request and wait for its answer."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            self._log.seek(0)
            raise WorkerError(f"the process ended (exit status {self._process.wait()}): {self._log.read()[-3000:]}")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise WorkerError(str(answer["error"]))
        return answer

    def close(self) -> None:
        """End the process."""
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._log.close()


class WorkerError(RuntimeError):
    """A worker failed; the message is its own."""


@contextmanager
def closing(workers: dict[str, Worker]) -> Iterator[None]:
    """End all workers at the end, whatever happened."""
    try:
        yield
    finally:
        for worker in workers.values():
            worker.close()


def serve_lines(answer: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """The other side of :class:`Worker`: answer each line until there are no more."""
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what libraries print is no answer
    for line in sys.stdin:
        try:
            reply = answer(json.loads(line))
        except Exception as error:  # whatever it was, the other side wants to know
            reply = {"error": f"{type(error).__name__}: {error}"}
        replies.write(json.dumps(reply) + "\n")
        replies.flush()
