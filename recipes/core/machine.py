"""Where a number was measured: processor, accelerator, memory, software versions, commit."""

import importlib.metadata
import os
import platform
import subprocess
from pathlib import Path
from typing import TypedDict

import psutil
import torch


class Provenance(TypedDict):
    """What every measured point carries."""

    hardware: dict[str, str]
    versions: dict[str, str]
    commit: str | None


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


def provenance() -> Provenance:
    """The machine, the software and the commit, as they are now."""
    return {"hardware": hardware(), "versions": versions(), "commit": commit()}


def hardware() -> dict[str, str]:
    """Name of the processor and of each accelerator, cores and threads that this process may use, memory in GiB."""
    found = {
        "processor": _processor(),
        "cores": str(len(os.sched_getaffinity(0))),
        "threads": f"{torch.get_num_threads()} threads",
        "memory": f"{psutil.virtual_memory().total / 2**30:.0f} GiB",
        "system": f"{platform.system()} {platform.machine()}",
    }
    allocator = " ".join(f"{name}={os.environ[name]}" for name in _ALLOCATOR_VARIABLES if name in os.environ)
    if allocator:
        found["allocator"] = allocator
    if torch.cuda.is_available():
        found["accelerator"] = ", ".join(torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count()))
    return found


def versions() -> dict[str, str]:
    """Versions of Python and of the packages that decide a step's speed."""
    found = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def commit() -> str | None:
    """The commit of the checkout these recipes run from, with `CHANGED` if it is not clean; None outside one."""
    here = Path(__file__).resolve().parent

    def git(*arguments: str) -> str:
        done = subprocess.run(["git", *arguments], cwd=here, capture_output=True, text=True, check=True)
        return done.stdout.strip()

    try:
        if not git("ls-files", Path(__file__).name):
            return None  # installed into a folder that happens to lie in somebody else's repository
        changed = git("status", "--porcelain", "--untracked-files=no", "--", ":(top)", ":(top,exclude)results")
        return git("rev-parse", "--short=12", "HEAD") + (CHANGED if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return None


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or "unknown"
