"""How much memory a process may use on a CPU: less than the machine has, in a container or under ``ulimit``."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

import psutil

_ROOT = Path("/")
_GROUPS = "sys/fs/cgroup"
# Where the memory controller's groups are mounted, and the file that limits one: version 2, alone or beside 1, and 1.
_UNIFIED = ((_GROUPS, "memory.max"), (f"{_GROUPS}/unified", "memory.max"))
_OLD = ((f"{_GROUPS}/memory", "memory.limit_in_bytes"),)


def shared_bytes() -> int:
    """What all processes of this one's control group have together: the machine's memory, or less.

    The limits of the group itself and of all groups around it count, of both versions of control groups.
    """
    return min([int(psutil.virtual_memory().total), *_group_limits()])


def own_bytes() -> int:
    """The same, or less where this process has limits of its own: ``RLIMIT_DATA`` and ``RLIMIT_AS``."""
    soft = (resource.getrlimit(kind)[0] for kind in (resource.RLIMIT_DATA, resource.RLIMIT_AS))
    return min([shared_bytes(), *(limit for limit in soft if limit != resource.RLIM_INFINITY)])


def _group_limits() -> Iterator[int]:
    try:
        lines = (_ROOT / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return  # no Linux, or no control groups
    for line in lines:
        _, controllers, group = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        for mounted, limit in _OLD if controllers else _UNIFIED:
            yield from _limits_of(_ROOT / mounted, group, limit)


def _limits_of(mounted: Path, group: str, name: str) -> Iterator[int]:
    """Those of a group and of all around it, as far as they can be seen: a container sees its own as the outermost."""
    inside = PurePosixPath(*(part for part in PurePosixPath(group).parts if part not in ("/", "..")))
    for folder in (inside, *inside.parents):
        try:
            text = (mounted / folder / name).read_text().strip()
        except OSError:
            continue
        if text.isdigit():  # else "max"
            yield int(text)
