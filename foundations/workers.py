"""Worker processes: each answers every request that it is sent with what a function or method returns.

    answer = answer_once(serve, {"model": ..., "steps": 5})         # one request, in a process of its own
    with closing({"a": Worker(Server, {"do": "build"})}): ...       # processes that take turns

A request is a dictionary, whose `do` names the method or function that answers where there are several; an answer is
any plain value. While it works, a process may `tell` lines of progress. It ends with the one that started it, however
that ends, together with all processes that it has started itself.

Processes are forked from one server that has imported torch, which takes seconds, and has done nothing else; with a
`launch` command, or an `environment` that counts from a process's first instruction, they are started anew.
"""

from __future__ import annotations

import ctypes
import fcntl
import gc
import importlib
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from multiprocessing import Pipe, forkserver, get_context, reduction
from multiprocessing.connection import Connection
from pathlib import Path
from typing import IO, Any

Answer = Callable[[dict[str, Any]], Any]
Server = Callable[..., object]

PRELOADED = ["retime"]
"""Modules that the server imports before it forks; a package whose workers need more adds its own."""
KEPT_HEAP = {
    "MALLOC_MMAP_THRESHOLD_": "100000000000",
    "MALLOC_TRIM_THRESHOLD_": "100000000000",
    "MALLOC_TOP_PAD_": "67108864",
}
"""An environment: the C library maps no memory and gives none back, and its heap grows by 64 MiB."""
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_MAX, _MADV_POPULATE_READ = -1, -2, -4, 22  # mallopt(3), madvise(2)
_LINES = 3000  # characters of what a process printed before it died
_GRACE_S = 10.0
_PORTS = 16  # that are held; ranks have met at the oldest by then
# What a launcher leaves in the environment; inherited, it would make a new job join the old one as a single rank.
_LAUNCHER_VARIABLES = (
    *("LOCAL_RANK", "RANK", "GROUP_RANK", "NODE_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"),
    *("MASTER_ADDR", "MASTER_PORT", "PL_TRAINER_STRATEGY", "PL_TRAINER_DEVICES", "TORCHELASTIC_RUN_ID"),
)
_PROGRESS, _ANSWER, _ERROR = "progress", "answer", "error"


class WorkerError(RuntimeError):
    """A worker failed; the message is its own, and a note has the end of what it printed."""


class Worker:
    """A process of its own that answers one request after the other.

    Args:
        server: a function that answers, or a class of whose only object the methods do; it can be imported.
        request: the first one; its answer is :attr:`ready`. None asks for nothing yet.
        timeout_s: longest wait for an answer.
        launch: stands before the command that starts the process, such as `ip netns exec NAME`.
        environment: variables to start it with, such as the C library's.
        variables: others to add, which nothing reads before it has imported torch.
        progress: gets the lines that the process tells.

    Raises:
        WorkerError: it ended, answered with an error, or took too long.
    """

    def __init__(
        self,
        server: Server,
        request: dict[str, Any] | None,
        timeout_s: float = 900.0,
        *,
        launch: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
        variables: Mapping[str, str] | None = None,
        progress: Callable[[str], None] = lambda text: None,
    ) -> None:
        self._timeout_s, self._progress, self._unanswered = timeout_s, progress, 0
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 -- close()
        self.connection, theirs = Pipe()
        ends, self._life_line = Pipe(duplex=False)  # nothing is ever sent: it breaks when this process ends
        with theirs, ends:
            if launch or environment is not None:
                added = {**(environment or {}), **(variables or {})}
                self._process: Any = _started(theirs, self._log, launch, added)
            else:
                self._process = _forked(theirs, variables)
            with suppress(OSError):  # a process that has ended says so when it is to answer
                for handle in (ends.fileno(), self._log.fileno()):
                    reduction.send_handle(self.connection, handle, self._process.pid)
                self.connection.send(f"{server.__module__}:{server.__qualname__}")
        try:
            self.ready = {} if request is None else self.ask(request)
        except BaseException:
            self.close()
            raise

    def ask(self, request: dict[str, Any]) -> Any:
        """Send a request and wait for its answer."""
        self.tell(request)
        return self.answer()

    def tell(self, request: dict[str, Any]) -> None:
        """Send a request; every one has an answer."""
        self._unanswered += 1
        with suppress(OSError):  # a process that has ended says so when it is to answer
            self.connection.send(request)

    def answer(self) -> Any:
        """Wait for the answer to the oldest request without one."""
        deadline = time.monotonic() + self._timeout_s
        while not self.heard(max(0.0, deadline - time.monotonic())):
            if time.monotonic() > deadline:
                raise WorkerError(f"no answer in {self._timeout_s:g} s: raise timeout_s, or use smaller sizes")
        return self.answered

    def heard(self, timeout_s: float) -> bool:
        """Take the next message, if one comes in time; True if that is the answer, then in `answered`."""
        try:
            if not self.connection.poll(timeout_s):
                return False
            kind, value = self.connection.recv()
        except (EOFError, OSError):
            raise WorkerError(f"the process ended ({self._death()}): {self.printed()}") from None
        if kind == _PROGRESS:
            self._progress(value)
            return False
        self._unanswered -= 1
        if kind == _ERROR:
            failed = WorkerError(value)
            failed.add_note(self.printed())
            raise failed
        self.answered: Any = value
        return True

    def printed(self) -> str:
        """The end of what the process has printed."""
        log = self._log.fileno()  # its position is the process's
        start = max(0, os.fstat(log).st_size - _LINES)
        return os.pread(log, _LINES, start).decode(errors="replace").strip() or "(no output)"

    def close(self) -> None:
        """End the process and those it has started; at once if it has not answered."""
        self.connection.close()
        if not self._unanswered:
            self._process.join(_GRACE_S)
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        if self._process.is_alive():
            self._process.kill()
        self._process.join(None)
        self._life_line.close()
        self._log.close()

    def _death(self) -> str:
        self._process.join(_GRACE_S)
        code = self._process.exitcode
        return f"by {signal.Signals(-code).name}" if code is not None and code < 0 else f"exit status {code}"


