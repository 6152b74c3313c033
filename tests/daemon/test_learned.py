"""What a policy learned is kept for the next daemon of the same ring and policy, whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import tensord
from tensord.daemon.memory import learned
from tensord.daemon.replacement import POLICIES
from tensord.errors import NotEnoughMemory
from tensord.shm.ring import segments

from ..daemon_process import MIB, Daemon, until
from ..memory_bench import key

RING = 7


@pytest.fixture
def instance() -> Iterator[str]:
    name = f"learned-{os.getpid()}"
    yield name
    for each in segments.own(name):
        segments.remove(each)


def test_the_history_is_found_by_the_next_daemon_with_the_same_ring_and_policy(instance: str) -> None:
    assert learned.read(instance, RING, "lru") is None
    learned.write(instance, RING, "lru", [b"first", b""])
    learned.write(instance, RING, "lru", [b"last", b""])
    assert learned.read(instance, RING, "lru") == [b"last", b""]
    assert segments.own(instance) == [segments.segment_name(instance, "learned")]


def test_the_history_of_another_ring_or_policy_is_ignored(instance: str) -> None:
    learned.write(instance, RING, "lru", [b"learned", b""])
    assert learned.read(instance, RING + 1, "lru") is None
    assert learned.read(instance, RING, "hazard") is None


def test_every_damaged_or_shortened_byte_makes_it_ignored(instance: str) -> None:
    learned.write(instance, RING, "lru", [b"learned", b""])
    path = segments.SHM_FOLDER / segments.segment_name(instance, "learned").lstrip("/")
    whole = path.read_bytes()
    for at in range(len(whole)):
        path.write_bytes(whole[:at])
        assert learned.read(instance, RING, "lru") is None
        for flipped in (0x55, 0x80, 0xFF):
            path.write_bytes(whole[:at] + bytes([whole[at] ^ flipped]) + whole[at + 1 :])
            assert learned.read(instance, RING, "lru") is None
    path.write_bytes(whole)
    assert learned.read(instance, RING, "lru") == [b"learned", b""]


def test_a_file_of_another_mode_or_kind_is_ignored(instance: str) -> None:
    learned.write(instance, RING, "lru", [b"learned", b""])
    path = segments.SHM_FOLDER / segments.segment_name(instance, "learned").lstrip("/")
    path.chmod(0o666)
    assert learned.read(instance, RING, "lru") is None
    path.unlink()
    path.symlink_to("/etc/hostname")
    assert learned.read(instance, RING, "lru") is None
    path.unlink()


def test_where_there_is_no_room_what_was_kept_before_stays(instance: str, monkeypatch: pytest.MonkeyPatch) -> None:
    learned.write(instance, RING, "lru", [b"first", b""])

    def full(fd: int, start: int, size_bytes: int) -> None:
        raise NotEnoughMemory("full")

    monkeypatch.setattr(segments, "allocate", full)
    with pytest.raises(NotEnoughMemory):
        learned.write(instance, RING, "lru", [b"last", b""])
    assert learned.read(instance, RING, "lru") == [b"first", b""]
    assert segments.own(instance) == [segments.segment_name(instance, "learned")]


def test_a_partial_file_of_a_killed_daemon_is_harmless(instance: str) -> None:
    os.close(segments.create(segments.segment_name(instance, "learned.new"), 100))
    learned.write(instance, RING, "lru", [b"learned", b""])
    assert learned.read(instance, RING, "lru") == [b"learned", b""]


KEYS = [key(number) for number in range(1, 9)]


def filled_and_read(daemon: Daemon) -> None:
    """Eight entries fill the ring nearly; the one that was put first is the only one that was read."""
    with tensord.Client(daemon.socket) as client:
        for each in KEYS:
            assert client.put(each, np.zeros(MIB // 2, np.uint8), wait=True).state == "stored"
        assert client.get(KEYS[0]) is not None
        daemon.until(lambda status: status["store"]["hits"] == 1, "the read to be known")
    daemon.until(lambda status: status["lanes"] == 0, "its lane to be gone")


def read_one_outlives_the_next(daemon: Daemon) -> None:
    client = daemon.client()
    for number in range(4):
        client.put(key(100 + number), np.zeros(MIB // 2, np.uint8), wait=True)
    assert client.contains(KEYS[0])
    assert not client.contains(KEYS[1])


def kept(daemon: Daemon) -> Path:
    return segments.SHM_FOLDER / segments.segment_name(daemon.instance, "learned").lstrip("/")


def wait_for_another(file: Path) -> None:
    """Each save makes a new file."""

    def now() -> int:
        return file.stat().st_ino if file.exists() else 0

    before = now()
    until(lambda: now() not in (0, before), "what was learned to be saved")


def small(policy: str) -> Daemon:
    """A ring of nine entries, of which one place is kept free."""
    return Daemon(policy=policy, ring_bytes=4 * MIB + 640 * 1024)


@pytest.mark.parametrize("policy", POLICIES)
def test_reads_before_a_restart_count_after_it(policy: str) -> None:
    with small(policy) as daemon:
        daemon.start()
        filled_and_read(daemon)
        daemon.restart()
        read_one_outlives_the_next(daemon)


def test_reads_some_time_before_a_kill_count_after_it() -> None:
    with small("hazard") as daemon:
        daemon.constants = {"tensord.daemon.memory.learned.SAVE_EVERY_S": 0.05}
        daemon.start()
        filled_and_read(daemon)
        # The save that is under way may be of before the read; the one after the next is not.
        for _ in range(2):
            wait_for_another(kept(daemon))
        daemon.kill()
        daemon.start()
        read_one_outlives_the_next(daemon)


def test_nothing_is_left_of_it_when_the_memory_goes() -> None:
    with small("lru") as daemon:
        daemon.start()
        filled_and_read(daemon)
        daemon.restart()
        assert kept(daemon).exists()
        daemon.interrupt()
        assert not kept(daemon).exists()
