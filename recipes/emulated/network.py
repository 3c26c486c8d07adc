"""A switch with one cable a host, made of network namespaces, veth pairs and a bridge; each cable has a rate.

h0 [eth0]=====[port0]            A cable (=====) is a veth pair. `tc tbf` shapes both of its ends: eth0 is what a
h1 [eth0]=====[port1] bridge     host sends, port0 what it receives. The bridge lies in a namespace of its own, so
h2 [eth0]=====[port2]            nothing of the machine's own network changes.

h0 [eth0]=====[eth0] h1          Two hosts need no switch: one cable, shaped at both ends. Every hop of an emulated
                                 network is work for the processors that the ranks train on, which a real one is not.

Names tell who made a namespace, so that those of a killed process are found and removed. What all of it needs from the
machine, and the calls of `ip` and `tc` themselves, stand at the end.
"""

import contextlib
import functools
import itertools
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from retime.foundations.workers import free_port

MOST_HOSTS = 64
_CABLE = 2
"""So many hosts are joined by one cable, without a switch."""
_SUBNET = "10.78.0"
_PORT = 29500
# The bucket holds 4 milliseconds at the rate, but two of the kernel's 64 KiB packets at least: large enough that timers
# cost little, small enough that a message of a few MB cannot pass unshaped.
_BURST_SECONDS, _LEAST_BURST_BYTES = 4e-3, 128 * 1024
_QUEUE = "50ms"


@dataclass(frozen=True)
class Host:
    """One host of a network: what stands before a command to run on it, its interface and address."""

    launch: tuple[str, ...]
    interface: str
    address: str


@dataclass
class Network:
    """`hosts` that reach each other; `bits_per_second` of each link in each direction, None for unshaped."""

    hosts: list[Host]
    bits_per_second: float | None
    port: int = _PORT
    prefix: str | None = None

    def shape(self, bits_per_second: float | None) -> None:
        """Give every link another rate, in bits per second, or none.

        Raises:
            ValueError: this network's links have no rate that could be set.
        """
        if self.prefix is None:
            raise ValueError("the loopback network has no rate: choose hardware=emulated to shape links")
        ends = [(f"{self.prefix}-h{number}", "eth0") for number in range(len(self.hosts))]
        if len(self.hosts) != _CABLE:
            ends += [(f"{self.prefix}-switch", f"port{number}") for number in range(len(self.hosts))]
        for namespace, device in ends:
            if bits_per_second is not None:
                burst = max(_LEAST_BURST_BYTES, round(bits_per_second / 8 * _BURST_SECONDS))
                shaping = ("tbf", "rate", f"{bits_per_second:.0f}bit", "burst", str(burst), "latency", _QUEUE)
                call("tc", "-n", namespace, "qdisc", "replace", "dev", device, "root", *shaping)
            elif self.bits_per_second is not None:
                call("tc", "-n", namespace, "qdisc", "delete", "dev", device, "root")
        self.bits_per_second = bits_per_second


def loopback(hosts: int) -> Network:
    """Hosts that are mere processes of this machine, on its loopback device: nothing to shape, nothing to clean up."""
    check_hosts(hosts)
    host = Host((), "lo", "127.0.0.1")
    return Network([host] * hosts, None, port=free_port())


@contextlib.contextmanager
def emulated_network(hosts: int, bits_per_second: float | None) -> Iterator[Network]:
    """A network of namespaces, removed at the end however this ends: errors, Ctrl-C and SIGTERM included.

    After a SIGKILL the next call on this machine removes what was left.

    Raises:
        ClusterUnavailable: not root, no `ip` or `tc`, or a kernel without namespaces.
        ValueError: hosts out of range.
    """
    check_hosts(hosts)
    if reason := unavailable():
        raise ClusterUnavailable(f"hardware=emulated: {reason}. hardware=cpu runs the ranks unshaped on loopback")
    remove_stale()
    prefix = new_prefix()
    switch = f"{prefix}-switch"
    names = [f"{prefix}-h{number}" for number in range(hosts)]
    with _terminated_by_exception():
        try:
            for name in names:
                call("ip", "netns", "add", name)
            cable = ("type", "veth", "peer", "name")
            if hosts == _CABLE:
                call("ip", "link", "add", "eth0", "netns", names[0], *cable, "eth0", "netns", names[1])
            else:
                call("ip", "netns", "add", switch)
                call("ip", "-n", switch, "link", "add", "bridge", "type", "bridge")
                call("ip", "-n", switch, "link", "set", "bridge", "up")
                for port, name in enumerate(names):
                    call("ip", "link", "add", "eth0", "netns", name, *cable, f"port{port}", "netns", switch)
                    for setting in (("addrgenmode", "none"), ("master", "bridge"), ("up",)):
                        call("ip", "-n", switch, "link", "set", f"port{port}", *setting)
            network = Network([_host(name, number) for number, name in enumerate(names)], None, prefix=prefix)
            network.shape(bits_per_second)
            yield network
        finally:
            with _undisturbed():
                for name in (*names, switch):
                    remove(name)


