"""Which sizes hold when a daemon finds the memory of a former one."""

from __future__ import annotations

import pytest
from msgspec import structs

from tensord.daemon.memory.opening import ConfiguredSizes, resolved_sizes
from tensord.shm.ring.layout import IndexGeometry, Superblock

MIB = 1 << 20
BOTH = frozenset({"ring_bytes", "max_entries"})
FORMER = Superblock(7, 3, 64 * MIB, IndexGeometry.for_entries(1000), limit_bytes=32 * MIB, max_entries=900)


ENTRIES, RING = frozenset({"max_entries"}), frozenset({"ring_bytes"})
ROOM = FORMER.geometry.entries_max


@pytest.mark.parametrize(
    ("ring_bytes", "max_entries", "derived", "limit_bytes", "segment_bytes", "entries"),
    [
        # Derived sizes stay as in the superblock, whatever memory is free now.
        (MIB, 16, BOTH, 32 * MIB, 64 * MIB, 900),
        (4096 * MIB, 1 << 20, BOTH, 32 * MIB, 64 * MIB, 900),
        # A configured ring is as large as it says, rounded up to what a ring can be; its segment never shrinks.
        (MIB, 900, frozenset(), MIB, 64 * MIB, 900),
        (48 * MIB, 900, frozenset(), 48 * MIB, 64 * MIB, 900),
        (64 * MIB, 900, frozenset(), 64 * MIB, 64 * MIB, 900),
        (64 * MIB + 1, 900, frozenset(), 64 * MIB + 64, 64 * MIB + 64, 900),
        (1 << 30, 900, frozenset(), 1 << 30, 1 << 30, 900),
        # Configured entries hold as far as the index goes.
        (MIB, 16, RING, 32 * MIB, 64 * MIB, 16),
        (MIB, ROOM, RING, 32 * MIB, 64 * MIB, ROOM),
        (MIB, ROOM + 1, RING, 32 * MIB, 64 * MIB, ROOM),
        # Derived entries follow a ring that was enlarged, and no other.
        (128 * MIB, 1200, ENTRIES, 128 * MIB, 128 * MIB, 1200),
        (128 * MIB, 500, ENTRIES, 128 * MIB, 128 * MIB, 900),
        (32 * MIB, 1200, ENTRIES, 32 * MIB, 64 * MIB, 900),
        (16 * MIB, 100, ENTRIES, 16 * MIB, 64 * MIB, 900),
        (4096 * MIB, 1 << 20, ENTRIES, 4096 * MIB, 4096 * MIB, ROOM),
    ],
)
def test_which_sizes_hold_over_the_memory_of_a_former_daemon(
    ring_bytes: int, max_entries: int, derived: frozenset[str], limit_bytes: int, segment_bytes: int, entries: int
) -> None:
    found, notices = resolved_sizes(FORMER, ConfiguredSizes(ring_bytes, max_entries, derived=derived))
    sizes = {"limit_bytes": limit_bytes, "ring_bytes": segment_bytes, "max_entries": entries}
    assert found == structs.replace(FORMER, **sizes)
    assert bool(notices) == (entries == ROOM < max_entries)
    for notice in notices:
        assert f"max_entries is {max_entries}" in notice and f"room for {ROOM}" in notice
        assert "tensorctl purge" in notice
