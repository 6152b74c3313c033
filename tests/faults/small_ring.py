"""A ring of 2 MiB that is overwritten at once: whatever nobody pins in it is seen to be gone."""

from __future__ import annotations

from ..daemon_process import MIB, Daemon
from .payloads import key, lap

RING_BYTES = 2 * MIB
PINNED, UNPINNED = 1, 2


def overwrite(daemon: Daemon) -> None:
    """So that nothing is left of an entry that nobody pins, as another one shows."""
    writer = daemon.client()
    lap(writer, RING_BYTES)
    assert not writer.contains(key(UNPINNED)), "the ring was not overwritten"
    writer.close()


def released(daemon: Daemon) -> None:
    """Waits until nothing is pinned, and no lane is left but those of clients that are connected."""
    daemon.until(lambda s: not s["pins"] and s["lanes"] == s["clients"], "all pins and their lanes to go")
