"""Three hosts with network addresses of their own around one Redis server or Mooncake master: `make test-remote`."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from hosts_network import HUB, HubRedis, Network

from ..daemon.remote_stores.servers import MooncakeMaster, mooncake_master
from ..daemon_process import until
from .hosts import MIB, NAMESPACE, Host

ROOT = Path(__file__).parents[2]
BYTES = [*[100_000] * 5, 20 * MIB]
SUITE = "tests/daemon/remote_stores/mooncake_suite.py"
needs_mooncake = pytest.mark.skipif(mooncake_master() is None, reason="`make test-remote` installs Mooncake")


class Cluster(NamedTuple):
    network: Network
    redis: HubRedis
    hosts: list[Host]


@pytest.fixture
def cluster(tmp_path: Path, network: Network, around: Callable[[str], list[Host]]) -> Iterator[Cluster]:
    with HubRedis(network, tmp_path) as redis:
        yield Cluster(network, redis, around(redis.url))


def served(host: Host, numbers: range) -> None:
    """Every one of these entries of the host's own is a hit."""
    assert not any(host.get(number) for number in numbers)


@pytest.mark.parametrize("timeout_s", [3.0])
def test_a_host_that_is_cut_off_serves_its_own_entries_and_comes_back(cluster: Cluster) -> None:
    first, second, third = cluster.hosts
    assert first.get(1)
    first.counted("written")
    assert not second.get(1)
    cluster.network.cut(1)
    assert second.get(2), "nobody else can be reached"
    served(second, range(1, 3))
    assert first.get(3)
    first.counted("written", 2)
    assert not third.get(3), "the others go on"
    for number in range(100, 130):
        assert second.get(number)
    second.uses_store(uses=False)
    assert first.remote()["serves"] and third.remote()["serves"]
    cluster.network.join(1)
    second.uses_store(uses=True)
    assert not second.get(3)


def test_the_killed_server_costs_no_host_an_entry(cluster: Cluster) -> None:
    for number, host in enumerate(cluster.hosts):
        assert host.get(number)
        host.counted("written")
    cluster.redis.kill()
    for number, host in enumerate(cluster.hosts):
        served(host, range(number, number + 1))
        for own in range(100 * (number + 1), 100 * (number + 1) + 6):
            assert host.get(own)
        served(host, range(100 * (number + 1), 100 * (number + 1) + 6))
        until(lambda host=host: not host.remote()["serves"], "the store is left alone")  # type: ignore[misc]
    cluster.redis.start()
    for host in cluster.hosts:
        host.uses_store(uses=True)
    first, second, _ = cluster.hosts
    written = first.remote()["written"]
    assert first.get(5000)
    first.counted("written", written + 1)
    assert not second.get(5000)


def test_a_slow_link_makes_nobody_wait_longer_than_computing_takes(cluster: Cluster) -> None:
    first, second, _ = cluster.hosts
    for number in range(6):
        assert first.get(number, 2 * MIB)
    first.counted("written", 6)
    cluster.network.slow(1, "8mbit")  # 1 MB/s: an entry would take two seconds
    assert all(second.get(number, 2 * MIB, takes_s=0.1) for number in range(6))
    cluster.network.quick(1)
    second.idle()
    assert not any(second.get(number, 2 * MIB) for number in range(6))


def test_an_invalidation_reaches_every_host(cluster: Cluster) -> None:
    first, *others = cluster.hosts
    assert first.get(1)
    first.counted("written")
    assert not any(host.get(1) for host in others)
    first.client.invalidate(NAMESPACE)
    for host in others:
        until(lambda host=host: host.client.current(NAMESPACE).generation == 1, "it has heard")  # type: ignore[misc]
    assert first.get(1, generation=1)
    first.written(2, 1, generation=1)
    assert not any(host.get(1, generation=1) for host in others)


# ---- Mooncake


@needs_mooncake
def test_mooncake_keeps_the_promises_of_all_stores() -> None:
    run = f"ip link set lo up && exec {sys.executable} -m pytest -q -p no:cacheprovider {SUITE}"
    ran = subprocess.run(["unshare", "-n", "sh", "-c", run], cwd=ROOT, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout[-8000:]


@needs_mooncake
def test_what_one_host_has_computed_the_others_read_from_its_memory(
    tmp_path: Path, network: Network, around: Callable[[str], list[Host]]
) -> None:
    with MooncakeMaster(tmp_path, address=HUB, prefix=network.within(network.hub)) as master:
        first, *others = hosts = around(f"mooncake://{master.address}?segment=64MiB")
        for host in hosts:
            # The first calls connect, which takes longer than most entries take to compute.
            until(lambda host=host: host.misses() and (host.remote()["answer_s"] or 1.0) < 0.05, "the store answers")  # type: ignore[misc]
            host.idle()
        before = first.remote().get("written", 0)
        for number in range(6):
            assert first.get(number, BYTES[number])

        def written() -> bool:
            # What was refused, for want of room that other hosts had not lent yet, is offered again once it is used.
            assert not any(first.get(number, BYTES[number]) for number in range(6)), "they are in the ring"
            return bool(first.remote().get("written", 0) >= before + 6)

        until(written, "all entries to be written")
        for host in others:
            assert not any(host.get(number, BYTES[number]) for number in range(6))
            assert host.remote()["fetched"] == 6
            assert host.remote()["corrupt"] == 0