@contextmanager
def closing(workers: Mapping[str, Worker]) -> Iterator[None]:
    """End all workers at the end, whatever happened."""
    try:
        yield
    finally:
        for worker in workers.values():
            worker.close()


def answer_once(server: Server, request: dict[str, Any], timeout_s: float = 900.0, **options: Any) -> Any:
    """Ask one thing in a process of its own; arguments and errors as those of :class:`Worker`."""
    worker = Worker(server, request, timeout_s, **options)
    worker.close()
    return worker.ready


def by_name(*functions: Answer) -> Answer:
    """Answer a request by the function that its `do` names."""
    return lambda request: {one.__name__: one for one in functions}[request["do"]](request)


def tell(text: str) -> None:
    """In a worker: a line of progress for whoever asked. Nothing elsewhere."""
    if _served is not None:
        _served.send((_PROGRESS, text))


def next_request(answer: Any) -> dict[str, Any] | None:
    """In a worker, from inside of what a request started: answer now, and wait for the next; None: there is none."""
    assert _served is not None
    try:
        _served.send((_ANSWER, answer))
        request: dict[str, Any] = _served.recv()
    except (EOFError, OSError):
        return None
    return request


def keep_heap() -> None:
    """Map no memory and give none back from now on, as with :data:`KEPT_HEAP`, in a process that was forked (glibc)."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", lambda setting, value: 0)
    for setting, value in ((_M_MMAP_MAX, 0), (_M_TRIM_THRESHOLD, -1), (_M_TOP_PAD, 64 * 2**20)):
        mallopt(setting, value)


def touch_libraries() -> None:
    """Make all code and data of libraries resident: a forked process has the memory, but no page of a file yet.

    Else pages that a step happens to touch first would count as what it needs. Kernels before Linux 5.14 do nothing.
    """
    libc = ctypes.CDLL(None)
    for line in Path("/proc/self/maps").read_text().splitlines() if sys.platform == "linux" else ():
        bounds, access, *_, file = line.split(maxsplit=5)
        if access.startswith("r") and file.startswith("/"):
            start, end = (int(bound, 16) for bound in bounds.split("-"))
            libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), _MADV_POPULATE_READ)


def free_port() -> int:
    """A TCP port for ranks to meet at, which a socket that never listens keeps from others until they have met."""
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a store sets it too, and may listen beside
    sock.bind(("127.0.0.1", 0))
    port = int(sock.getsockname()[1])
    _held_ports.append(sock.detach())
    if len(_held_ports) > _PORTS:
        os.close(_held_ports.pop(0))
    return port


def rank_variables(
    rank: int, ranks: int, port: int, address: str = "127.0.0.1", interface: str = "lo"
) -> dict[str, str]:
    """The environment that torchrun would give a process: the address is rank 0's, the interface its own."""
    return {
        "MASTER_ADDR": address,
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(ranks),
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(ranks),
        "GROUP_RANK": "0",
        "TORCHELASTIC_RUN_ID": "retime",  # Lightning then starts no processes of its own
        "GLOO_SOCKET_IFNAME": interface,
    }


