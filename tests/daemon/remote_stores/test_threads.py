"""The threads that use a remote store."""

from __future__ import annotations

import threading
from pathlib import Path
from queue import Queue
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from tensord.daemon.forms.effects import ReadRemote, RemoteRequest, RemoveRemote, SaveRemote, Seek, WithdrawClaim
from tensord.daemon.forms.events import RemoteDone, RemoteEntry
from tensord.daemon.remote_stores.directory import DirectoryStore
from tensord.daemon.remote_stores.store import RemoteStore
from tensord.daemon.remote_stores.threads import THREAD_NAME, RemoteThreads
from tensord.errors import Corrupt
from tensord.shm.payloads.copy import checksum_of
from tensord.shm.ring.layout import SpanHeader
from tests.daemon_process import PATIENCE_S

KEY = bytes(range(28)) + bytes(4)


class Running:
    def __init__(self, store: RemoteStore) -> None:
        self.outcomes: Queue[RemoteDone] = Queue()
        self.ring: np.ndarray[Any, np.dtype[np.uint8]] = np.zeros(4096, np.uint8)
        self.threads = RemoteThreads(store, self.ring, lambda *_: None, self.outcomes.put, lambda: 0.0)

    def outcome(self, request: RemoteRequest) -> RemoteDone:
        self.threads.submit(request)
        return self.outcomes.get(timeout=PATIENCE_S)

    def close(self) -> None:
        """Waits for the threads, too, which the next test would take for its own."""
        self.threads.close()
        for thread in named():
            thread.join(PATIENCE_S)


def entry_at(running: Running, offset: int, checksum: int) -> None:
    """Places an entry in the ring."""
    header = SpanHeader(KEY, 5, 100, 10, checksum, 3, 1.0, 60.0, 0)
    running.ring[offset : offset + 192] = np.frombuffer(header.pack(), np.uint8)
    running.ring[offset + 192 : offset + 292] = np.arange(100, dtype=np.uint8)


@pytest.mark.parametrize("known", [True, False])
def test_an_entry_is_read_back_whole_whether_or_not_its_checksum_was_known_when_it_was_written(
    tmp_path: Path, known: bool
) -> None:
    running = Running(DirectoryStore(tmp_path))
    entry_at(running, 0, checksum_of(np.arange(100, dtype=np.uint8)) if known else 0)
    assert running.outcome(SaveRemote(KEY, 0, 100)).answer.written
    checksum = checksum_of(np.arange(100, dtype=np.uint8))
    read: RemoteEntry = running.outcome(ReadRemote(KEY, 1024, 100)).answer
    assert replace(read, lives_s=None) == RemoteEntry(100, 10, tokens=3, checksum=checksum)
    assert read.lives_s == pytest.approx(60.0, abs=5.0)
    assert running.ring[1024 + 192 : 1024 + 292].tolist() == list(range(100))
    assert isinstance(running.outcome(ReadRemote(KEY, 1024, 101)).error, Corrupt)
    running.close()


def named(kind: str = "") -> list[threading.Thread]:
    """This process's threads of a kind."""
    return [thread for thread in threading.enumerate() if thread.name.startswith(f"{THREAD_NAME}-{kind}")]


def test_puts_that_end_after_the_store_was_closed_ask_nothing_of_it(tmp_path: Path) -> None:
    running = Running(DirectoryStore(tmp_path))
    running.close()
    for request in (Seek((KEY,)), RemoveRemote((KEY,)), WithdrawClaim(KEY)):
        running.threads.submit(request)
    assert running.outcomes.empty()
