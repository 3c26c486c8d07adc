"""What an emulated cluster needs from the machine, and the calls of `ip` and `tc` themselves."""

import functools
import os
import shutil
import subprocess
import sys
import uuid


class ClusterUnavailable(RuntimeError):  # noqa: N818 -- an answer about the machine rather than a failure
    """This machine cannot emulate a cluster; the message says why and what to do."""


class CommandError(RuntimeError):
    """`ip` or `tc` refused; the message holds the command and its answer."""


def call(*command: str) -> str:
    """Run `ip` or `tc` and return what it printed.

    Raises:
        CommandError: it failed.
    """
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise CommandError(f"{' '.join(command)}: {done.stderr.strip() or f'exit status {done.returncode}'}")
    return done.stdout


@functools.cache
def unavailable() -> str | None:
    """Why this machine cannot emulate a cluster, or None if it can."""
    if not sys.platform.startswith("linux"):
        return f"network namespaces need Linux, this is {sys.platform}"
    if os.geteuid() != 0:
        return "network namespaces need root: run with sudo, or in a container with --cap-add NET_ADMIN,SYS_ADMIN"
    for tool in ("ip", "tc"):
        if shutil.which(tool) is None:
            return f"the command `{tool}` is missing: install iproute2"
    queue = ("latency", "50ms")
    name = f"retime-probe-{uuid.uuid4().hex[:12]}"
    try:
        call("ip", "netns", "add", name)
    except CommandError as error:
        return f"network namespaces are not allowed here ({error}): allow NET_ADMIN and SYS_ADMIN"
    try:
        call("ip", "-n", name, "link", "add", "bridge", "type", "bridge")
        call("ip", "-n", name, "link", "add", "veth0", "type", "veth", "peer", "name", "veth1")
        call("tc", "-n", name, "qdisc", "add", "dev", "veth0", "root", "tbf", "rate", "1gbit", "burst", "256kb", *queue)
    except CommandError as error:
        return f"this kernel lacks a bridge, veth pairs or the tbf queue ({error}): load bridge, veth, sch_tbf"
    finally:
        call("ip", "netns", "delete", name)
    return None
