"""What a policy learned is kept for the next daemon, whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import tensord
from tensord.daemon.memory import learned
from tensord.daemon.replacement import POLICIES
from tensord.errors import NotEnoughMemory
from tensord.shm.ring import segments

from ..daemon_process import MIB, Daemon, until
from ..memory_bench import key


@pytest.fixture
def memory() -> Iterator[Any]:
    made = SimpleNamespace(instance=f"learned-{os.getpid()}", superblock=SimpleNamespace(instance_id=7))
    yield made
    for each in segments.own(made.instance):
        segments.remove(each)


def kept(of: Any) -> Path:
    return segments.SHM_FOLDER / segments.segment_name(of.instance, "learned").lstrip("/")


def test_the_history_is_found_by_the_next_daemon_with_the_same_ring_and_policy(memory: Any) -> None:
    assert learned.read(memory, "lru") is None
    # A daemon that was killed while it wrote leaves this.
    os.close(segments.create(segments.segment_name(memory.instance, "learned.new"), 100))
    learned.save(memory, "lru", [b"first", b""])
    learned.save(memory, "lru", [b"last", b""])
    assert learned.read(memory, "lru") == [b"last", b""]
    assert segments.own(memory.instance) == [segments.segment_name(memory.instance, "learned")]
    assert learned.read(memory, "hazard") is None
    memory.superblock.instance_id += 1
    assert learned.read(memory, "lru") is None


@pytest.mark.parametrize("text", [b"", b"\x95", b"\x94\x01\x07\xa3lru\x91"])
def test_a_file_that_is_none_of_this_release_is_ignored(memory: Any, text: bytes) -> None:
    learned.save(memory, "lru", [b"learned", b""])
    kept(memory).write_bytes(text)
    assert learned.read(memory, "lru") is None


def test_where_there_is_no_room_what_was_kept_before_stays(memory: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    learned.save(memory, "lru", [b"first", b""])

    def full(fd: int, start: int, size_bytes: int) -> None:
        raise NotEnoughMemory("full")

    monkeypatch.setattr(segments, "allocate", full)
    learned.save(memory, "lru", [b"last", b""])
    assert learned.read(memory, "lru") == [b"first", b""]
    assert segments.own(memory.instance) == [segments.segment_name(memory.instance, "learned")]


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
        assert kept(daemon).exists()
        daemon.interrupt()
        assert not kept(daemon).exists(), "it goes with the memory"


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
