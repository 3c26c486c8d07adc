"""The allocators that a training process can be started with, each by its environment."""

from __future__ import annotations

import ctypes.util
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from retime.foundations.workers import KEPT_HEAP

POOL = "pool"

_FOLDERS = ("/usr/lib/x86_64-linux-gnu", "/usr/lib/aarch64-linux-gnu", "/usr/lib64", "/usr/lib", "/usr/local/lib")


@dataclass(frozen=True)
class Allocator:
    """Allocator that a process is started with."""

    label: str  # its name in a report
    environment: Mapping[str, str] = field(default_factory=dict)  # variables
    library: tuple[tuple[str, ...], str] | None = None  # files to preload one of, and the Debian package that has it


ALLOCATORS = {
    "glibc": Allocator("glibc"),
    "kept_heap": Allocator("glibc, heap kept", KEPT_HEAP),
    "huge_heap": Allocator("glibc, heap kept, huge pages", {**KEPT_HEAP, "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}),
    "tcmalloc": Allocator(
        "tcmalloc", library=(("libtcmalloc_minimal.so.4", "libtcmalloc.so.4"), "libtcmalloc-minimal4")
    ),
    "jemalloc": Allocator(
        "jemalloc, decay off",
        {"MALLOC_CONF": "dirty_decay_ms:-1,muzzy_decay_ms:-1"},
        (("libjemalloc.so.2",), "libjemalloc2"),
    ),
    POOL: Allocator("glibc with retime's pool"),
}


class NoAllocatorError(Exception):
    """Reason why a process cannot be started with it here."""


def environment_of(name: str, paths: Mapping[str, str | None]) -> dict[str, str]:
    """The variables to start a process with; `paths` are files of libraries elsewhere than the system's, by allocator.

    NoAllocatorError if its library is not there, ValueError if there is no allocator of this name.
    """
    if name not in ALLOCATORS:
        raise ValueError(f"allocators has {name!r}: choose from {', '.join(ALLOCATORS)}")
    allocator = ALLOCATORS[name]
    environment = dict(allocator.environment)
    if allocator.library is not None:
        environment["LD_PRELOAD"] = _library(name, allocator.library, paths.get(name))
    return environment


def environments_of(
    names: Iterable[str], paths: Mapping[str, str | None], missing: dict[str, str]
) -> dict[str, dict[str, str]]:
    """The variables of those allocators that are there; why the others are not goes to `missing`."""
    there = {}
    for name in names:
        try:
            there[name] = environment_of(name, paths)
        except NoAllocatorError as error:
            missing[name] = str(error)
    return there


def _library(name: str, library: tuple[tuple[str, ...], str], path: str | None) -> str:
    if path is not None:
        if not Path(path).is_file():
            raise NoAllocatorError(f"libraries.{name}={path} is no file")
        return path
    files, package = library
    for file in files:
        for folder in _FOLDERS:
            if (Path(folder) / file).is_file():
                return str(Path(folder) / file)
    soname = ctypes.util.find_library(files[0].removeprefix("lib").partition(".so")[0])
    if soname is not None:
        return soname
    raise NoAllocatorError(
        f"{files[0]} is not installed (Debian: {package}); libraries.{name}=FILE names another place"
    )