_served: Connection | None = None
_held_ports: list[int] = []


def _serve(channel: Connection, cores: Sequence[int] = (), environment: Mapping[str, str] | None = None) -> None:
    """A worker's own side: answer until there are no more requests."""
    global _served
    gc.freeze()  # what was imported are 400,000 objects: collections, of which plans ask for many, pass over them
    if cores:
        os.sched_setaffinity(0, cores)
    if environment is not None:
        os.environ.clear()
        os.environ.update(environment)
    with suppress(PermissionError):  # it leads a session already
        os.setsid()  # Ctrl-C reaches the parent alone, which then ends its workers
    _end_with(reduction.recv_handle(channel))
    printed = reduction.recv_handle(channel)
    os.dup2(printed, 1)
    os.dup2(printed, 2)
    reference = channel.recv()
    _served = channel
    answer: Answer | None = None
    while True:
        try:
            request = channel.recv()
        except EOFError:
            return
        try:
            if answer is None:
                module, _, name = reference.partition(":")
                answer = _answer_of(getattr(importlib.import_module(module), name))
            reply = _ANSWER, answer(request)
        except Exception as error:  # whatever it was, the other side wants to know
            traceback.print_exc()
            reply = _ERROR, f"{type(error).__name__}: {error}"
        sys.stdout.flush()
        sys.stderr.flush()
        channel.send(reply)


def _answer_of(server: Any) -> Answer:
    """A function answers by itself, a class by the methods of one object."""
    if not isinstance(server, type):
        return server  # type: ignore[no-any-return]
    served = server()
    return lambda request: getattr(served, request["do"])(request)


def _end_with(life_line: int) -> None:
    """The kernel is to kill this process, and all that it starts, when the other end of the pipe closes (fcntl(2)).

    Not by PR_SET_PDEATHSIG, which looks at the parent: a forked worker's is the server, which outlives who asked it.
    """
    if sys.platform != "linux":
        return
    fcntl.fcntl(life_line, fcntl.F_SETOWN, -os.getpgrp())
    fcntl.fcntl(life_line, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(life_line, fcntl.F_SETFL, os.O_ASYNC)
    if select.select([life_line], [], [], 0)[0]:
        os._exit(1)  # it closed before we asked


def _forked(theirs: Connection, variables: Mapping[str, str] | None) -> Any:
    context = get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    with _one_thread():
        forkserver.ensure_running()
    cores = sorted(os.sched_getaffinity(0)) if sys.platform == "linux" else []
    environment = None if variables is None else _environment(variables)  # the server's is of when it was started
    process = context.Process(target=_serve, args=(theirs, cores, environment), daemon=True)
    process.start()
    return process


class _Started(subprocess.Popen[bytes]):
    """A process with the methods of multiprocessing's."""

    def join(self, timeout_s: float | None) -> None:
        with suppress(subprocess.TimeoutExpired):
            self.wait(timeout_s)

    def is_alive(self) -> bool:
        return self.poll() is None

    @property
    def exitcode(self) -> int | None:
        return self.poll()


def _environment(added: Mapping[str, str]) -> dict[str, str]:
    inherited = {key: value for key, value in os.environ.items() if key not in _LAUNCHER_VARIABLES}
    return {**inherited, "OMP_NUM_THREADS": "1", **added}


def _started(theirs: Connection, log: IO[bytes], launch: Sequence[str], environment: Mapping[str, str]) -> _Started:
    code = f"from {__name__} import serve_at; serve_at({theirs.fileno()})"
    return _Started(
        [*launch, sys.executable, "-c", code],
        env=_environment(environment),
        stdout=log,
        stderr=log,
        pass_fds=[theirs.fileno()],
        start_new_session=True,
    )


def serve_at(number: int) -> None:
    """A started process's entry: `number` is the inherited end of its pipe."""
    _serve(Connection(number))
    # At the interpreter's own end gloo's threads may outlive what they use, and the process aborts.
    os._exit(0)


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
