"""Processes that start with torch, Lightning and retime imported: what takes seconds to import is imported once.

A server (the standard library's) has imported them and forks itself; a child then runs a script as Python would run it.
What has to start from nothing, such as a launcher or a process whose memory is limited, is a `Cold` process.
"""

import gc
import multiprocessing
import os
import runpy
import subprocess
import sys
import time
from contextlib import suppress
from multiprocessing.forkserver import set_forkserver_preload
from pathlib import Path
from tempfile import TemporaryDirectory

from support.time_limits import limit_s

IMPORTED = ["torch", "lightning.pytorch", "torch.distributed", "retime"]
WITHOUT_RETIME = """
import sys
from lightning.pytorch.strategies import StrategyRegistry
for name in [name for name in sys.modules if name.partition(".")[0] == "retime"]:
    del sys.modules[name]
StrategyRegistry.clear()
"""
"""Begins a program for which nobody has imported retime."""


class Cold:
    """A script that Python runs.

    Args:
        script: its file.
        arguments: its own.
        environment: all of its environment.
        out: what it prints goes into this file, and its errors into `errors`.
    """

    def __init__(self, script: str, arguments: list[str], environment: dict[str, str], out: Path, errors: Path) -> None:
        self._errors = errors
        with out.open("ab") as printed, errors.open("ab") as said:
            command = [sys.executable, script, *arguments]
            self._process = subprocess.Popen(
                command, env=environment, stdout=printed, stderr=said, start_new_session=True
            )

    @property
    def returncode(self) -> int | None:
        return self._process.poll()

    def wait(self, timeout_s: float) -> None:
        """Until it has ended.

        Raises:
            TimeoutExpired: it still runs; the exception has what it wrote to its errors.
        """
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired as error:
            error.stderr = self._errors.read_bytes()
            raise

    def kill(self) -> None:
        """With all that it has started."""
        if self._process.poll() is None:
            os.killpg(self._process.pid, 9)
        self._process.wait()

    def __enter__(self) -> "Cold":
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()


class Warm:
    """A script or a module that runs in a process which has imported everything.

    Args:
        script: its file, or a module's name.
        arguments, environment, out, errors: as of :class:`Cold`.
    """

    def __init__(self, script: str, arguments: list[str], environment: dict[str, str], out: Path, errors: Path) -> None:
        self._script, self._errors = script, errors
        set_forkserver_preload(IMPORTED)
        context = multiprocessing.get_context("forkserver")
        self._process = context.Process(target=_run, args=(script, arguments, environment, out, errors))
        self._process.start()

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout_s: float) -> None:
        """Until it has ended.

        Raises:
            TimeoutExpired: it still runs; the exception has what it wrote to its errors.
        """
        self._process.join(timeout_s)
        if self._process.exitcode is None:
            said = self._errors.read_bytes() if self._errors.exists() else b""
            raise subprocess.TimeoutExpired(self._script, timeout_s, stderr=said)

    def kill(self) -> None:
        """With all that it has started."""
        pid, deadline = self._process.pid, time.monotonic() + limit_s(10)
        while pid is not None and self._process.exitcode is None:
            with suppress(ProcessLookupError):  # it has just ended
                if os.getpgid(pid) == pid:
                    os.killpg(pid, 9)
                elif time.monotonic() > deadline:  # else it has not come to its first line yet
                    os.kill(pid, 9)
            self._process.join(0.02)

    def __enter__(self) -> "Warm":
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()


def run_program(program: str, *arguments: str, **environment: str) -> str:
    """What a program, given as text, prints in a :class:`Warm` process; it must not fail."""
    with TemporaryDirectory() as folder:
        script, out, errors = (Path(folder, name) for name in ("program.py", "out", "errors"))
        script.write_text(program)
        with Warm(str(script), [*arguments], {**os.environ, **environment}, out, errors) as process:
            process.wait(limit_s(180))
        assert process.returncode == 0, errors.read_text(errors="replace")[-3000:]
        return out.read_text()


def _run(script: str, arguments: list[str], environment: dict[str, str], out: Path, errors: Path) -> None:
    gc.freeze()  # what was imported: collections, of which plans ask for many, then pass over it
    os.setsid()  # so that whatever it starts ends with it
    for path, number in ((out, 1), (errors, 2)):
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(file, number)
        os.close(file)
    os.environ.clear()
    os.environ.update(environment)
    sys.path[:0] = [entry for entry in environment.get("PYTHONPATH", "").split(os.pathsep) if entry]
    sys.argv = [script, *arguments]
    if script.endswith(".py"):
        sys.path.insert(0, str(Path(script).parent))
        runpy.run_path(script, run_name="__main__")
    else:
        runpy.run_module(script, run_name="__main__", alter_sys=True)
