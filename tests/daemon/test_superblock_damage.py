"""Memory of a former daemon: no epoch is taken twice, no entry kept as what it never was; which sizes hold."""

from __future__ import annotations

import os
import struct
from mmap import mmap

import pytest
from msgspec import structs

from tensord.daemon.memory.opening import ConfiguredSizes, resolved_sizes
from tensord.daemon.store.slots import Slots
from tensord.shm.ring.layout import EPOCH_MAX, PAGE_BYTES, IndexGeometry, Superblock

from ..daemon_process import MIB, Daemon
from ..faults.payloads import is_payload, key, lap, payload

RING_BYTES = 2 * MIB
TOKENS_AT, TTL_AT, CREATED_AT, OWNER_AT, COST_AT, NUMBER_AT, PARENT_AT, EXPIRES_AT = 56, 64, 72, 80, 88, 96, 104, 152
EPOCH_AT, RING_BYTES_AT, LIMIT_BYTES_AT = 24, 32, 88


def damage(daemon: Daemon, at: int, value: int) -> None:
    """The daemon is killed, and a number in the superblock damaged."""
    daemon.kill()
    with daemon.segment("index").open("r+b", buffering=0) as index:
        os.pwrite(index.fileno(), struct.pack("Q", value), at)


def forget_the_epoch(daemon: Daemon, epoch: int = 0) -> None:
    damage(daemon, EPOCH_AT, epoch)


def test_entries_stay_and_a_view_keeps_its_bytes_though_the_superblock_lost_its_epoch() -> None:
    with Daemon(ring_bytes=RING_BYTES, policy="lru") as daemon:
        reader = daemon.start().client()
        # With the lane of epoch 1 it stores in epoch 2: only the ring tells of that one.
        daemon.restart()
        daemon.attached(reader)
        for number in range(4):
            assert reader.put(key(number), payload(number), wait=True).state == "stored"
        lease = reader.get(key(0))
        assert lease is not None
        forget_the_epoch(daemon)
        daemon.start()
        status = daemon.status()
        assert (status["epoch"], status["store"]["recovered"]) == (3, 4)
        writer = daemon.client()
        for number in range(4):
            found = writer.get(key(number))
            assert found is not None and is_payload(found.tree, number)
        del found
        lap(writer, RING_BYTES, 10)
        assert not writer.contains(key(1)), "the ring was not overwritten"
        assert is_payload(lease.tree, 0)
        again = writer.get(key(0))
        assert again is not None and is_payload(again.tree, 0)


def test_a_damaged_slot_moves_no_epoch(daemon: Daemon) -> None:
    assert daemon.client().put(key(1), payload(1), wait=True).state == "stored"
    daemon.kill()
    with daemon.segment("index").open("r+b") as file:
        memory = mmap(file.fileno(), 0)
        geometry = Superblock.unpack(memory[:PAGE_BYTES]).geometry
        assert Slots(memoryview(memory), geometry).take(key(2), EPOCH_MAX << 48 | 1, 16 << 48, 64) >= 0
    status = daemon.start().status()
    assert (status["epoch"], status["store"]["recovered"]) == (2, 1)


def test_behind_the_last_epoch_a_daemon_says_what_to_do(daemon: Daemon) -> None:
    forget_the_epoch(daemon, EPOCH_MAX)
    assert "tensorctl purge" in daemon.refused()


@pytest.mark.parametrize(
    ("at", "value"), [(RING_BYTES_AT, 0), (RING_BYTES_AT, 63), (LIMIT_BYTES_AT, 0), (LIMIT_BYTES_AT, 1 << 60)]
)
def test_sizes_that_no_daemon_wrote_are_refused_and_the_ring_is_left_as_it_is(
    daemon: Daemon, at: int, value: int
) -> None:
    ring = daemon.segment("ring")
    before = ring.stat().st_size
    damage(daemon, at, value)
    log = daemon.refused()
    assert "tensorctl purge" in log and "Traceback" not in log
    assert ring.stat().st_size == before


@pytest.mark.parametrize(
    ("at", "value"),
    [
        *((at, 1 << 61) for at in (TOKENS_AT, TTL_AT, CREATED_AT, OWNER_AT, COST_AT, NUMBER_AT, PARENT_AT, EXPIRES_AT)),
        *((at, 3) for at in (TTL_AT, EXPIRES_AT)),
    ],
)
def test_an_entry_whose_header_is_damaged_anywhere_is_not_read_after_a_restart(at: int, value: int) -> None:
    with Daemon(ring_bytes=2 * MIB, policy="lru") as daemon:
        client = daemon.start().client()
        for number in range(2):
            put = client.put(key(number), payload(number), wait=True, tokens=5, ttl_s=1e6, cost_ms=2.0)
            assert put.state == "stored"
        daemon.kill()
        with daemon.segment("ring").open("r+b", buffering=0) as ring:
            start = ring.read(MIB).index(key(0)) - 16
            os.pwrite(ring.fileno(), struct.pack("Q", value), start + at)
        daemon.start()
        fresh = daemon.client()
        assert fresh.get(key(0)) is None
        other = fresh.get(key(1))
        assert other is not None and is_payload(other.tree, 1)
        # A damaged time of expiry may be over.
        daemon.until(lambda status: status["store"]["entries"] == 1, "the scrub finds the damage")


# ---- sizes

BOTH = frozenset({"ring_bytes", "max_entries"})
FORMER = Superblock(7, 3, 64 * MIB, IndexGeometry.for_entries(1000), limit_bytes=32 * MIB, max_entries=900)
ENTRIES, RING = frozenset({"max_entries"}), frozenset({"ring_bytes"})
ROOM = FORMER.geometry.entries_max


@pytest.mark.parametrize(
    ("ring_bytes", "max_entries", "derived", "limit_bytes", "segment_bytes", "entries"),
    [
        # Derived sizes stay as in the superblock, whatever memory is free now.
        (4096 * MIB, 1 << 20, BOTH, 32 * MIB, 64 * MIB, 900),
        # A configured ring is as large as it says, rounded up to what a ring can be; its segment never shrinks.
        (MIB, 900, frozenset(), MIB, 64 * MIB, 900),
        (64 * MIB + 1, 900, frozenset(), 64 * MIB + 64, 64 * MIB + 64, 900),
        (1 << 30, 900, frozenset(), 1 << 30, 1 << 30, 900),
        # Configured entries hold as far as the index goes.
        (MIB, 16, RING, 32 * MIB, 64 * MIB, 16),
        (MIB, ROOM + 1, RING, 32 * MIB, 64 * MIB, ROOM),
        # Derived entries follow a ring that was enlarged, and no other.
        (128 * MIB, 1200, ENTRIES, 128 * MIB, 128 * MIB, 1200),
        (128 * MIB, 500, ENTRIES, 128 * MIB, 128 * MIB, 900),
        (32 * MIB, 1200, ENTRIES, 32 * MIB, 64 * MIB, 900),
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
