"""Mooncake Store behind the rings: the suite of all stores, and three hosts around one master.

| disturbance                                | test                                                    |
|--------------------------------------------|---------------------------------------------------------|
| master killed, started anew                | master_that_is_killed                                   |
| host asked to stop while the master hangs  | host_ends_while_the_master_is_stopped                   |
| wrong bytes, no room, two writers          | tests/daemon/remote_stores/mooncake_suite.py                    |
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import count
from pathlib import Path

import pytest
from hosts_network import HUB, Network, missing

from ..daemon.remote_stores.mooncake_master import MooncakeMaster, program
from ..daemon_process import until
from .hosts import LONG_S, MIB, Host

ROOT = Path(__file__).parents[2]
SUITE = "tests/daemon/remote_stores/mooncake_suite.py"
HOSTS = 3
pytestmark = [
    pytest.mark.skipif(bool(missing()), reason=missing() or "can be made"),
    pytest.mark.skipif(program() is None, reason="Mooncake is not installed: `make test-remote` installs it"),
]


class Mooncake:
    """The network, its master and its hosts."""

    def __init__(self, master: MooncakeMaster, hosts: list[Host]) -> None:
        self.master = master
        self.hosts = hosts


@pytest.fixture
def timeout_s() -> float:
    return 3.0


@pytest.fixture
def mooncake(tmp_path: Path, timeout_s: float) -> Iterator[Mooncake]:
    with ExitStack() as stack:
        network = stack.enter_context(Network(HOSTS))
        master = stack.enter_context(MooncakeMaster(tmp_path, address=HUB, prefix=network.within(network.hub)))
        url = f"mooncake://{master.address}?segment=64MiB"
        hosts = [
            stack.enter_context(Host(url, prefix=network.host(number), remote_timeout_s=timeout_s))
            for number in range(HOSTS)
        ]
        stack.callback(master.resume)
        for host in hosts:
            connected(host)
        yield Mooncake(master, hosts)


def computes(host: Host, numbers: range) -> bool:
    return all(host.get(number) for number in numbers)


def stores(host: Host, numbers: range, payload_bytes: int = 100_000) -> None:
    """The host computes entries, and they are in the store when this returns. A master that has just come back has no
    room before the hosts have lent it theirs again. What it refuses is offered again once it is used."""
    before = host.remote().get("written", 0)
    for number in numbers:
        assert host.get(number, payload_bytes)

    def written() -> bool:
        if host.remote().get("written", 0) >= before + len(numbers):
            return True
        assert not any(host.get(number, payload_bytes) for number in numbers), "they are in the ring"
        return False

    until(written, f"{len(numbers)} entries to be written")


def own_numbers(host: Host) -> Iterator[int]:
    """Numbers that no other host has, for entries that nobody asks for again."""
    return count(10_000 + id(host) % 10**9 * 1000 + 100 * len(host.computed))


def connected(host: Host) -> None:
    """Waits until the store answers in little time. The first calls connect, which takes longer than most entries take
    to compute."""
    numbers = own_numbers(host)
    until(lambda: host.get(next(numbers)) and (host.remote()["answer_s"] or 1.0) < 0.05, "the store answers")
    host.idle()


def serves_again(host: Host) -> None:
    """Waits until the host uses the store. It misses keys of its own meanwhile."""
    numbers = own_numbers(host)
    until(lambda: host.get(next(numbers)) and host.remote()["serves"], "the store is used again")
    connected(host)


def test_mooncake_keeps_the_promises_of_all_stores() -> None:
    run = f"ip link set lo up && exec {sys.executable} -m pytest -q -p no:cacheprovider {SUITE}"
    ran = subprocess.run(["unshare", "-n", "sh", "-c", run], cwd=ROOT, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout[-8000:]


@pytest.mark.parametrize("timeout_s", [LONG_S])
def test_what_one_host_has_computed_the_others_read_from_its_memory(mooncake: Mooncake) -> None:
    first, *others = mooncake.hosts
    stores(first, range(5))
    stores(first, range(5, 6), 20 * MIB)
    for host in others:
        assert not any(host.get(number) for number in range(5))
        assert not host.get(5, 20 * MIB)
        assert host.remote()["fetched"] == 6
        assert host.remote()["corrupt"] == 0


def test_a_master_that_is_killed_costs_no_host_an_entry(mooncake: Mooncake) -> None:
    first, second, _ = mooncake.hosts
    stores(first, range(2))
    mooncake.master.kill()
    assert not any(first.get(number) for number in range(2))
    assert computes(second, range(100, 106))
    numbers = own_numbers(second)
    until(lambda: second.get(next(numbers)) and not second.remote()["serves"], "the store is left alone")
    assert not any(second.get(number) for number in range(100, 106))
    mooncake.master.start()
    serves_again(first)
    serves_again(second)
    stores(first, range(5000, 5001))
    assert not second.get(5000)


def test_a_host_ends_while_the_master_is_stopped(mooncake: Mooncake) -> None:
    first, *_ = mooncake.hosts
    stores(first, range(2))
    mooncake.master.pause()
    assert first.get(10, takes_s=0.1)
    first.daemon.terminate()
    first.daemon.start()
    until(lambda: first.client.connected, "the client is attached again")
    assert not any(first.get(number) for number in range(2)), "its ring is as it was"
