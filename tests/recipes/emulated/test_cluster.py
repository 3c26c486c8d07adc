"""Emulated clusters: namespaces come up, links keep their rate, nothing stays behind however it ends."""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from retime.recipes.emulated import (
    ClusterUnavailable,
    RankError,
    emulated_network,
    loopback,
    network,
    parse_rate,
    ranks,
    rate_text,
    run_ranks,
    unavailable,
)
from retime.recipes.emulated.network import call, existing, new_prefix, remove_stale
from support.emulated_gloo_worker import serve as gloo
from support.emulated_plain_worker import serve as plain
from support.paths import PYTHONPATH
from support.process_ends import ended, first_line
from support.time_limits import limit_s
from support.warm_start import Warm


@pytest.fixture
def root() -> None:
    """Skips where no cluster can be emulated."""
    reason = unavailable()
    if reason:
        pytest.skip(reason)


@pytest.fixture(autouse=True)
def _short_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    """What other ranks say of a rank's death is not asked for."""
    monkeypatch.setattr(ranks, "_GRACE_SECONDS", limit_s(0.5))


@contextmanager
def leaves_nothing() -> Iterator[None]:
    """The machine's own devices and our namespaces are the same afterwards."""
    before = call("ip", "-brief", "link"), own_namespaces()
    yield
    assert (call("ip", "-brief", "link"), own_namespaces()) == before


def own_namespaces(pid: int | None = None) -> list[str]:
    return [name for name in existing() if name.startswith(f"retime-{pid or os.getpid()}-")]


@pytest.mark.parametrize(("text", "bits"), [("2gbit", 2e9), ("500mbit", 5e8), ("2500 kbit", 2.5e6), ("1.5Gbit", 1.5e9)])
def test_rates_are_spelled_as_tc_does(text: str, bits: float) -> None:
    assert parse_rate(text) == bits


@pytest.mark.parametrize("text", ["fast", "2", "-1gbit", "2gbps", "0mbit", "500gbit"])
def test_wrong_rates_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=f"rate={text}|rate='{text}'"):
        parse_rate(text)


def test_a_rate_in_words() -> None:
    rates = {2e9: "2gbit", 1.8666e9: "1.87gbit", 999.7e6: "1gbit", 2.5e8: "250mbit", 999_700: "1mbit", 5e4: "50kbit"}
    assert {bits: rate_text(bits) for bits in rates} == rates


@pytest.mark.parametrize("hosts", [0, 65])
def test_hosts_out_of_range_are_refused(hosts: int) -> None:
    with pytest.raises(ValueError, match=f"hosts={hosts} is out of range: choose from 1 to 64"):
        loopback(hosts)


def test_without_root_the_reason_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    network.unavailable.cache_clear()
    try:
        with (
            pytest.raises(ClusterUnavailable, match=r"needs? root: run with sudo.*hardware=cpu"),
            emulated_network(2, 1e9),
        ):
            pass
    finally:
        network.unavailable.cache_clear()


def test_without_tc_the_reason_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(network.shutil, "which", lambda tool: None if tool == "tc" else tool)
    network.unavailable.cache_clear()
    try:
        reason = unavailable()
        assert "`tc` is missing: install iproute2" in reason or "need Linux" in reason
    finally:
        network.unavailable.cache_clear()


def test_loopback_has_no_rate() -> None:
    with pytest.raises(ValueError, match="choose hardware=emulated"):
        loopback(2).shape(1e9)


def test_plain_ranks_answer_on_loopback() -> None:
    heard: list[str] = []
    answers = run_ranks(loopback(3), plain, {"do": "answer"}, environment=PYTHONPATH, progress=heard.append)
    assert [answer["rank"] for answer in answers] == [0, 1, 2]
    assert [told.partition(" as ")[0] for told in heard] == ["rank 0 runs"]


def test_an_exception_on_one_rank_ends_all_and_is_shown() -> None:
    with pytest.raises(RankError, match=r"(?s)rank . of 2 failed: .*--- rank 1:.*rank 1 has had enough"):
        run_ranks(loopback(2), gloo, {"do": "fail", "mib": 1}, environment=PYTHONPATH, timeout_s=limit_s(60))


