"""The daemon killed while it moves entries within the ring: each entry is cached afterwards, complete, and once.

The ring evicts nothing here, so no entry may be missing. Entries with odd numbers are children of entry 0, and stay so.
"""

from __future__ import annotations

import pytest

from ..daemon_process import MIB, Daemon, until
from ..faults.payloads import has, key, payload

KIB = 1 << 10
ENTRIES = 16
HOLES = (2, 5, 6, 9, 12)
CHILDREN = range(1, ENTRIES, 2)
LARGE_BYTES = 340 * KIB
POINTS = {
    "daemon.room.moves:RingMoves.begin": (4, 12),
    "daemon.memory.copier:Copier._move": (1, 5, 9, 12),
    "daemon.room.moves:RingMoves.end": (1, 7, 15),
    "daemon.store.slots:Slots.take": (8, 13),
    "daemon.store.table:RowTable.swap": (4, 8),
    "daemon.store.slots:Slots.move": (1, 2, 3, 4, 5),
    "daemon.store.slots:Slots.publish": (1, 3),
    "daemon.store.slots:Slots.unpublish": (1, 3),
}
"""Lines within each function, counted from the moment at which the free space is fragmented."""


@pytest.mark.parametrize("point", list(POINTS))
def test_a_daemon_killed_while_entries_move_loses_none_and_shows_none_torn(point: str) -> None:
    for at in POINTS[point]:
        with Daemon(ring_bytes=2 * MIB, policy="lru") as daemon:
            told = daemon.folder / "places"
            full_of_holes(daemon)
            daemon.kill()
            daemon.before = "tests.crashes.points:arm", {"patterns": [point], "at": at, "told": str(told)}
            daemon.start()
            with daemon.client() as client:
                client.put(key(99), payload(99, LARGE_BYTES), timeout_s=5)
                until(told.exists, f"line {at} of {point} in a move")
            until(lambda: not daemon.running, "the daemon's end")
            daemon.before = None
            daemon.start()
            with daemon.client() as client:
                for number in set(range(ENTRIES)) - set(HOLES):
                    assert has(client, number), f"{number} is lost"
                client.put(key(99), payload(99, LARGE_BYTES), wait=True)
                assert all(has(client, number) for number in {*range(ENTRIES), 99} - set(HOLES))
                client.evict(key(0))
                until(lambda: not any(has(client, number) for number in CHILDREN), "the children to end")
                assert all(has(client, number) for number in {*range(2, ENTRIES, 2), 99} - set(HOLES))


def full_of_holes(daemon: Daemon) -> None:
    """The free space is large enough for the large entry, but fragmented."""
    daemon.start()
    with daemon.client() as client:
        # Room for two more is left: the daemon lends one place ahead, and keeps room for another.
        size = int(client.status()["store"]["ring_bytes"]) // (ENTRIES + 2)
        for number in range(ENTRIES):
            parent = key(0) if number in CHILDREN else None
            client.put(key(number), payload(number, size), parent=parent, wait=True)
        assert client.evict(*map(key, HOLES)) == len(HOLES)
