"""How long gradients travel: links, rates in words, and the all-reduce of a cluster with several devices a node."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from retime.schedules.errors import check_count

_BITS_PER_BYTE = 8
_MS_PER_S = 1e3


@dataclass(frozen=True)
class Link:
    """One direction of a full-duplex connection.

    Args:
        bits_per_s: what a transfer really gets, above 0; infinite for a link that costs nothing.
        latency_ms: from the start of a message to its first byte.

    Raises:
        ValueError: when a number is out of its range.
    """

    bits_per_s: float
    latency_ms: float = 0.0

    def __post_init__(self) -> None:
        if not self.bits_per_s > 0:
            raise ValueError(f"bits_per_s={self.bits_per_s}: give more than 0 bits a second, such as 10e9")
        if not (math.isfinite(self.latency_ms) and self.latency_ms >= 0):
            raise ValueError(f"latency_ms={self.latency_ms}: give 0 or more milliseconds")

    def transfer_ms(self, size_bytes: float) -> float:
        """Time on the wire, without the latency."""
        return size_bytes * _BITS_PER_BYTE / self.bits_per_s * _MS_PER_S


@dataclass(frozen=True)
class Transfer:
    """A message: ``latency_ms`` in which the link is free for others, then ``busy_ms`` of the whole link."""

    latency_ms: float
    busy_ms: float

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(f"{name}={value}: give a finite number of milliseconds, 0 or more")


@dataclass(frozen=True)
class Cluster:
    """Nodes with the same number of devices each (Oh et al. 2022, Table 2).

    Args:
        nodes: how many, at least 1.
        devices_per_node: at least 1.
        between_nodes: the network.
        within_node: what connects the devices of a node, such as NVLink.

    Raises:
        ValueError: when a count is below 1.
    """

    nodes: int
    devices_per_node: int
    between_nodes: Link
    within_node: Link = Link(math.inf)

    def __post_init__(self) -> None:
        check_count(nodes=self.nodes, devices_per_node=self.devices_per_node)

    @property
    def devices(self) -> int:
        return self.nodes * self.devices_per_node

    def all_reduce(self, size_bytes: float) -> Transfer:
        """One gradient bucket, added up over all devices by rings.

        First within each node, then over the nodes, so that a node's devices share one copy on the network: a ring of n
        sends 2 (n - 1) / n times the bytes in 2 (n - 1) messages.
        """
        return self._transfer(size_bytes, messages=2 * (self.nodes - 1))

    def push_pull(self, size_bytes: float) -> Transfer:
        """The same over parameter servers, one on each node as in BytePS: one message there and one back.

        Every node sends the bytes of all shards but its own and gets as many back, which is what a ring moves (Jiang et
        al. 2020, "A unified architecture for accelerating distributed DNN training in heterogeneous GPU/CPU clusters").
        """
        return self._transfer(size_bytes, messages=2 if self.nodes > 1 else 0)

    def _transfer(self, size_bytes: float, messages: int) -> Transfer:
        within_ms = self.within_node.transfer_ms(_ring(self.devices_per_node) * size_bytes)
        between_ms = self.between_nodes.transfer_ms(_ring(self.nodes) * size_bytes)
        within_messages = 2 * (self.devices_per_node - 1)
        latency_ms = within_messages * self.within_node.latency_ms + messages * self.between_nodes.latency_ms
        return Transfer(latency_ms, within_ms + between_ms)


def _ring(members: int) -> float:
    """Number of times its own size that a message crosses each link of a ring."""
    return 2 * (members - 1) / members


_UNITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
LEAST, MOST = 1e6, 100e9
"""Slower links would need minutes a step; faster ones no machine can shape."""


def parse_rate(text: str) -> float:
    """Bits per second.

    Raises:
        ValueError: not a number with kbit, mbit or gbit behind it, or out of range.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(kbit|mbit|gbit)", text.strip().lower())
    if not match:
        raise ValueError(f"rate={text!r} is no link rate: write a number with kbit, mbit or gbit, as in rate=2gbit")
    bits = float(match[1]) * _UNITS[match[2]]
    if not LEAST <= bits <= MOST:
        raise ValueError(f"rate={text} is out of range: choose from {rate_text(LEAST)} to {rate_text(MOST)}")
    return bits


def rate_text(bits_per_second: float) -> str:
    """The rate with three digits: `2gbit`, `1.87gbit`, `250mbit`."""
    bits = float(f"{bits_per_second:.3g}")
    unit = next((name for name in ("gbit", "mbit") if bits >= _UNITS[name]), "kbit")
    return f"{bits / _UNITS[unit]:.3g}{unit}"
