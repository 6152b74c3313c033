"""A damaged superblock: an epoch is never taken twice, and sizes that no daemon wrote are refused."""

from __future__ import annotations

import os
import struct
from mmap import mmap

import pytest

from tensord.daemon.store.slots import Slots
from tensord.shm.ring import segments
from tensord.shm.ring.layout import EPOCH_MAX, PAGE_BYTES, Superblock

from ..daemon_process import MIB, Daemon, until
from ..faults.payloads import is_payload, key, lap, payload

RING_BYTES = 2 * MIB
EPOCH_AT, RING_BYTES_AT, LIMIT_BYTES_AT = 24, 32, 88


def damage(daemon: Daemon, at: int, value: int) -> None:
    """The daemon is killed, and a number in the superblock damaged."""
    daemon.kill()
    with (segments.SHM_FOLDER / f"tensord.{daemon.instance}.index").open("r+b", buffering=0) as index:
        os.pwrite(index.fileno(), struct.pack("Q", value), at)


def forget_the_epoch(daemon: Daemon, epoch: int = 0) -> None:
    damage(daemon, EPOCH_AT, epoch)


def test_entries_stay_and_a_view_keeps_its_bytes_though_the_superblock_lost_its_epoch() -> None:
    with Daemon(ring_bytes=RING_BYTES, policy="lru") as daemon:
        reader = daemon.start().client()
        # With the lane of epoch 1 it stores in epoch 2: only the ring tells of that one.
        daemon.restart()
        until(lambda: reader.wait_connected(1.0) and reader.status()["epoch"] == 2, "it to attach again")
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


def test_a_daemon_whose_superblock_lost_its_epoch_goes_on_from_the_lanes_of_an_empty_ring(daemon: Daemon) -> None:
    daemon.restart()
    daemon.client()
    forget_the_epoch(daemon)
    assert daemon.start().status()["epoch"] == 3


def test_a_damaged_slot_moves_no_epoch(daemon: Daemon) -> None:
    assert daemon.client().put(key(1), payload(1), wait=True).state == "stored"
    daemon.kill()
    with (segments.SHM_FOLDER / f"tensord.{daemon.instance}.index").open("r+b") as file:
        memory = mmap(file.fileno(), 0)
        geometry = Superblock.unpack(memory[:PAGE_BYTES]).geometry
        assert Slots(memoryview(memory), geometry).take(key(2), EPOCH_MAX << 48 | 1, 16 << 48, 64) >= 0
    status = daemon.start().status()
    assert (status["epoch"], status["store"]["recovered"]) == (2, 1)


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to give files to another user")
def test_a_lane_of_another_user_moves_no_epoch(daemon: Daemon) -> None:
    lane = segments.SHM_FOLDER / f"tensord.{daemon.instance}.lane.{EPOCH_MAX << 32 | 1:x}.fenced"
    lane.touch()
    os.chown(lane, 65534, -1)
    daemon.kill()
    assert daemon.start().status()["epoch"] == 2


def test_behind_the_last_epoch_a_daemon_says_what_to_do(daemon: Daemon) -> None:
    forget_the_epoch(daemon, EPOCH_MAX)
    assert "tensorctl purge" in daemon.refused()


@pytest.mark.parametrize(
    ("at", "value"), [(RING_BYTES_AT, 0), (RING_BYTES_AT, 63), (LIMIT_BYTES_AT, 0), (LIMIT_BYTES_AT, 1 << 60)]
)
def test_sizes_that_no_daemon_wrote_are_refused_and_the_ring_is_left_as_it_is(
    daemon: Daemon, at: int, value: int
) -> None:
    ring = segments.SHM_FOLDER / f"tensord.{daemon.instance}.ring"
    before = ring.stat().st_size
    damage(daemon, at, value)
    log = daemon.refused()
    assert "tensorctl purge" in log and "Traceback" not in log
    assert ring.stat().st_size == before


@pytest.mark.parametrize("size_bytes", [1, 64])
def test_an_index_that_is_too_short_for_a_superblock_is_refused(daemon: Daemon, size_bytes: int) -> None:
    daemon.kill()
    os.truncate(segments.SHM_FOLDER / f"tensord.{daemon.instance}.index", size_bytes)
    log = daemon.refused()
    assert f"the index has {size_bytes} bytes" in log and "tensorctl purge" in log and "Traceback" not in log
