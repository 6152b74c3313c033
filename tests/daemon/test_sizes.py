"""Which sizes hold when a daemon finds the memory of a former one."""

from __future__ import annotations

import pytest

from tensord.daemon.memory.sizes import ConfiguredSizes, resolved_sizes
from tensord.shm.ring.layout import IndexGeometry, Superblock

MIB = 1 << 20
BOTH = frozenset({"ring_bytes", "max_entries"})
FORMER = Superblock(7, 3, 64 * MIB, IndexGeometry.for_entries(1000), limit_bytes=32 * MIB, max_entries=900)


@pytest.mark.parametrize("ring_bytes", [MIB, 32 * MIB, 4096 * MIB])
@pytest.mark.parametrize("max_entries", [16, 900, 1 << 20])
def test_derived_sizes_stay_as_in_the_superblock_whatever_memory_is_free_now(ring_bytes: int, max_entries: int) -> None:
    assert resolved_sizes(FORMER, ConfiguredSizes(ring_bytes, max_entries, derived=BOTH)) == (FORMER, [])


@pytest.mark.parametrize(
    ("ring_bytes", "segment_bytes"),
    [(MIB, 64 * MIB), (48 * MIB, 64 * MIB), (64 * MIB, 64 * MIB), (64 * MIB + 64, 64 * MIB + 64), (1 << 30, 1 << 30)],
)
def test_a_configured_ring_is_as_large_as_it_says_and_its_segment_never_shrinks(
    ring_bytes: int, segment_bytes: int
) -> None:
    found, notices = resolved_sizes(FORMER, ConfiguredSizes(ring_bytes, 900))
    assert (found.limit_bytes, found.ring_bytes, notices) == (ring_bytes, segment_bytes, [])
    assert (found.instance_id, found.epoch, found.geometry) == (FORMER.instance_id, FORMER.epoch, FORMER.geometry)


def test_a_configured_ring_is_rounded_up_to_what_a_ring_can_be() -> None:
    found, _ = resolved_sizes(FORMER, ConfiguredSizes(64 * MIB + 1, 900))
    assert found.limit_bytes == found.ring_bytes == 64 * MIB + 64


@pytest.mark.parametrize("max_entries", [16, 900, 1000, FORMER.geometry.entries_max])
def test_configured_entries_hold_as_far_as_the_index_goes(max_entries: int) -> None:
    found, notices = resolved_sizes(FORMER, ConfiguredSizes(MIB, max_entries, derived=frozenset({"ring_bytes"})))
    assert (found.max_entries, found.limit_bytes, notices) == (max_entries, 32 * MIB, [])


def test_more_entries_than_the_index_has_room_for_are_said_with_what_to_do() -> None:
    room = FORMER.geometry.entries_max
    found, notices = resolved_sizes(FORMER, ConfiguredSizes(MIB, room + 1, derived=frozenset({"ring_bytes"})))
    assert found.max_entries == room
    (notice,) = notices
    assert f"max_entries is {room + 1}" in notice and f"room for {room}" in notice and "tensorctl purge" in notice


def test_derived_entries_follow_a_ring_that_was_enlarged_and_no_other() -> None:
    entries = frozenset({"max_entries"})
    assert resolved_sizes(FORMER, ConfiguredSizes(128 * MIB, 1200, derived=entries))[0].max_entries == 1200
    assert resolved_sizes(FORMER, ConfiguredSizes(128 * MIB, 500, derived=entries))[0].max_entries == 900
    assert resolved_sizes(FORMER, ConfiguredSizes(32 * MIB, 1200, derived=entries))[0].max_entries == 900
    assert resolved_sizes(FORMER, ConfiguredSizes(16 * MIB, 100, derived=entries))[0].max_entries == 900
    assert resolved_sizes(FORMER, ConfiguredSizes(4096 * MIB, 1 << 20, derived=entries))[1]
