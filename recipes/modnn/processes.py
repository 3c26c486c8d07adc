"""Processes that train side by side, a block of steps at a time, so that their times can be compared.

A limit of memory holds for a whole process, so plans under different budgets cannot share one. They are started once
and take turns: drift of the machine meets them alike. All are forked from one server that has imported torch, which
takes seconds, and has done nothing else.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing import forkserver, get_context
from multiprocessing.connection import Connection
from typing import Any

Answer = Callable[[dict[str, Any]], dict[str, Any]]

_PRELOADED = ["retime.recipes.modnn.budget_worker"]
_LINES = 3000  # characters of what a process printed before it died


class Worker:
    """A process of its own that answers one dictionary for each dictionary.

    Args:
        server: called in the process; returns what answers. A class or function that can be imported.
        request: the first one; its answer is :attr:`ready`. None asks for nothing yet.
        timeout_s: longest wait for an answer.

    Raises:
        WorkerError: it ended, answered with an error, or took too long.
    """

    def __init__(self, server: Callable[[], Answer], request: dict[str, Any] | None, timeout_s: float = 900.0) -> None:
        self._timeout_s = timeout_s
        self._log = tempfile.NamedTemporaryFile(mode="r", encoding="utf-8", prefix="retime-")  # noqa: SIM115 -- close()
        context = get_context("forkserver")
        context.set_forkserver_preload(_PRELOADED)
        with _one_thread():
            forkserver.ensure_running()
        self._connection, theirs = context.Pipe()
        cores = sorted(os.sched_getaffinity(0)) if sys.platform == "linux" else []
        self._process = context.Process(target=_serve, args=(theirs, server, self._log.name, cores), daemon=True)
        self._process.start()
        theirs.close()
        try:
            self.ready = {} if request is None else self.ask(request)
        except BaseException:
            self.close()
            raise

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """Send a request and wait for its answer."""
        self.tell(request)
        return self.answer()

    def tell(self, request: dict[str, Any]) -> None:
        """Send a request; every one has an answer."""
        with suppress(OSError):  # a process that has ended says so when it is to answer
            self._connection.send(request)

    def answer(self) -> dict[str, Any]:
        """Wait for the answer to the oldest request without one."""
        try:
            if not self._connection.poll(self._timeout_s):
                raise WorkerError(f"no answer in {self._timeout_s:g} s: raise timeout_s, or use smaller sizes")
            answer: dict[str, Any] = self._connection.recv()
        except (EOFError, OSError):
            self._process.join(10)
            printed = self._log.read()[-_LINES:]
            raise WorkerError(f"the process ended (exit status {self._process.exitcode}): {printed}") from None
        if "error" in answer:
            raise WorkerError(str(answer["error"]))
        return answer

    def close(self) -> None:
        """End the process."""
        self._connection.close()
        self._process.join(10)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()
        self._process.close()
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


def answer_once(server: Callable[[], Answer], request: dict[str, Any], timeout_s: float = 900.0) -> dict[str, Any]:
    """Ask one thing in a process of its own; raises as :class:`Worker`."""
    worker = Worker(server, request, timeout_s)
    worker.close()
    return worker.ready


def _serve(connection: Connection, server: Callable[[], Answer], log: str, cores: list[int]) -> None:
    """The other side of :class:`Worker`: answer until there are no more requests."""
    if cores:
        os.sched_setaffinity(0, cores)
    printed = os.open(log, os.O_WRONLY | os.O_APPEND)
    os.dup2(printed, 1)
    os.dup2(printed, 2)
    answer: Answer | None = None
    while True:
        try:
            request = connection.recv()
        except EOFError:
            return
        try:
            answer = answer or server()
            reply = answer(request)
        except Exception as error:  # whatever it was, the other side wants to know
            reply = {"error": f"{type(error).__name__}: {error}"}
        connection.send(reply)


@contextmanager
def _one_thread() -> Iterator[None]:
    """Libraries that start threads as they are imported start none: the server is to be forked."""
    before = os.environ.get("OMP_NUM_THREADS")
    os.environ["OMP_NUM_THREADS"] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ["OMP_NUM_THREADS"]
        else:
            os.environ["OMP_NUM_THREADS"] = before
