"""What the crossings do not have of a view: the daemon gone with its memory, and a ring replaced."""

from __future__ import annotations

import gc
from pathlib import Path

from ..daemon_process import PATIENCE_S, Daemon, until
from .payloads import PINNED, is_payload, key, payload


def test_a_view_outlives_the_daemon_and_its_memory(small: Daemon) -> None:
    client = small.client()
    lease = client.get(key(PINNED))
    small.interrupt()
    until(lambda: not client.connected, "the client to notice")
    assert not small.segments()
    assert lease is not None and is_payload(lease.tree, PINNED)
    again = client.get(key(PINNED))
    assert again is not None and is_payload(again.tree, PINNED), "lookups go on without a daemon"


def test_a_replaced_ring_stays_mapped_for_as_long_as_a_view_of_it_lives(small: Daemon) -> None:
    client = small.client()
    for number in range(3):
        assert client.put(key(number), payload(number), wait=True, timeout_s=PATIENCE_S).state in ("stored", "existed")
        lease, ring = client.get(key(number)), client.ring()
        small.interrupt()
        small.start()
        until(lambda before=ring: client.connected and client.ring() is not before, "the new ring")  # type: ignore[misc]
        del ring
        assert _rings_mapped(small) == 2
        assert lease is not None and is_payload(lease.tree, number)
        del lease
        gc.collect()
        until(lambda: _rings_mapped(small) == 1, "the former ring to be unmapped")


def _rings_mapped(daemon: Daemon) -> int:
    """How many of a daemon's rings this process maps."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return len({line.split()[4] for line in lines if f"{daemon.instance}.ring" in line})