def test_ranks_without_an_answer_and_late_ranks_are_errors() -> None:
    with pytest.raises(RankError, match=r"rank . of 2 failed: the process ended \(exit status 3\)"):
        run_ranks(loopback(2), plain, {"do": "nothing"}, environment=PYTHONPATH)
    with pytest.raises(RankError, match="took longer than 1 s: use smaller sizes"):
        run_ranks(loopback(2), plain, {"do": "sleep"}, environment=PYTHONPATH, timeout_s=1)


@pytest.mark.network
@pytest.mark.usefixtures("root")
def test_networks_of_one_process_have_their_own_names_and_leave_nothing() -> None:
    with leaves_nothing():
        with emulated_network(2, 1e9) as one, emulated_network(3, None) as other:
            assert one.prefix != other.prefix
            assert len(own_namespaces()) == 2 + (3 + 1)  # two hosts share a cable, three need a switch
            shaping = call("tc", "-n", f"{one.prefix}-h1", "qdisc", "show", "dev", "eth0")
            assert "tbf" in shaping
            assert "rate 1Gbit" in shaping
            assert "tbf" not in call("tc", "-n", f"{other.prefix}-h1", "qdisc", "show", "dev", "eth0")
            other.shape(5e8)
            assert "rate 500Mbit" in call("tc", "-n", f"{other.prefix}-switch", "qdisc", "show", "dev", "port0")
            other.shape(None)
            assert "tbf" not in call("tc", "-n", f"{other.prefix}-switch", "qdisc", "show", "dev", "port0")
        with pytest.raises(KeyError, match="mine"), emulated_network(2, 1e9):
            raise KeyError("mine")


@pytest.mark.network
@pytest.mark.usefixtures("root")
@pytest.mark.long
def test_links_keep_their_rate() -> None:
    """A broad band, and once of five times: other processes share this machine's cores, which no link gets rid of."""
    request, measured = {"do": "measure", "mib": 1}, []
    with leaves_nothing(), emulated_network(2, 200e6) as network:
        while len(measured) < 5 and not (measured and all(80e6 < bits < 260e6 for bits in measured[-1])):
            answers = run_ranks(network, gloo, request, environment=PYTHONPATH, timeout_s=limit_s(60))
            assert {(answer["cores"], answer["threads"]) for answer in answers} == {(1, 1)}
            measured.append([answer[name] for answer in answers for name in ("gloo_bits", "tcp_bits")])
    assert all(80e6 < bits < 260e6 for bits in measured[-1]), measured


def test_a_killed_rank_ends_the_others() -> None:
    heard: list[str] = []
    with pytest.raises(RankError, match=r"(?s)rank 1 of 2 failed: .* \(by SIGKILL\).*--- rank 1:.*rank 1 says goodbye"):
        run_ranks(loopback(2), plain, {"do": "die"}, environment=PYTHONPATH, progress=heard.append)
    assert ended([heard[0].split()[-1]])


@pytest.mark.network
@pytest.mark.usefixtures("root")
@pytest.mark.parametrize(
    "number", [*(pytest.param(one, marks=pytest.mark.long) for one in (signal.SIGTERM, signal.SIGINT)), signal.SIGKILL]
)
def test_killed_parents_leave_nothing(number: signal.Signals, tmp_path: Path) -> None:
    """After SIGKILL nobody can clean up at once: the next start does."""
    out = tmp_path / "out"
    with Warm("support.emulated_parent", [], {**os.environ, **PYTHONPATH}, out, tmp_path / "errors") as parent:
        pid, prefix = first_line(out, parent).split()
        assert len(own_namespaces(int(pid))) == 2
        (rank,) = call("ip", "netns", "pids", f"{prefix}-h0").split()
        os.kill(int(pid), number)
        parent.wait(limit_s(30))
        assert parent.returncode != 0
    if number == signal.SIGKILL:
        assert len(own_namespaces(int(pid))) == 2
        assert set(remove_stale()) >= {f"{prefix}-{part}" for part in ("h0", "switch")}
    assert own_namespaces(int(pid)) == []
    assert ended([rank])


@pytest.mark.network
@pytest.mark.usefixtures("root")
def test_namespaces_of_a_living_process_are_no_stale_ones() -> None:
    with emulated_network(1, None) as network:
        assert not [name for name in remove_stale() if name.startswith(str(network.prefix))]
        assert len(own_namespaces()) == 2
    assert new_prefix() != new_prefix()
