"""Where a number was measured, and whether that machine was quiet.

Where: processor, accelerator, memory, software versions, commit.
"""

import importlib.metadata
import os
import platform
import subprocess
import time
from pathlib import Path

import psutil
import torch


def need_gpu_each(device: str, ranks: int) -> None:
    """Raise ValueError where ranks on this device have no GPU each."""
    there = torch.cuda.device_count()
    if device != "cpu" and ranks > there:
        raise ValueError(f"devices={ranks}: each rank needs a GPU, and there are {there}; choose fewer")


# Settings of the C library's allocator: they decide whether a freed gradient's memory is used again at once.
_ALLOCATOR_VARIABLES = (
    "GLIBC_TUNABLES",
    "MALLOC_TRIM_THRESHOLD_",
    "MALLOC_MMAP_THRESHOLD_",
    "MALLOC_TOP_PAD_",
    "LD_PRELOAD",
)
_PACKAGES = ("torch", "lightning", "lightning-retime", "numpy", "transformers")
CHANGED = "+changes"
"""What a commit ends in if the working tree had changes that were not committed, of recorded results apart."""
QUIET_LOAD, QUIET_PERCENT = 0.5, 20
"""A quiet machine's load average, and what another process may take of a core there."""


def hardware() -> dict[str, str]:
    """Name of the processor and of each accelerator, cores and threads that this process may use, memory in GiB."""
    facts = {
        "processor": _processor(),
        "cores": str(len(os.sched_getaffinity(0))),
        "threads": f"{torch.get_num_threads()} threads",
        "memory": f"{psutil.virtual_memory().total / 2**30:.0f} GiB",
        "system": f"{platform.system()} {platform.machine()}",
    }
    allocator = " ".join(f"{name}={os.environ[name]}" for name in _ALLOCATOR_VARIABLES if name in os.environ)
    if allocator:
        facts["allocator"] = allocator
    if torch.cuda.is_available():
        facts["accelerator"] = ", ".join(torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count()))
    return facts


def versions() -> dict[str, str]:
    """Versions of Python and of the packages that decide a step's speed."""
    installed = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            installed[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return installed


def load() -> float:
    """The load average over a minute."""
    return round(os.getloadavg()[0], 2)


def disturbances(seconds: float = 0.5) -> list[str]:
    """Disturbances of a measurement: a high load, and the three processes that take most of a core, if any does."""
    causes = [f"load {load():g} over a minute"] if load() > QUIET_LOAD else []
    list(psutil.process_iter(["cpu_percent"]))  # shares are of the time since this call; None where access is denied
    time.sleep(seconds)
    others = [each for each in psutil.process_iter(["name", "cpu_percent"]) if each.pid != os.getpid()]
    shares = sorted(((each.info["cpu_percent"] or 0.0, each.info["name"], each.pid) for each in others), reverse=True)
    busy = [f"{name} ({pid}) takes {share:.0f} % of a core" for share, name, pid in shares if share > QUIET_PERCENT]
    return causes + busy[:3]


def gpus() -> list[str]:
    """Clock, temperature and power of each GPU now, as the driver says; empty where there is none."""
    asked = "--query-gpu=clocks.sm,clocks.max.sm,temperature.gpu,power.draw"
    output = _printed("nvidia-smi", asked, "--format=csv,noheader") if torch.cuda.is_available() else None
    return output.splitlines() if output else []


def commit() -> str | None:
    """The commit of the checkout these recipes run from, with `CHANGED` if it is not clean; None outside one."""
    if not git_says("ls-files", Path(__file__).name):
        return None  # installed into a folder that happens to lie in somebody else's repository
    changes = git_says("status", "--porcelain", "--untracked-files=no", "--", ":(top)", ":(top,exclude)results")
    head = git_says("rev-parse", "--short=12", "HEAD")
    return None if changes is None or head is None else head + (CHANGED if changes else "")


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or "unknown"


def git_says(*arguments: str) -> str | None:
    """Return what git prints for a command, in the repository that this file lies in; None where it fails."""
    return _printed("git", *arguments)


def _printed(*command: str) -> str | None:
    """Text that a command prints in this folder, or None where it fails or is not there."""
    here = Path(__file__).resolve().parent
    try:
        done = subprocess.run(command, cwd=here, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()
