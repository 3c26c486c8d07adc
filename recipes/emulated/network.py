"""A switch with one cable a host, made of network namespaces, veth pairs and a bridge; each cable has a rate.

h0 [eth0]=====[port0]            A cable (=====) is a veth pair. `tc tbf` shapes both of its ends: eth0 is what a
h1 [eth0]=====[port1] bridge     host sends, port0 what it receives. The bridge lies in a namespace of its own, so
h2 [eth0]=====[port2]            nothing of the machine's own network changes.

h0 [eth0]=====[eth0] h1          Two hosts need no switch: one cable, shaped at both ends. Every hop of an emulated
                                 network is work for the processors that the ranks train on, which a real one is not.
"""

import contextlib
import signal
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from types import FrameType

from retime.foundations.workers import free_port
from retime.recipes.emulated.namespaces import new_prefix, remove, remove_stale
from retime.recipes.emulated.requirements import ClusterUnavailable, call, unavailable

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
    reason = unavailable()
    if reason:
        raise ClusterUnavailable(f"hardware=emulated: {reason}. hardware=cpu runs the ranks unshaped on loopback")
    remove_stale()
    prefix = new_prefix()
    switch = f"{prefix}-switch"
    names = [f"{prefix}-h{number}" for number in range(hosts)]
    with _terminated_by_exception():
        try:
            network = Network([], None, prefix=prefix)
            if hosts == _CABLE:
                network.hosts += _join(*names)
            else:
                call("ip", "netns", "add", switch)
                call("ip", "-n", switch, "link", "add", "bridge", "type", "bridge")
                call("ip", "-n", switch, "link", "set", "bridge", "up")
                network.hosts += [_plug_in(name, switch, number) for number, name in enumerate(names)]
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


def _join(first: str, second: str) -> list[Host]:
    """Two hosts' namespaces with a cable between them."""
    for name in (first, second):
        call("ip", "netns", "add", name)
    call("ip", "link", "add", "eth0", "netns", first, "type", "veth", "peer", "name", "eth0", "netns", second)
    hosts = []
    for number, name in enumerate((first, second)):
        address = f"{_SUBNET}.{number + 1}"
        call("ip", "-n", name, "link", "set", "eth0", "addrgenmode", "none")
        call("ip", "-n", name, "address", "add", f"{address}/24", "dev", "eth0")
        for device in ("lo", "eth0"):
            call("ip", "-n", name, "link", "set", device, "up")
        hosts.append(Host(("ip", "netns", "exec", name), "eth0", address))
    return hosts


def _plug_in(name: str, switch: str, number: int) -> Host:
    """A host's namespace with its cable to the switch."""
    address, port = f"{_SUBNET}.{number + 1}", f"port{number}"
    call("ip", "netns", "add", name)
    call("ip", "link", "add", "eth0", "netns", name, "type", "veth", "peer", "name", port, "netns", switch)
    for namespace, device in ((name, "eth0"), (switch, port)):
        # no IPv6 address of its own: gloo would have two to choose from
        call("ip", "-n", namespace, "link", "set", device, "addrgenmode", "none")
    call("ip", "-n", name, "address", "add", f"{address}/24", "dev", "eth0")
    call("ip", "-n", switch, "link", "set", port, "master", "bridge")
    for namespace, device in ((switch, port), (name, "eth0"), (name, "lo")):
        call("ip", "-n", namespace, "link", "set", device, "up")
    return Host(("ip", "netns", "exec", name), "eth0", address)


_ENDING = (signal.SIGTERM, signal.SIGHUP)


@contextlib.contextmanager
def _terminated_by_exception() -> Iterator[None]:
    """Signals that would end this process at once raise SystemExit instead, unless somebody handles them already."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(number: int, frame: FrameType | None) -> None:
        sys.exit(128 + number)

    ours = [number for number in _ENDING if signal.getsignal(number) == signal.SIG_DFL]
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
