"""A host whose memory gets full writes what it must give up to the remote store, and reads it from there later."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tensord.daemon.remote.writes import DEMOTION_S
from tensord.testing.fake_card import FakeCard

from ..daemon.remote_stores.servers import RedisServer
from ..daemon_process import until
from .hosts import LONG_S, MIB, Host

MEMORY_BYTES = 100 * MIB
"""Of the host, by its gauge."""
COUNT = 24


@pytest.fixture
def place(tmp_path: Path) -> Path:
    (tmp_path / "store").mkdir()
    with FakeCard(tmp_path, "host", MEMORY_BYTES):
        pass
    return tmp_path


@pytest.fixture
def gauge(place: Path) -> FakeCard:
    return FakeCard(place, "host")


@contextmanager
def filled(url: str, place: Path, demotion_s: float) -> Iterator[Host]:
    """A host whose memory is the gauge's, with entries of 1 MiB whose cost nobody knows: none is in the store. Giving
    memory back waits for the store for `demotion_s`."""
    settings: dict[str, Any] = {"gauges_device": "none", "gauges_host": "file", "gauges_file": place / "gauges"}
    about = Host(url, ring_bytes=32 * MIB, gauges_sample_s="30ms", gauges_sample_pressed_s="30ms", **settings)
    about.daemon.constants = {"tensord.daemon.remote.writes.DEMOTION_S": demotion_s}
    with about as host:
        for number in range(COUNT):
            host.put(number, MIB, cost_ms=0.0)
        assert not host.remote().get("written")
        yield host


@pytest.fixture
def host(place: Path) -> Iterator[Host]:
    with filled(f"dir://{place}/store", place, LONG_S) as host:
        yield host


@pytest.mark.parametrize(("share", "mode"), [(0.94, "critical"), (0.99, "emergency")])
def test_a_host_whose_memory_gets_full_loses_no_entry(host: Host, gauge: FakeCard, share: float, mode: str) -> None:
    gauge.occupy(int(share * MEMORY_BYTES))
    until(lambda: [row["mode"] for row in host.daemon.status()["governor"]["gauges"]] == [mode], mode)
    until(lambda: host.daemon.status()["store"]["resident_bytes"] < 16 * MIB, "the ring gives memory back")
    gauge.occupy(0)
    until(lambda: host.daemon.status()["store"]["pressed"] is None, "the pressure to end")
    host.idle()
    store, remote = host.daemon.status()["store"], host.remote()
    evicted = store["evictions"]["pressure"]
    assert evicted >= 8
    assert remote["demoted"] >= evicted and "dropped" not in remote
    computed = [number for number in range(COUNT) if host.get(number, MIB)]
    assert not computed
    assert host.remote()["fetched"] == evicted


def test_a_stopped_store_holds_memory_up_for_a_limited_time(place: Path, gauge: FakeCard) -> None:
    with RedisServer() as redis, filled(redis.url, place, DEMOTION_S) as host, redis.paused():
        gauge.occupy(int(0.94 * MEMORY_BYTES))
        until(lambda: host.daemon.status()["store"]["resident_bytes"] < 8 * MIB, "the ring gives memory back")
        remote = host.remote()
        assert remote["dropped"] >= 8 and "demoted" not in remote