def check_hosts(hosts: int) -> None:
    """ValueError unless so many hosts can be emulated."""
    if not 1 <= hosts <= MOST_HOSTS:
        raise ValueError(f"hosts={hosts} is out of range: choose from 1 to {MOST_HOSTS}")


def _host(name: str, number: int) -> Host:
    """A host whose cable is there: it gets its address, and all of it is up."""
    address = f"{_SUBNET}.{number + 1}"
    # no IPv6 address of its own: gloo would have two to choose from
    call("ip", "-n", name, "link", "set", "eth0", "addrgenmode", "none")
    call("ip", "-n", name, "address", "add", f"{address}/24", "dev", "eth0")
    for device in ("eth0", "lo"):
        call("ip", "-n", name, "link", "set", device, "up")
    return Host(("ip", "netns", "exec", name), "eth0", address)


_ENDING = (signal.SIGTERM, signal.SIGHUP)


@contextlib.contextmanager
def _terminated_by_exception() -> Iterator[None]:
    """Signals that would end this process at once raise SystemExit instead, unless somebody handles them already."""
    is_main = threading.current_thread() is threading.main_thread()  # only there signals can be handled

    def end(number: int, frame: FrameType | None) -> None:
        sys.exit(128 + number)

    ours = [number for number in _ENDING if is_main and signal.getsignal(number) == signal.SIG_DFL]
    for number in ours:
        signal.signal(number, end)
    try:
        yield
    finally:
        for number in ours:
            signal.signal(number, signal.SIG_DFL)


@contextlib.contextmanager
def _undisturbed() -> Iterator[None]:
    """A second Ctrl-C or SIGTERM waits until the clean-up has ended."""
    signals = (signal.SIGINT, *_ENDING)
    old = signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, old)


_NAME = re.compile(r"retime-\d+-\d+-\d+-(?:switch|h\d+)")
_serials = itertools.count()


def new_prefix() -> str:
    """`retime-<pid>-<start time>-<serial>`: no other network on this machine has it."""
    return f"retime-{os.getpid()}-{_born(os.getpid())}-{next(_serials)}"


def existing() -> list[str]:
    """The names of all namespaces made here, by any process."""
    names = (line.split()[0] for line in call("ip", "netns", "list").splitlines() if line.strip())
    return [name for name in names if _NAME.fullmatch(name)]


def remove_stale() -> list[str]:
    """Remove the namespaces, and the processes in them, of processes that no longer run; returns their names."""
    stale = []
    for name in existing():
        _, pid, born, *_ = name.split("-")
        if _born(int(pid)) != int(born):  # a process number is given out again, a number with its start time is not
            remove(name)
            stale.append(name)
    return stale


def remove(name: str) -> None:
    """End the processes in a namespace and delete it; the interfaces in it go too. No error if it is gone."""
    with contextlib.suppress(CommandError):
        for pid in call("ip", "netns", "pids", name).split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
    with contextlib.suppress(CommandError):
        call("ip", "netns", "delete", name)


def _born(pid: int) -> int | None:
    """Start time of a process in clock ticks since boot (proc(5), /proc/pid/stat field 22); None if it is gone."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else int(fields[19])


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
    """Reason why this machine cannot emulate a cluster, or None if it can."""
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
